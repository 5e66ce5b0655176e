package main_test

import (
	"encoding/json"
	"os/exec"
	"slices"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/scene"
)

// TestRuntimeHandlersAreHonest compares Status's features of each handler with
// the runtime's own report; the tests of each feature show that it is true.
func TestRuntimeHandlersAreHonest(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	resp := nodeStatus(t, w)
	var names []string
	for _, h := range resp.RuntimeHandlers {
		names = append(names, h.Name)
		if h.Features == nil {
			t.Errorf("handler %q has no features", h.Name)
		}
	}
	for _, want := range append([]string{""}, scene.Handlers...) {
		if !slices.Contains(names, want) {
			t.Errorf("%q is not among the handlers %q", want, names)
		}
	}
	if compact := slices.Compact(slices.Sorted(slices.Values(names))); len(compact) != len(names) {
		t.Errorf("handlers are named twice: %q", names)
	}
	for range 5 {
		var again []string
		for _, h := range nodeStatus(t, w).RuntimeHandlers {
			again = append(again, h.Name)
		}
		if !slices.Equal(names, again) {
			t.Errorf("the order changes: %q, then %q", names, again)
		}
	}
	scene.Equal(t, "features of the default handler", features(t, w, "").String(), features(t, w, "runc").String())
	for _, handler := range scene.Handlers {
		said, told := ask(t, handler)
		if told {
			got := features(t, w, handler)
			scene.Equal(t, handler+": recursive_read_only_mounts", got.RecursiveReadOnlyMounts, slices.Contains(said.MountOptions, "rro"))
			if got.UserNamespaces && !said.Linux.MountExtensions.IDMap.Enabled {
				t.Errorf("%s: user_namespaces is set, but the runtime says that it cannot map ids of mounts", handler)
			}
		}
	}
}

// abilities are the relevant part of the features document of the OCI runtime
// specification.
type abilities struct {
	MountOptions []string
	Linux        struct {
		MountExtensions struct{ IDMap struct{ Enabled bool } }
	}
}

// ask returns a runtime's own "features"; told is false for old ones, which do
// not know the command.
func ask(t *testing.T, runtime string) (a abilities, told bool) {
	t.Helper()
	out, err := exec.Command(runtime, "features").Output()
	if err != nil {
		return a, false
	}
	if err := json.Unmarshal(out, &a); err != nil {
		t.Fatal(err)
	}
	return a, true
}

func TestUnknownRuntimeHandlerIsRefused(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	_, err := w.TryPod(t, "nosuch")
	scene.WantOneOf(t, err, []codes.Code{codes.InvalidArgument, codes.NotFound}, "nosuch")
	_, err = w.Images().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: node.RegistryHost + "/probe:latest", RuntimeHandler: "nosuch"}})
	scene.WantOneOf(t, err, []codes.Code{codes.InvalidArgument, codes.NotFound}, "nosuch")
	if _, err := w.Images().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: node.RegistryHost + "/probe:latest", RuntimeHandler: "crun"}}); err != nil {
		t.Error(err)
	}
}
