//go:build amd64

package rest_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon/rest"
	"github.com/crius-run/crius/test/kit/wait"
)

// A process rests again and again: each time nothing is left of the program,
// each event restarts it, and what belongs to the process stays.
func TestUntil(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	program := filepath.Join(dir, "sleeper")
	build := exec.Command("go", "build", "-o", program, "./testdata/sleeper")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	sleeper := exec.CommandContext(t.Context(), program, filepath.Join(dir, "lives"), "argument")
	input, err := sleeper.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	output, err := sleeper.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	sleeper.Stderr = os.Stderr
	if err := sleeper.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(output)
	for life := 1; life <= 50; life++ {
		if !lines.Scan() {
			t.Fatalf("no life %d", life)
		}
		if want := fmt.Sprint(life, " 1 argument"); lines.Text() != want {
			t.Fatalf("%q, want %q", lines.Text(), want)
		}
		if life%10 == 0 { // otherwise the event mostly comes before it has come to rest
			atRest(t, sleeper.Process.Pid)
		}
		if life == 20 {
			scarce(t, sleeper.Process.Pid, func() {
				if _, err := input.Write([]byte("x")); err != nil {
					t.Fatal(err)
				}
			})
			continue
		}
		if err := sleeper.Process.Signal(syscall.SIGTERM); err != nil { // ignored
			t.Fatal(err)
		}
		if _, err := input.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	if err := input.Close(); err != nil {
		t.Fatal(err)
	}
	for lines.Scan() { // one life more if the last byte and the end are two events
	}
	if err := sleeper.Wait(); err != nil {
		t.Error(err)
	}
}

// scarce triggers an event for a resting process while it may not allocate
// memory, which would end a Go program that starts.
func scarce(t *testing.T, pid int, event func()) {
	t.Helper()
	var usual unix.Rlimit
	if err := unix.Prlimit(pid, unix.RLIMIT_AS, &unix.Rlimit{Cur: 16 << 20, Max: unix.RLIM_INFINITY}, &usual); err != nil {
		t.Fatal(err)
	}
	event()
	time.Sleep(200 * time.Millisecond) // in which it would have ended
	atRest(t, pid)
	if err := unix.Prlimit(pid, unix.RLIMIT_AS, &usual, nil); err != nil {
		t.Fatal(err)
	}
}

// atRest waits until a process has one thread and next to no memory.
func atRest(t *testing.T, pid int) {
	t.Helper()
	wait.For(t, "the program to rest", func() bool {
		return field(t, pid, "status", "Threads:") == 1 && field(t, pid, "smaps_rollup", "Anonymous:") <= 32
	})
}

func field(t *testing.T, pid int, file, name string) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(text), "\n"+name)
	n, err := strconv.Atoi(strings.Fields(after)[0])
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// Where resting is impossible Until returns an error, and the program
// continues.
func TestUntilRefuses(t *testing.T) {
	t.Parallel()
	refused := make(chan error, 1)
	elsewhere(func() { refused <- rest.Until(-1) })
	if err := <-refused; err == nil || !strings.Contains(err.Error(), "main thread") {
		t.Errorf("on another thread: %v", err)
	}
}

// elsewhere calls do on a thread that is not the main one.
func elsewhere(do func()) {
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			elsewhere(do) // while this goroutine has the main thread
			select {}
		}
		do()
	}()
}
