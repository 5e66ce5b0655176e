//go:build amd64 || arm64

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

func TestCallNumbers(t *testing.T) {
	for got, want := range map[uint32]uint32{
		sysOpenByHandleAt: unix.SYS_OPEN_BY_HANDLE_AT, sysSetns: unix.SYS_SETNS, sysFinitModule: unix.SYS_FINIT_MODULE,
		sysProcessVMReadv: unix.SYS_PROCESS_VM_READV, sysProcessVMWritev: unix.SYS_PROCESS_VM_WRITEV,
		sysSeccomp: unix.SYS_SECCOMP, sysBPF: unix.SYS_BPF, sysExecveat: unix.SYS_EXECVEAT, sysUserfaultfd: unix.SYS_USERFAULTFD,
		sysKexecFileLoad: unix.SYS_KEXEC_FILE_LOAD, sysIOUringSetup: unix.SYS_IO_URING_SETUP, sysOpenTree: unix.SYS_OPEN_TREE, sysMoveMount: unix.SYS_MOVE_MOUNT,
		sysFsopen: unix.SYS_FSOPEN, sysFsconfig: unix.SYS_FSCONFIG, sysFsmount: unix.SYS_FSMOUNT, sysClone3: unix.SYS_CLONE3,
		sysPidfdGetfd: unix.SYS_PIDFD_GETFD, sysMountSetattr: unix.SYS_MOUNT_SETATTR,
	} {
		if got != want {
			t.Errorf("%d instead of %d", got, want)
		}
	}
}

// cloneInto makes a process with namespaces of its own, which ends at once.
func cloneInto(flags uintptr) syscall.Errno {
	pid, _, errno := syscall.RawSyscall6(syscall.SYS_CLONE, flags|uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno == 0 && pid == 0 {
		_, _, _ = syscall.RawSyscall(syscall.SYS_EXIT_GROUP, 0, 0, 0)
	}
	return errno
}
