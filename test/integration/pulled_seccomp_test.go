package integration

import (
	"os"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/registry"
)

// profileArtifact is an artifact with a seccomp profile.
func profileArtifact(t *testing.T, content string) *image.Artifact {
	t.Helper()
	built, err := image.Files{"seccomp.json": content}.BuildWith("application/vnd.cncf.seccomp-profile.config.v1+json")
	must(t, err)
	return built
}

func (w *world) pullProfile(t *testing.T, ref string) (cached bool, err error) {
	t.Helper()
	resp, err := w.Images().PullSecurityProfile(t.Context(), &cri.PullSecurityProfileRequest{
		Image: &cri.ImageSpec{Image: ref, UserSpecifiedImage: ref}, ProfileKind: cri.SecurityProfileKind_Seccomp,
	})
	return resp.GetCached(), err
}

// A container runs under the profile of a registry and its base, and what one of them forbids is
// forbidden, by both runtimes and for the threads of an exec as well.
func TestPulledSeccompProfileForbids(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	equal(t, "seccomp_profile_oci of the node", w.statusOf(t).Features.GetSeccompProfileOci(), true)
	const name = node.RegistryHost + "/profiles"
	push := func(content string) string {
		built := profileArtifact(t, content)
		w.Registry.Push("profiles", built.Digest().Encoded()[:8], built)
		return name + "@" + built.Digest().String()
	}
	loose := push(`{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [
		{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 13},
		{"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}]}`)
	masked := push(`{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [
		{"names": ["unshare"], "action": "SCMP_ACT_ERRNO", "errnoRet": 13, "args": [{"index": 0, "value": 67108864, "valueTwo": 67108864, "op": "SCMP_CMP_MASKED_EQ"}]}]}`)
	// Rules that change nothing, which runtimes refused (runc#1847), and two conditions on one argument, which
	// they take for one another's alternatives, or for an error (runc#2735, crun#2220, kata-containers#4912).
	odd := push(`{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [
		{"names": ["getcwd", "mkdir"], "action": "SCMP_ACT_ALLOW"},
		{"names": ["personality"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": 0, "op": "SCMP_CMP_EQ"}, {"index": 0, "value": 8, "op": "SCMP_CMP_EQ"}]},
		{"names": ["unshare"], "action": "SCMP_ACT_ERRNO", "errnoRet": 13, "args": [{"index": 0, "value": 67108864, "op": "SCMP_CMP_GE"}, {"index": 0, "value": 99999999, "op": "SCMP_CMP_LE"}]}]}`)
	base := w.Path("base.json")
	must(t, os.WriteFile(base, []byte(`{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["chmod", "fchmodat", "fchmodat2"], "action": "SCMP_ACT_ERRNO", "errnoRet": 16}]}`), 0o600))
	use := func(ref string, base *cri.SecurityProfileBase) containerChange {
		return func(c *cri.ContainerConfig) {
			c.Linux.SecurityContext.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_OCI, OciRef: ref, BaseProfile: base}
		}
	}
	for _, ref := range []string{loose, masked, odd} {
		cached, err := w.pullProfile(t, ref)
		must(t, err)
		equal(t, "cached", cached, false)
	}
	w.Registry.Inject(registry.Fault{Path: "/", Do: registry.Status(503)}) // from here on nobody may ask it
	cached, err := w.pullProfile(t, loose)
	must(t, err)
	equal(t, "cached", cached, true)
	local := &cri.SecurityProfileBase{Type: cri.SecurityProfileBase_Localhost, LocalhostRef: base}
	each(t, func(t *testing.T, runtime string) {
		p := w.run(t, runtime, func(c *cri.PodSandboxConfig) {
			c.Linux.SecurityContext.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_OCI, OciRef: loose}
		})
		for what, c := range map[string]struct {
			ask  containerChange
			want map[string]string
		}{
			"default":          {use(loose, nil), map[string]string{"mkdir": "EACCES\n", "keyctl": "EPERM\n", "chmod": "ENOENT\n"}},
			"named":            {use(loose, &cri.SecurityProfileBase{}), map[string]string{"mkdir": "EACCES\n", "keyctl": "EPERM\n", "chmod": "ENOENT\n"}},
			"of node":          {use(loose, local), map[string]string{"mkdir": "EACCES\n", "chmod": "EBUSY\n"}},
			"arguments":        {use(odd, local), map[string]string{"unshare-uts": "EACCES\n", "mkdir": "ok\n"}},
			"masked arguments": {use(masked, local), map[string]string{"unshare-uts": "EACCES\n", "mkdir": "ok\n", "chmod": "EBUSY\n"}},
		} {
			ctr := p.start(t, "sleep", c.ask)
			for call, want := range c.want {
				equal(t, what+": "+call, ctr.exec(t, "try "+call), want)
			}
		}
	})
}

