package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// `go test -exec` puts isolateRole in front of a test program. It starts the
// runner once more, as the init of a PID namespace, which starts the program.
const (
	isolateRole = "isolate"
	initRole    = "init"
)

// tmpVariable names the directory over which each init mounts a tmpfs.
const tmpVariable = "CRIUS_TEST_TMP"

// shared is the directory shared by all container tools of a node.
const shared = "/var/lib/containers"

// actIfAsked does not return if the program has been started in one of the
// roles.
func actIfAsked() {
	if len(os.Args) < 3 {
		return
	}
	switch os.Args[1] {
	case isolateRole:
		os.Exit(isolate(os.Args[2:]))
	case initRole:
		os.Exit(beInit(os.Args[2:]))
	}
}

// isolate runs a test program in its own PID and mount namespaces and returns
// its exit code. The namespace's processes end with this one, which ends with
// `go test`.
func isolate(argv []string) int {
	runtime.LockOSThread() // the death signal comes with the death of the thread that forked
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return complain(err)
	}
	cmd := exec.Command(argv[0], argv[1:]...)
	if os.Geteuid() == 0 {
		cmd = exec.Command("/proc/self/exe", append([]string{initRole}, argv...)...)
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS,
			Pdeathsig:  syscall.SIGKILL,
		}
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	var exit *exec.ExitError
	if err := cmd.Run(); errors.As(err, &exit) {
		return max(exit.ExitCode(), 1)
	} else if err != nil {
		return complain(err)
	}
	return 0
}

// beInit runs a test program, reaps its orphans and returns its exit code, or 1
// if it leaves processes, mounts or temporary files.
func beInit(argv []string) int {
	tmp := os.Getenv(tmpVariable)
	if err := settle(tmp); err != nil {
		return complain(err)
	}
	before, err := mounts()
	if err != nil {
		return complain(err)
	}
	program, err := os.StartProcess(argv[0], argv, &os.ProcAttr{Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}})
	if err != nil {
		return complain(err)
	}
	code := await(program.Pid)
	if left := leftovers(tmp, before); len(left) > 0 {
		fmt.Printf("the tests have left behind:\n%s\n", strings.Join(left, "\n"))
		code = max(code, 1)
	}
	fmt.Printf("%s%.1f\n", cpuLine, cpuUsed())
	thawAll()
	return code
}

// cpuLine begins the line by which an init reports to the tally how many
// seconds of CPU the program and its descendants have used.
const cpuLine = "seconds of CPU: "

// cpuUsed returns the CPU seconds of reaped processes.
func cpuUsed() float64 {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_CHILDREN, &u) // never fails
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}

// thawAll lets processes in frozen cgroups (v1) receive the SIGKILL that they
// get when init ends: the kernel waits for every one of them.
func thawAll() {
	files, _ := filepath.Glob("/proc/[0-9]*/cgroup")
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended
		}
		for line := range strings.Lines(string(text)) {
			if _, path, found := strings.Cut(strings.TrimSpace(line), ":freezer:"); found {
				_ = os.WriteFile("/sys/fs/cgroup/freezer"+path+"/freezer.state", []byte("THAWED"), 0)
			}
		}
	}
}

// settle gives the namespaces a /proc, a directory for temporary files, and
// their own directory where the container tools of a node leave signatures and
// caches that no option moves.
func settle(tmp string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if err := os.MkdirAll(shared, 0o755); err != nil {
		return err
	}
	for _, dir := range []string{tmp, shared} {
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=1777"); err != nil {
			return fmt.Errorf("mount %s: %w", dir, err)
		}
	}
	return os.Setenv("TMPDIR", tmp)
}

// await reaps until the process has ended, and returns its exit code.
func await(pid int) int {
	for {
		var status unix.WaitStatus
		reaped, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return complain(fmt.Errorf("wait for the test program: %w", err))
		case reaped == pid && status.Signaled():
			return complain(fmt.Errorf("the test program was killed: %v", status.Signal()))
		case reaped == pid:
			return status.ExitStatus()
		}
	}
}

// leftovers returns the processes that are still running, the new mounts and
// the temporary files.
func leftovers(tmp string, before map[string]bool) []string {
	left, dying := processes()
	for end := time.Now().Add(deathTime); dying && time.Now().Before(end); left, dying = processes() {
		time.Sleep(time.Millisecond)
	}
	after, err := mounts()
	if err != nil {
		left = append(left, err.Error())
	}
	for line := range after {
		if !before[line] {
			left = append(left, "mount "+line)
		}
	}
	files, _ := filepath.Glob(tmp + "/*")
	for _, file := range files {
		left = append(left, "file "+file)
	}
	return left
}

// deathTime is how long dying processes get.
const deathTime = 10 * time.Second

// processes returns those that are left after zombies have been reaped, and
// whether one of them is dying: it has no command line any more.
func processes() (left []string, dying bool) {
	for {
		pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
		if pid <= 0 && err != unix.EINTR {
			break
		}
	}
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		if dir == "/proc/"+strconv.Itoa(os.Getpid()) {
			continue
		}
		if argv, err := os.ReadFile(dir + "/cmdline"); err == nil {
			left = append(left, fmt.Sprintf("process %s: %q", filepath.Base(dir), strings.ReplaceAll(string(argv), "\x00", " ")))
			dying = dying || len(argv) == 0
		}
	}
	return left, dying
}

// mounts returns those of the namespace: id, parent, device, root and mount
// point. It leaves out the options, because a program in another namespace may
// change those of a shared file system.
func mounts() (map[string]bool, error) {
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	found := map[string]bool{}
	for line := range strings.Lines(string(table)) {
		fields := strings.Fields(line)
		found[strings.Join(fields[:min(5, len(fields))], " ")] = true
	}
	return found, nil
}

func complain(err error) int {
	fmt.Fprintln(os.Stderr, "runner:", err)
	return 1
}
