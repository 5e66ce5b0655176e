package owner

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/crius-run/crius/internal/fault"
)

// The lock belongs to a process, so tests need another process: the test binary
// itself, with path and root in the environment.
const childVariable = "OWNER_TEST_CHILD"

func TestMain(m *testing.M) {
	path, root, child := strings.Cut(os.Getenv(childVariable), "\n")
	if !child {
		os.Exit(m.Run())
	}
	if _, err := Take(context.Background(), path, root, 0); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("ready")
	_, _ = bufio.NewReader(os.Stdin).ReadString('\n') // until the test ends
}

// holding starts a process that takes the directory and keeps it.
func holding(t *testing.T, path, root string) (pid int, end func()) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), childVariable+"="+path+"\n"+root)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	end = func() { _ = in.Close(); _ = cmd.Wait() }
	t.Cleanup(end)
	if line, _ := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("child: %q", line)
	}
	return cmd.Process.Pid, end
}

func rootWith(t *testing.T, kinds ...string) string {
	t.Helper()
	root := t.TempDir()
	for _, kind := range kinds {
		if err := os.MkdirAll(filepath.Join(root, kind, strings.Repeat("a", 64)), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func wantTaken(t *testing.T, err error, running bool, words ...string) {
	t.Helper()
	taken := new(TakenError)
	if !errors.As(err, &taken) || taken.Running != running || !errors.Is(err, fault.Precondition) {
		t.Errorf("%v, want a refusal, running %t", err, running)
		return
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("%q does not say %q", err, word)
		}
	}
}

func take1(t *testing.T, path, root string) {
	t.Helper()
	l, err := Take(t.Context(), path, root, 0)
	if err == nil {
		err = errors.Join(l.Close(), l.Close())
	}
	if err != nil {
		t.Error(err)
	}
}

// While a process has a directory no other gets it, and the error names the
// owner.
func TestRunningOwnerIsNamed(t *testing.T) {
	t.Parallel()
	path, first, second := filepath.Join(t.TempDir(), "lock"), t.TempDir(), t.TempDir()
	pid, end := holding(t, path, first)
	for name, err := range map[string]error{"take": tryTake(path, second), "look": Look(path, second)} {
		t.Log(name)
		wantTaken(t, err, true, first, fmt.Sprint("process ", pid))
	}
	wantTaken(t, tryTake(path, first), true)
	if err := Look(path, first); err != nil {
		t.Errorf("the same root looks: %v", err)
	}
	end()
	take1(t, path, second) // nothing of the first is left
}

func tryTake(path, root string) error {
	_, err := Take(context.Background(), path, root, 0)
	return err
}

// Take waits for a server of the same root, which may have been killed just
// now.
func TestTakeWaitsForTheSameRoot(t *testing.T) {
	t.Parallel()
	path, root := filepath.Join(t.TempDir(), "lock"), t.TempDir()
	_, end := holding(t, path, root)
	taken := make(chan error)
	go func() {
		_, err := Take(t.Context(), path, root, time.Hour)
		taken <- err
	}()
	end()
	if err := <-taken; err != nil {
		t.Error(err)
	}
}

// Pods and containers keep a directory for their root even without a server.
func TestRecordsKeepADirectory(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"pods", "containers"} {
		path, first, second := filepath.Join(t.TempDir(), "lock"), rootWith(t, kind), rootWith(t)
		take1(t, path, first)
		wantTaken(t, tryTake(path, second), false, first)
		wantTaken(t, Look(path, second), false, first)
		take1(t, path, first)
		if err := os.RemoveAll(filepath.Join(first, kind)); err != nil {
			t.Fatal(err)
		}
		take1(t, path, second)
	}
}

// Links to a root are the root, and a file that says nothing, as earlier versions
// left it, is nobody's.
func TestLinkedRootsAndEmptyOwnerFilesDoNotOwn(t *testing.T) {
	t.Parallel()
	path, root := filepath.Join(t.TempDir(), "lock"), rootWith(t, "pods")
	if err := Look(path, root); err != nil {
		t.Errorf("no file: %v", err)
	}
	for _, text := range []string{"", "{", "\x00\x00"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := Look(path, root); err != nil {
			t.Errorf("%q: %v", text, err)
		}
		take1(t, path, root)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(root, link); err != nil {
		t.Fatal(err)
	}
	take1(t, path, link)
	moved := filepath.Join(t.TempDir(), "moved")
	if err := errors.Join(os.Rename(root, moved), os.Symlink(moved, root)); err != nil {
		t.Fatal(err)
	}
	take1(t, path, root)
}

// A process that waits while the owner removes the file takes its successor.
func TestRemovedLockIsNotTaken(t *testing.T) {
	t.Parallel()
	path, root := filepath.Join(t.TempDir(), "lock"), t.TempDir()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if !named(f, path) {
		t.Error("the file is not the one at its path")
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	take1(t, path, root)
	if named(f, path) {
		t.Error("a removed file is taken for the one at its path")
	}
}
