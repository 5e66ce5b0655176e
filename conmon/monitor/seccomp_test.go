//go:build amd64 || arm || arm64 || ppc64le || riscv64

package monitor

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/net/bpf"
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
		"execute":         func() error { return syscall.Exec("/bin/true", []string{"true"}, nil) },
		"start a program": func() error { return exec.Command("/bin/true").Run() },
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

// Each jump of the filter leads where it should: refused are the calls listed, and
// no others.
func TestFilterRefusesWhatIsListed(t *testing.T) {
	t.Parallel()
	var filter [filterLength]syscall.SockFilter
	writeFilter(&filter)
	raw := make([]bpf.RawInstruction, 0, filterLength)
	for _, f := range filter {
		raw = append(raw, bpf.RawInstruction{Op: f.Code, Jt: f.Jt, Jf: f.Jf, K: f.K})
	}
	program, _ := bpf.Disassemble(raw)
	vm, err := bpf.NewVM(program)
	if err != nil {
		t.Fatal(err)
	}
	answer := func(arch, call, flags uint32) uint32 {
		data := make([]byte, 64) // struct seccomp_data; this machine reads it in network order
		binary.BigEndian.PutUint32(data, call)
		binary.BigEndian.PutUint32(data[4:], arch)
		binary.BigEndian.PutUint32(data[16:], flags)
		got, err := vm.Run(data)
		if err != nil {
			t.Fatal(err)
		}
		return uint32(got)
	}
	const allowed, refusal, lacking = unix.SECCOMP_RET_ALLOW, unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM), unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)
	expect := func(what string, got, want uint32) {
		if got != want {
			t.Errorf("%s: %#x, want %#x", what, got, want)
		}
	}
	for call := range uint32(1024) {
		want := uint32(allowed)
		if slices.Contains(refused[:], call) || slices.Contains(refusedHere[:], call) {
			want = refusal
		} else if call == unix.SYS_CLONE3 {
			want = lacking
		}
		expect(fmt.Sprintf("call %d", call), answer(audit, call, 0), want)
		expect(fmt.Sprintf("call %d of another architecture", call), answer(audit^1, call, 0), refusal)
		expect(fmt.Sprintf("call %d of x32", call), answer(audit, call|0x40000000, 0), refusal)
	}
	expect("a new thread", answer(audit, unix.SYS_CLONE, unix.CLONE_VM|unix.CLONE_THREAD), allowed)
	for _, flag := range []uint32{unix.CLONE_NEWNS, unix.CLONE_NEWCGROUP, unix.CLONE_NEWUTS, unix.CLONE_NEWIPC, unix.CLONE_NEWUSER, unix.CLONE_NEWPID, unix.CLONE_NEWNET} {
		expect(fmt.Sprintf("clone with %#x", flag), answer(audit, unix.SYS_CLONE, unix.CLONE_VM|flag), refusal)
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
