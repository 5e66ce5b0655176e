package oci

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// crun below 1.9 mounts itself somewhere at each call. Killed just then it
// leaves that mount, which has to be where it goes with the container.
func TestCrunMountsItselfInTheContainersDirectory(t *testing.T) {
	r := &cli{name: "crun", handler: Handler{Path: "crun", Root: t.TempDir()}}
	ref := Ref{ID: strings.Repeat("a", 64), Dir: t.TempDir()}
	names := watch(t, ref.Dir)
	if _, err := r.run(t.Context(), ref, nil, "state"); err == nil { // there is none
		t.Error("crun knows a container that does not exist")
	}
	if got := names(); !strings.HasPrefix(got, "crun.") {
		t.Errorf("in the container's directory it made %q", got)
	}
	if left, err := filepath.Glob(filepath.Join(ref.Dir, "*")); err != nil || len(left) > 0 {
		t.Errorf("it leaves %q, %v", left, err)
	}
}

// watch returns a function that tells which file has been made first in dir.
func watch(t *testing.T, dir string) (first func() string) {
	t.Helper()
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	events := os.NewFile(uintptr(fd), "inotify")
	t.Cleanup(func() { events.Close() })
	if _, err := unix.InotifyAddWatch(fd, dir, unix.IN_CREATE); err != nil {
		t.Fatal(err)
	}
	return func() string {
		buf := make([]byte, unix.SizeofInotifyEvent+unix.NAME_MAX+1)
		n, err := unix.Read(fd, buf)
		if errors.Is(err, unix.EAGAIN) {
			return ""
		}
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimRight(string(buf[unix.SizeofInotifyEvent:n]), "\x00")
	}
}