// Nothing is pulled for a pod or container whose profile is not there, and containers keep theirs
// when it is removed. What the server knows of profiles outlives it.
func TestPulledSeccompProfilesComeAndGo(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	built := profileArtifact(t, `{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 13}]}`)
	w.Registry.Push("profiles", "1", built)
	bad := profileArtifact(t, `{"defaultAction": "SCMP_ACT_ALLOW", "listenerPath": "/run/containerd/containerd.sock"}`)
	w.Registry.Push("profiles", "bad", bad)
	const name = node.RegistryHost + "/profiles"
	ref := name + "@" + built.Digest().String()
	ask := func(c *cri.ContainerConfig) {
		c.Linux.SecurityContext.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_OCI, OciRef: ref}
	}
	list := func() []*cri.SecurityProfileInfo {
		t.Helper()
		resp, err := w.Images().ListSecurityProfiles(t.Context(), &cri.ListSecurityProfilesRequest{})
		must(t, err)
		return resp.Profiles
	}
	p := w.run(t, "crun")
	w.Registry.Forget()
	_, err := p.try(t.Context(), []string{"sleep"}, ask)
	wantCode(t, err, codes.FailedPrecondition, ref, "PullSecurityProfile")
	_, err = w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{RuntimeHandler: "crun", Config: w.podConfig(t, func(c *cri.PodSandboxConfig) {
		c.Metadata.Name += "-profile"
		c.Linux.SecurityContext.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_OCI, OciRef: ref}
	})})
	wantCode(t, err, codes.FailedPrecondition, ref, "PullSecurityProfile")
	if asked := w.Registry.Requests(); slices.ContainsFunc(asked, func(r registry.Request) bool { return strings.Contains(r.Path, "/profiles/") }) {
		t.Errorf("the registry was asked: %+v", asked)
	}
	for _, wrong := range []string{name + "@" + bad.Digest().String(), name + ":1", "profiles@" + built.Digest().String()} {
		_, err = w.pullProfile(t, wrong)
		wantCode(t, err, codes.InvalidArgument, "SecurityProfileInvalid")
	}
	equal(t, "profiles", len(list()), 0)
	_, err = w.pullProfile(t, ref)
	must(t, err)
	c := p.start(t, "sleep", ask)
	must(t, w.Restart(t.Context()))
	cached, err := w.pullProfile(t, ref)
	must(t, err)
	equal(t, "cached", cached, true)
	profiles := list()
	if len(profiles) != 1 || profiles[0].Digest != built.Digest().String() || !slices.Equal(profiles[0].Refs, []string{ref}) || profiles[0].Size == 0 {
		t.Fatalf("listed %v", profiles)
	}
	for range 2 {
		_, err = w.Images().RemoveSecurityProfile(t.Context(), &cri.RemoveSecurityProfileRequest{Digest: profiles[0].Digest})
		must(t, err)
	}
	equal(t, "profiles", len(list()), 0)
	equal(t, "after the removal", c.exec(t, "try mkdir"), "EACCES\n")
	_, err = p.try(t.Context(), []string{"sleep"}, ask)
	wantCode(t, err, codes.FailedPrecondition, ref)
}
