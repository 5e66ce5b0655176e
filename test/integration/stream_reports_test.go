package integration

import (
	"fmt"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/wait"
)

// Input that is piped to a command arrives, with its end, each time and however much it is.
func TestPipedInputArrives_kubernetes_61557_podman_5046(t *testing.T) {
	t.Parallel()
	w := shared(t)
	const size = 6 << 20 // more than all buffers on the way
	w.eachTransport(t, func(t *testing.T, s kubelet.Streams, handler string) {
		c := w.run(t, handler).start(t, "sleep")
		for range 10 {
			e := c.session(t, s, "cat", withInput)
			typed(t, e, "a")
			e.EndInput()
			endsWith(t, e, 0)
			equal(t, "output", e.Stdout.String(), "a")
		}
		e := c.session(t, s, "digest", withInput)
		must(t, e.Send(noise(size)))
		e.EndInput()
		endsWith(t, e, 0)
		equal(t, "what the command read", e.Stdout.String(), noiseSum(size)+"\n")
	})
}

// A session on a terminal ends with its container where processes are shared as well, and
// with it all that was started on it.
func TestTerminalEndsWithTheContainer_kubernetes_89233_kubernetes_129144(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		for _, mode := range []cri.NamespaceMode{cri.NamespaceMode_POD, cri.NamespaceMode_CONTAINER} {
			forPod, forContainer := pidMode(mode)
			p := w.run(t, handler, forPod)
			c := p.start(t, "sleep", forContainer)
			e := c.session(t, w.spdy(), "ignore HUP INT TERM ; echo ready ; orphan sleep ; sleep", withTerminal)
			shows(t, e, "ready")
			c.stop(t, 0)
			_ = e.Wait(wait.Limit)
			select {
			case <-e.Done():
			default:
				t.Error(fmt.Sprint(mode), ": the session goes on")
			}
			p.stop(t)
		}
	})
}
