package pod

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage"
)

const someProfile = "r.example/p@sha256:1"

func ofRegistry() *cri.SecurityProfile {
	return &cri.SecurityProfile{ProfileType: cri.SecurityProfile_OCI, OciRef: someProfile}
}

// A pod or container whose profile is not there, or cannot be used any more, is refused before
// anything is made of it, and nothing is pulled.
func TestPulledProfileMustBeThere(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	e := b.engine()
	b.node.profile = `{"defaultAction": "SCMP_ACT_ALLOW"}`
	pod := b.run(e, "a")
	container := containerConfig("c")
	container.Linux = &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{Seccomp: ofRegistry()}}
	other := podConfig("b")
	other.Linux = &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{Seccomp: ofRegistry()}}
	create := func() error { _, err := e.CreateContainer(t.Context(), pod, container, nil); return err }
	run := func() (id string, err error) { return e.RunSandbox(t.Context(), "", other) }
	refused := func(kind error) {
		t.Helper()
		_, err := run()
		for _, err := range []error{create(), err} {
			if !errors.Is(err, kind) || !strings.Contains(err.Error(), someProfile) {
				t.Errorf("%v, want %v", err, kind)
			}
		}
		if n := b.node.count("mount") + b.node.count("pull profile "+someProfile); n > 0 {
			t.Errorf("%d things done", n)
		}
	}
	step := "read profile default " + someProfile
	b.node.fail[step] = fmt.Errorf("not here: %w", fault.Precondition)
	refused(fault.Precondition)
	delete(b.node.fail, step)
	b.node.profile = `{"defaultAction": "SCMP_ACT_ALLOW", "listenerPath": "/run/l.sock"}`
	refused(fault.Invalid)
	b.node.profile = `{"defaultAction": "SCMP_ACT_ALLOW"}`
	if err := create(); err != nil {
		t.Error(err)
	}
	id, err := run()
	if err != nil {
		t.Error(err)
	}
	b.remove(e, pod)
	b.remove(e, id)
	b.nothingLeft()
}

// Equal pulls share one, which goes on for the kubelet's next try; its content is checked.
func TestPullSecurityProfile(t *testing.T) {
	t.Parallel()
	timeless(t, testPullSecurityProfile)
}

func testPullSecurityProfile(t *testing.T, b *bench) {
	e := b.engine()
	b.node.profile = `{"defaultAction": "SCMP_ACT_ALLOW"}`
	step := "pull profile " + someProfile
	registry := make(chan struct{})
	b.node.block[step] = registry
	ctx, leave := context.WithCancel(t.Context())
	leave()
	req := storage.PullRequest{Image: someProfile, Namespace: "ns"}
	if _, err := e.PullSecurityProfile(ctx, req); !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that leaves: %v", err)
	}
	again := make(chan error, 1)
	go func() {
		_, err := e.PullSecurityProfile(t.Context(), req)
		again <- err
	}()
	synctest.Wait() // or the first pull may end before there is a second one
	close(registry)
	if err := <-again; err != nil {
		t.Error(err)
	}
	if n := b.node.count(step); n != 1 {
		t.Errorf("pulled %d times", n)
	}
	b.node.profile = `{"defaultAction": "SCMP_ACT_ALLOW", "seccompFd": 1}`
	if _, err := e.PullSecurityProfile(t.Context(), req); !errors.Is(err, fault.Invalid) {
		t.Errorf("a profile that cannot be used: %v", err)
	}
	if err := e.RemoveSecurityProfile(t.Context(), "sha256:1"); err != nil || b.node.count("remove profile sha256:1") != 1 {
		t.Errorf("removed %d: %v", b.node.count("remove profile sha256:1"), err)
	}
	if list := e.SecurityProfiles(); len(list) != 1 {
		t.Errorf("listed %+v", list)
	}
}
