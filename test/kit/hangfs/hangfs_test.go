package hangfs

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/crius-run/crius/test/kit/wait"
)

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
	wait.For(t, "the request to hang", func() bool { return f.Waiting() == 1 })
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	wait.For(t, "the process to be in state D", func() bool {
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
	<-ended
}
