package integration

import (
	"fmt"
	"sync"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Many containers end at once, at the same time, each with its own code.
func TestShortLivesHaveTheRightCode(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		var all []*container
		for i := range 12 {
			all = append(all, p.create(t, fmt.Sprintf("exit %d", 100+i)))
		}
		var group sync.WaitGroup
		for _, c := range all {
			group.Go(func() {
				w.Runtime().StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: c.id})
			})
		}
		group.Wait()
		for i, c := range all {
			equal(t, "exit code", c.wait(t).ExitCode, int32(100+i))
		}
	})
}

func TestStartTwiceIsRefused(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "runc")
	running, exited := p.start(t, "sleep"), p.start(t, "exit 0")
	exited.wait(t)
	for name, c := range map[string]*container{"running": running, "exited": exited} {
		if _, err := w.Runtime().StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: c.id}); err == nil {
			t.Errorf("a container that is %s was started again", name)
		}
	}
}
