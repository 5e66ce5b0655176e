package main_test

import (
	"testing"

	"github.com/crius-run/crius/test/scene"
)

// nriContracts are what critest checks with -nri-socket, from a commit on that the module
// proxy does not serve. `make conformance` counts them among its specs.
var nriContracts = []struct {
	name  string
	holds func(t *testing.T, w *scene.World, handler string)
}{
	{"events of a pod in strict order", podEvents},
	{"events of a container in strict order", containerEvents},
	{"events of a container that fails", failedContainerEvents},
	{"pod is hidden during RunPodSandbox", podIsHidden},
	{"pod takes no container during RunPodSandbox", podTakesNoContainer},
	{"RunPodSandbox fails with its hook and works again", refusedPod},
	{"containers have exited during StopPodSandbox", podIsStopped},
	{"pod is stopped once and never used again", podStopsOnce},
	{"container is hidden during CreateContainer", containerIsHidden},
	{"CreateContainer fails with its hook and works again", refusedContainer},
	{"plugin is told what exists", pluginIsTold},
	{"container made during Synchronize is not missed", containerDuringSynchronize},
	{"containers made around Synchronize are told once", containersAroundSynchronize},
}

// TestNRI holds the contracts one after the other: the hooks of some keep the others waiting.
func TestNRI(t *testing.T) {
	t.Parallel()
	o, err := modern.Prepare(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w := scene.Private(t, o)
	for _, contract := range nriContracts {
		t.Run(contract.name, func(t *testing.T) {
			for _, handler := range append(modern.Also, scene.Handlers...) {
				t.Run(handler, func(t *testing.T) { contract.holds(t, w, handler) })
			}
		})
	}
}
