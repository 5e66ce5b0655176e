package pod

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
)

// The kubelet removes the log directory of a pod that it evicts before the
// containers have ended.
func TestReopenWithoutTheLogDirectory(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	e := b.engine()
	cfg := podConfig("a")
	cfg.LogDirectory = filepath.Join(t.TempDir(), "logs")
	pod, err := e.RunSandbox(t.Context(), "", cfg)
	if err != nil {
		t.Fatal(err)
	}
	logged := containerConfig("c")
	logged.LogPath = "c/0.log"
	id, err := e.CreateContainer(t.Context(), pod, logged, nil)
	if err == nil {
		err = e.StartContainer(t.Context(), id)
	}
	if err != nil {
		t.Fatal(err)
	}
	refused := errors.New("no such file or directory")
	b.node.set(func() { b.node.fail["reopen"] = refused })
	if err := e.ReopenContainerLog(t.Context(), id); !errors.Is(err, refused) || errors.Is(err, fault.Precondition) {
		t.Errorf("a monitor that refuses: %v", err)
	}
	if err := os.RemoveAll(cfg.LogDirectory); err != nil {
		t.Fatal(err)
	}
	if err := e.ReopenContainerLog(t.Context(), id); !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), cfg.LogDirectory) {
		t.Errorf("without the directory: %v", err)
	}
	b.remove(e, pod)
	b.close(e)
	b.nothingLeft()
}
