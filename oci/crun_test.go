package oci

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/test/kit/claim"
	"github.com/crius-run/crius/test/kit/wait"
)

// crun below 1.9 mounts itself somewhere at each call. If it is killed just
// then it leaves that mount, which must be in a place that is removed with the
// container.
func TestCrunMountsItselfInTheContainersDirectory(t *testing.T) {
	r := &cli{entry: &entry{name: "crun", handler: Handler{Path: "crun", Root: t.TempDir()}}}
	ref := Ref{ID: strings.Repeat("a", 64), Dir: t.TempDir()}
	names := watch(t, ref.Dir)
	if _, err := r.run(t.Context(), ref, nil, "state"); err == nil { // there is no such container
		t.Error("crun knows a container that does not exist")
	}
	if got := names(); !strings.HasPrefix(got, "crun.") {
		t.Errorf("in the container's directory it made %q", got)
	}
	if left, err := filepath.Glob(filepath.Join(ref.Dir, "*")); err != nil || len(left) > 0 {
		t.Errorf("it leaves %q, %v", left, err)
	}
}

// The pid of an ended container may now be a thread's. crun's delete by force
// then says that it cannot be killed, for as long as the thread lives.
func TestCrunForgetsAContainerWhosePidIsAThread(t *testing.T) {
	r := &cli{entry: &entry{name: "crun", handler: Handler{Path: "crun", Root: t.TempDir()}}}
	ref := Ref{ID: strings.ToLower(rand.Text()), Dir: t.TempDir()}
	owned, err := claim.New()
	if err != nil {
		t.Fatal(err)
	}
	cgroupPath := "/" + owned.ID
	t.Cleanup(func() {
		if err := errors.Join(cgroup.Remove(context.Background(), cgroupPath), owned.Release()); err != nil {
			t.Error(err)
		}
	})
	mounts := []string{`{"destination": "/dev", "source": "tmpfs", "type": "tmpfs"}`}
	for _, dir := range []string{"/usr", "/lib", "/lib64"} {
		mounts = append(mounts, fmt.Sprintf(`{"destination": %[1]q, "source": %[1]q, "type": "bind", "options": ["bind", "ro"]}`, dir))
	}
	config := `{"ociVersion": "1.0.2", "root": {"path": "` + t.TempDir() + `"}, "mounts": [` + strings.Join(mounts, ", ") + `],
		"process": {"args": ["/usr/bin/true"], "cwd": "/", "user": {"uid": 0, "gid": 0}},
		"linux": {"cgroupsPath": "` + cgroupPath + `", "namespaces": [{"type": "pid"}, {"type": "mount"}]}}`
	if err := os.WriteFile(filepath.Join(ref.Dir, "config.json"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	runtime := func(args ...string) string {
		t.Helper()
		// Not a pipe's standard streams, which the container would keep open.
		out, err := os.Create(filepath.Join(ref.Dir, "out"))
		if err != nil {
			t.Fatal(err)
		}
		defer out.Close()
		cmd := exec.CommandContext(t.Context(), "crun", append([]string{"--root", r.handler.Root}, args...)...)
		cmd.Stdout, cmd.Stderr = out, out
		err = cmd.Run()
		text, _ := os.ReadFile(out.Name())
		if err != nil {
			t.Fatalf("crun %s: %v: %s", args, err, text)
		}
		return string(text)
	}
	runtime("create", "--bundle", ref.Dir, ref.ID)
	runtime("start", ref.ID)
	wait.For(t, "the container to end", func() bool { return strings.Contains(runtime("state", ref.ID), `"stopped"`) })
	tid, done := make(chan int), make(chan struct{})
	defer close(done)
	go func() {
		goruntime.LockOSThread() // and never unlocked, so that the thread ends with this goroutine
		tid <- unix.Gettid()
		<-done
	}()
	giveThread(t, filepath.Join(r.handler.Root, ref.ID, "status"), <-tid)
	if err := r.forget(t.Context(), ref); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(r.handler.Root); err != nil || len(left) > 0 {
		t.Errorf("%v, %v are left", left, err)
	}
}

// giveThread makes crun believe that the container's process was tid, and started soon after the
// node: the thread may have started in the same hundredth of a second as the process that there was.
func giveThread(t *testing.T, file string, tid int) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var status map[string]any
	if err := json.Unmarshal(text, &status); err != nil {
		t.Fatal(err)
	}
	status["pid"], status["process-start-time"] = tid, 1
	if text, err = json.Marshal(status); err == nil {
		err = os.WriteFile(file, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// watch returns a function that returns the first file made in dir.
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
