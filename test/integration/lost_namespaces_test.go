package integration

import (
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
)

// A pod of which a namespace is no longer pinned is not ready, so that the kubelet makes a new
// one; neither a restart nor its removal minds.
func TestPodWithoutANamespaceIsNotReady_crio_1927(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	for _, handler := range handlers {
		for _, kind := range []string{"network", "ipc", "uts"} {
			p := w.run(t, handler)
			resp, err := w.Runtime().PodSandboxStatus(t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: p.id, Verbose: true})
			must(t, err)
			for _, n := range decodeInfo(t, resp.Info).RuntimeSpec.Linux.Namespaces {
				if string(n.Type) == kind {
					must(t, unix.Unmount(n.Path, unix.MNT_DETACH))
					must(t, os.Remove(n.Path))
				}
			}
			_, err = p.try(t.Context(), steps("sleep"))
			wantCode(t, err, codes.FailedPrecondition, "not ready")
			equal(t, "state", p.status(t).State, cri.PodSandboxState_SANDBOX_NOTREADY)
			if kind == "network" { // also known to check once the server has noticed it
				found := w.check(t)
				if len(found) != 1 || !strings.Contains(found[0].Text, "pod "+p.id+": it is not ready, because") || !strings.Contains(found[0].Do, "the kubelet recreates it") {
					t.Errorf("check: %+v", found)
				}
			}
			must(t, w.Crash(t.Context()))
			equal(t, "state after a crash", p.status(t).State, cri.PodSandboxState_SANDBOX_NOTREADY)
			p.stop(t)
			p.remove(t)
		}
	}
}
