package oci

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/test/kit/claim"
)

// helperOf is a process with the arguments of a sandbox's helper, in the cgroup of
// the sandbox with that id. It ends when its standard input does.
func helperOf(t *testing.T, ref Ref, sandbox string) (*exec.Cmd, io.Closer) {
	t.Helper()
	own, err := cgroup.Own()
	if err != nil {
		t.Fatal(err)
	}
	owned, err := claim.New()
	if err != nil {
		t.Fatal(err)
	}
	top := path.Join(own, owned.ID)
	t.Cleanup(func() {
		if err := errors.Join(cgroup.Remove(context.Background(), top), owned.Release()); err != nil {
			t.Error(err)
		}
	})
	cmd := exec.Command("sh", "-c", "read x; :", "gofer", ref.ID) // the last command is no exec
	stdin, err := cmd.StdinPipe()
	if err == nil {
		err = cgroup.Start(path.Join(top, "crius-"+sandbox), func(attr *syscall.SysProcAttr) error {
			cmd.SysProcAttr = attr
			return cmd.Start()
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		_ = cmd.Wait() // it may have been reaped
	})
	return cmd, stdin
}

var sandboxed = Ref{ID: strings.Repeat("a", 64), Sandbox: strings.Repeat("b", 64)}

// Who has the arguments of a sandbox's helper is one only in the sandbox's
// cgroup: elsewhere it is a command in a container, which somebody else waits for.
func TestHelpersAreKnownByTheirCgroup(t *testing.T) {
	helper, _ := helperOf(t, sandboxed, sandboxed.Sandbox)
	command, _ := helperOf(t, sandboxed, strings.Repeat("c", 64))
	reap := reapHelpers("gofer", sandboxed)
	for _, cmd := range []*exec.Cmd{helper, command} {
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := unix.Waitid(unix.P_PID, cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
			t.Fatal(err)
		}
	}
	reap()
	if err := helper.Wait(); !errors.Is(err, syscall.ECHILD) {
		t.Errorf("the helper was not reaped: %v", err)
	}
	if err := command.Wait(); errors.Is(err, syscall.ECHILD) {
		t.Errorf("the command was reaped: %v", err)
	}
}

// TestReapHelpersDespiteSignals interrupts the wait for a helper's end: it goes
// on until the helper has ended or it has tried long enough.
func TestReapHelpersDespiteSignals(t *testing.T) {
	helper, stdin := helperOf(t, sandboxed, sandboxed.Sandbox)
	reap := reapHelpers("gofer", sandboxed)
	thread, returned := make(chan int), make(chan struct{})
	began := time.Now()
	go func() {
		defer close(returned)
		runtime.LockOSThread()
		thread <- unix.Gettid()
		reap()
	}()
	id := <-thread
	for range 10_000 {
		_ = unix.Tgkill(unix.Getpid(), id, unix.SIGURG) // as Go's scheduler does; no such thread: it has returned
	}
	stdin.Close()
	<-returned
	patient := time.Since(began) >= time.Second
	if got, err := unix.Wait4(helper.Process.Pid, nil, unix.WNOHANG, nil); err != unix.ECHILD && !patient {
		t.Errorf("the helper was not reaped: wait: %d, %v", got, err)
	}
}

// A guest's table of processes may say anything: the search for descendants ends
// and finds each of them once.
func FuzzParents(f *testing.F) {
	f.Add("UID PID PPID C STIME TTY TIME CMD\n0 1 0 0 00:00 ? 0 sh\n0 7 1 0 00:00 ? 0 sleep\n", 1)
	f.Add("PID PPID\n1 2\n2 1\n3 3\n-1 1\n", 1)
	f.Add("PPID PID\n1\n", 0)
	f.Fuzz(func(t *testing.T, table string, root int) {
		parents := parentsIn(table)
		if len(parents) > strings.Count(table, "\n") {
			t.Errorf("%d parents in %q", len(parents), table)
		}
		tree := withDescendants([]int{root}, parents)
		for i, pid := range tree {
			parent, known := parents[pid]
			if i > 0 && (!known || !slices.Contains(tree[:i], parent)) || slices.Contains(tree[:i], pid) {
				t.Errorf("%v has %d at %d, whose parent is %d", tree, pid, i, parent)
			}
		}
	})
}

// The last error in a runtime's log is found among anything else, and can be sent.
func FuzzLastError(f *testing.F) {
	f.Add([]byte(`{"msg":"first","level":"error"}`+"\n"), "second", []byte("panic: x\n"))
	f.Add([]byte("{"), "\x00\xff", []byte(`{"level":"warning","msg":"x"}`))
	f.Add([]byte(nil), "", bytes.Repeat([]byte("x\n"), 64<<10))
	f.Fuzz(func(t *testing.T, before []byte, message string, after []byte) {
		file := filepath.Join(t.TempDir(), "log")
		entry, err := json.Marshal(map[string]string{"msg": message, "level": "error"})
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, fmt.Appendf(nil, "%s\n%s\n%s", before, entry, after), 0o600); err != nil {
			t.Fatal(err)
		}
		got := lastError(file)
		if !utf8.ValidString(got) {
			t.Errorf("%q", got)
		}
		if want := strings.ToValidUTF8(message, "\uFFFD"); !bytes.Contains(after, []byte("{")) && len(after) < 1<<10 && len(message) < 1<<10 &&
			utf8.ValidString(message) && got != want {
			t.Errorf("%q, want %q", got, want)
		}
	})
}
