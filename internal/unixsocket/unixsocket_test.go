package unixsocket

import (
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// withUmask runs f on a thread that has its own umask, and ends with f.
func withUmask(t *testing.T, umask int, f func() error) error {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocks it
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			done <- err
			return
		}
		unix.Umask(umask)
		done <- f()
	}()
	return <-done
}

func mode(t *testing.T, path string) fs.FileMode {
	t.Helper()
	info, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	return info.Mode()
}

// There is no moment at which the umask decides who may connect.
func TestSocketIsBornClosed(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "s")
	err := withUmask(t, 0, func() error {
		l, err := listenClosed(t.Context(), path)
		if err == nil {
			t.Cleanup(func() { l.Close() })
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := mode(t, path); got != fs.ModeSocket {
		t.Errorf("socket has mode %v", got)
	}
}

func TestModeIgnoresUmask(t *testing.T) {
	t.Parallel()
	for _, umask := range []int{0, 0o022, 0o777} {
		for _, want := range []fs.FileMode{0o600, 0o660, 0o666} {
			path := filepath.Join(t.TempDir(), "s")
			err := withUmask(t, umask, func() error {
				l, err := Listen(t.Context(), path, Access{want, os.Getegid()})
				if err == nil {
					t.Cleanup(func() { l.Close() })
				}
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			if got := mode(t, path); got != fs.ModeSocket|want {
				t.Errorf("umask %#o: socket has mode %v, want %v", umask, got, want)
			}
		}
	}
}

func TestBindIsPrivate(t *testing.T) {
	t.Parallel()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	path := filepath.Join(t.TempDir(), "s")
	if err := withUmask(t, 0, func() error { return Bind(fd, path) }); err != nil {
		t.Fatal(err)
	}
	if got := mode(t, path); got != fs.ModeSocket|0o600 {
		t.Errorf("socket has mode %v", got)
	}
}
