package monitor

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// lockedRole names a directory, and makes this test program refuse itself what a
// monitor does, and try what it then can.
const lockedRole = "MONITOR_TEST_LOCKED"

func TestMain(m *testing.M) {
	if dir := os.Getenv(lockedRole); dir != "" {
		actLocked(dir)
	}
	os.Exit(m.Run())
}

func TestRefusedCalls(t *testing.T) {
	t.Parallel()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), lockedRole+"="+t.TempDir())
	if out, err := cmd.CombinedOutput(); err != nil || string(out) != "locked\n" {
		t.Errorf("%v\n%s", err, out)
	}
}

func actLocked(dir string) {
	if err := refuseCalls(); err != nil {
		fmt.Println(err)
	}
	for what, call := range map[string]func() error{
		"execute":         func() error { return syscall.Exec("/proc/self/exe", []string{"x"}, nil) },
		"start a program": func() error { return exec.Command("/proc/self/exe").Run() },
		"make a socket":   func() error { _, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0); return err },
		"unshare":         func() error { return unix.Unshare(unix.CLONE_NEWUSER) },
		"clone":           func() error { return failed(cloneInto(unix.CLONE_NEWUSER)) },
		"change the root": func() error { return unix.Chroot(dir) },
		"trace":           func() error { return unix.PtraceAttach(os.Getppid()) },
	} {
		if err := call(); !errors.Is(err, unix.EPERM) {
			fmt.Printf("%s: %v, want EPERM\n", what, err)
		}
	}
	for range 8 { // threads made before and after
		done := make(chan error)
		go func() {
			runtime.LockOSThread()
			done <- os.WriteFile(filepath.Join(dir, "file"), []byte("x"), 0o600)
		}()
		if err := <-done; err != nil {
			fmt.Println(err)
		}
	}
	threads, _ := filepath.Glob("/proc/self/task/*/status")
	for _, thread := range threads {
		status, err := os.ReadFile(thread)
		for _, want := range []string{"NoNewPrivs:\t1\n", "Seccomp:\t2\n"} {
			if err == nil && !strings.Contains(string(status), want) {
				fmt.Printf("%s lacks %q:\n%s\n", thread, want, status)
			}
		}
	}
	fmt.Println("locked")
	os.Exit(0)
}

// cloneInto makes a process with namespaces of its own, which ends at once.
func cloneInto(flags uintptr) syscall.Errno {
	pid, _, errno := syscall.RawSyscall6(syscall.SYS_CLONE, flags|uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno == 0 && pid == 0 {
		_, _, _ = syscall.RawSyscall(syscall.SYS_EXIT_GROUP, 0, 0, 0)
	}
	return errno
}
