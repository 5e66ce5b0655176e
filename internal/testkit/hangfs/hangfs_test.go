package hangfs

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

func within(t *testing.T, what string, yes func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !yes(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal(what)
		}
	}
}

func TestNobodyIsKilledBeforeRelease(t *testing.T) {
	f, err := Mount(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Release()
	if info, err := os.Stat(f.Dir); err != nil || !info.IsDir() {
		t.Fatalf("the root is %v, %v", info, err)
	}
	cmd := exec.Command("stat", filepath.Join(f.Dir, "name"))
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	within(t, "nobody waits", func() bool { return f.Waiting() == 1 })
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	within(t, "the process is not in state D", func() bool {
		data, _ := os.ReadFile("/proc/" + strconv.Itoa(cmd.Process.Pid) + "/stat")
		return strings.Contains(string(data), ") D ")
	})
	select {
	case <-ended:
		t.Fatal("a process died although its request was not answered")
	case <-time.After(100 * time.Millisecond):
	}
	if err := f.Release(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Fatal("the process lives on")
	}
}
