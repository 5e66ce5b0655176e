package main_test

import (
	"os"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/scene"
)

// appArmor requests a profile in the new form or, when profile is nil, in the
// deprecated one.
func appArmor(profile *cri.SecurityProfile, text string) scene.ContainerChange {
	return func(c *cri.ContainerConfig) {
		c.Linux.SecurityContext.Apparmor = profile
		c.Linux.SecurityContext.ApparmorProfile = text
	}
}

// On a node without AppArmor there is no default profile, and a pod that
// requests only that runs. A named profile is a promise that cannot be kept.
func TestAppArmorOnANodeWithout(t *testing.T) {
	t.Parallel()
	if _, err := os.Stat("/sys/kernel/security/apparmor"); err == nil {
		t.Fatal("this machine has AppArmor, and the test is about one that has not")
	}
	const local = cri.SecurityProfile_Localhost
	runs := map[string]scene.ContainerChange{
		"nothing":         appArmor(nil, ""),
		"default":         appArmor(&cri.SecurityProfile{}, ""),
		"unconfined":      appArmor(&cri.SecurityProfile{ProfileType: cri.SecurityProfile_Unconfined}, ""),
		"old, default":    appArmor(nil, "runtime/default"),
		"old, unconfined": appArmor(nil, "unconfined"),
		// If both are sent, as by kubelets from 1.30 on, the new form counts.
		"both": appArmor(&cri.SecurityProfile{}, "runtime/default"),
	}
	fails := map[string]struct {
		change scene.ContainerChange
		word   string
	}{
		"localhost":      {appArmor(&cri.SecurityProfile{ProfileType: local, LocalhostRef: "foo-profile"}, ""), "foo-profile"},
		"no name":        {appArmor(&cri.SecurityProfile{ProfileType: local}, ""), "localhost_ref"},
		"old, localhost": {appArmor(nil, "localhost/foo-profile"), "foo-profile"},
		"old, unknown":   {appArmor(nil, "something"), "something"},
	}
	eachVersion(t, func(t *testing.T, p *scene.Pod, v version) {
		for name, change := range runs {
			t.Run(name, func(t *testing.T) {
				c, err := v.start(t, p, "echo runs", change)
				if err != nil {
					t.Fatal(err)
				}
				scene.Equal(t, "exit code", c.Wait(t).ExitCode, 0)
			})
		}
		p.Untouched(t, func() {
			for name, test := range fails {
				t.Run(name, func(t *testing.T) {
					_, err := v.start(t, p, "sleep", test.change)
					scene.WantOneOf(t, err, []codes.Code{codes.InvalidArgument, codes.FailedPrecondition, codes.NotFound, codes.Unimplemented}, test.word)
				})
			}
		})
	})
}

// Without SELinux its labels have no effect, nor has relabelling, and the log says so once.
func TestSELinuxOnANodeWithout(t *testing.T) {
	t.Parallel()
	if _, err := os.Stat("/sys/fs/selinux/enforce"); err == nil {
		t.Fatal("this machine has SELinux, and the test is about one that has not")
	}
	w := commons.World(t)
	options := &cri.SELinuxOption{User: "system_u", Role: "system_r", Type: "container_t", Level: "s0:c1,c2"}
	p := w.Pod(t, "crun", func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.SelinuxOptions = options })
	dir := w.Dir(t)
	out := p.Finish(t, "write /v/f x ; cat /v/f", func(c *cri.ContainerConfig) {
		c.Linux.SecurityContext.SelinuxOptions = options
		c.Mounts = []*cri.Mount{{ContainerPath: "/v", HostPath: dir, SelinuxRelabel: true}}
	})
	scene.Equal(t, "output", out, "x")
	const told = "seLinuxOptions of pods have no effect"
	scene.Equal(t, "how often the log says that "+told, strings.Count(scene.Read(t, w.LogFile()), told), 1)
}
