package pod

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/storage/checkpoint"
)

// spot is one edge of one step in the life of a pod.
type spot struct {
	trace.Point
	n int // of its kind
}

func (s spot) String() string {
	return fmt.Sprintf("%s: %s %d, after: %t", s.Operation, s.Step, s.n, s.After)
}

// spots is a hook that counts the steps that it sees, and fails at one of them.
type spots struct {
	mu     sync.Mutex
	seen   []spot
	fail   spot
	failed bool
}

func (s *spots) hook(at trace.Point) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	at.Object = ""
	n := 1
	for _, other := range s.seen {
		if other.Point == at {
			n++
		}
	}
	here := spot{at, n}
	s.seen = append(s.seen, here)
	if here == s.fail {
		s.failed = true
		return errInjected
	}
	return nil
}

// life runs all verbs on a pod with everything that a pod may have, from its creation to its
// removal. A verb that fails is called once more, and must succeed then.
func (b *bench) life(e *Engine) {
	b.Helper()
	again := func(what string, verb func() error) {
		b.Helper()
		err := verb()
		if err != nil {
			err = verb()
		}
		if err != nil {
			b.Errorf("%s again: %v", what, err)
		}
	}
	cfg := tunedPod("a")
	cfg.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_POD
	cfg.PortMappings = []*cri.PortMapping{{HostPort: 80, ContainerPort: 80}}
	ctx := b.Context()
	var pod, ctr string
	again("run", func() (err error) { pod, err = e.RunSandbox(ctx, "", cfg); return err })
	create := func() (err error) { ctr, err = e.CreateContainer(ctx, pod, tunedContainer("c"), nil); return err }
	again("create", create)
	again("start", func() error {
		err := e.StartContainer(ctx, ctr)
		if err != nil { // as a kubelet does, for a container starts once
			err = errors.Join(e.RemoveContainer(ctx, ctr), create(), e.StartContainer(ctx, ctr))
		}
		return err
	})
	again("update", func() error {
		return e.UpdateContainerResources(ctx, ctr, &cri.LinuxContainerResources{CpuShares: 100})
	})
	again("update pod", func() error {
		return e.UpdateSandboxResources(ctx, pod, nil, &cri.LinuxContainerResources{CpuShares: 100})
	})
	again("exec", func() error { _, err := e.ExecSync(ctx, ctr, []string{"true"}, 0); return err })
	again("checkpoint", func() error {
		defer os.Remove(b.archive())
		return e.CheckpointContainer(ctx, ctr, b.archive(), 0)
	})
	again("checkpoint pod", func() error {
		ctx, cancel := context.WithTimeout(ctx, time.Hour)
		defer cancel()
		b.emptyOut()
		return e.CheckpointSandbox(ctx, pod, b.out(), []string{ctr})
	})
	var restored string
	again("restore pod", func() (err error) {
		ctx, cancel := context.WithTimeout(ctx, time.Hour)
		defer cancel()
		restored, err = e.RestoreSandbox(ctx, RestoreRequest{Dir: b.out(), Pod: podConfig("restored"), Containers: []*cri.ContainerConfig{tunedContainer("c")}})
		return err
	})
	again("remove restored pod", func() error { return e.RemoveSandbox(ctx, restored) })
	b.emptyOut()
	again("reopen", func() error { return e.ReopenContainerLog(ctx, ctr) })
	again("stop", func() error { return e.StopContainer(ctx, ctr, time.Second) })
	again("remove", func() error { return e.RemoveContainer(ctx, ctr) })
	again("create another", create)
	again("stop pod", func() error { return e.StopSandbox(ctx, pod) })
	again("remove pod", func() error { return e.RemoveSandbox(ctx, pod) })
	if pods, ctrs := e.Sandboxes(), e.Containers(); len(pods)+len(ctrs) > 0 {
		b.Errorf("there still are %d pods and %d containers", len(pods), len(ctrs))
	}
}

// out is a directory for checkpoints.
func (b *bench) out() string {
	b.Helper()
	dir := filepath.Join(filepath.Dir(b.cfg.StateDir), "out") // where who can write could write in StateDir as well
	if err := os.MkdirAll(dir, 0o700); err != nil {
		b.Fatal(err)
	}
	return dir
}

func (b *bench) archive() string { return filepath.Join(b.out(), "archive.tar") }

// emptyOut removes a complete checkpoint of a pod; another must have left nothing.
func (b *bench) emptyOut() {
	b.Helper()
	entries, err := os.ReadDir(b.out())
	if err != nil {
		b.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(b.out(), checkpoint.Manifest)); err != nil && len(entries) > 0 {
		b.Errorf("an unfinished checkpoint has left %v", entries)
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(b.out(), e.Name())); err != nil {
			b.Error(err)
		}
	}
}

// If any step fails, before or after its effect, the verb can be called again, and nothing is
// left in the end.
func TestEveryStepMayFail(t *testing.T) {
	all := &spots{}
	timeless(t, func(t *testing.T, b *bench) { // where no stop takes longer than it may
		b.tunes()
		b.cfg.Restore = true
		b.hook = all.hook
		b.life(b.engine())
		b.nothingLeft()
	})
	if len(all.seen) < 100 {
		t.Fatalf("only %d points are found", len(all.seen))
	}
	for _, at := range slices.Clone(all.seen) {
		t.Run(at.String(), func(t *testing.T) {
			t.Parallel()
			timeless(t, func(t *testing.T, b *bench) {
				b.tunes()
				b.cfg.Restore = true
				one := &spots{fail: at}
				b.hook = one.hook
				e := b.engine()
				b.life(e)
				if !one.failed {
					t.Error("the step did not come by")
				}
				b.awaitCleanups(e)
				b.wantTuned(false)
				b.nothingLeft()
			})
		})
	}
}
