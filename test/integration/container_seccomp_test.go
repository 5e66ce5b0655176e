package integration

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/registry"
)

// The default profile, with all capabilities granted by name, still denies what
// no container needs.
func TestDefaultSeccompProfileForbids(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "runc")
	c := p.start(t, "sleep")
	for call, want := range map[string]string{
		"keyctl": "EPERM", "reboot": "EPERM", "mount": "EPERM", "sethostname": "EPERM",
		"io-uring": "EPERM", "af-alg": "EPERM", "unshare-uts": "EPERM",
		"chmod": "ENOENT", "mkdir": "ok",
	} {
		got := c.exec(t, "try "+call)
		if got != want+"\n" && (want != "EPERM" || got != "ENOSYS\n") {
			t.Errorf("%s answers %q, want %s", call, got, want)
		}
	}
}

// Containers that are left unconfined by their requests get the profile in the
// OCI artifact that their pod names, from the registry or the store, if the
// handler allows that.
func TestSeccompProfileFromArtifact(t *testing.T) {
	t.Parallel()
	var config strings.Builder
	for _, runtime := range []string{"runc", "crun"} {
		fmt.Fprintf(&config, "[runtime.handlers.profiles-%s]\npath = %q\nallowed_annotations = ['seccomp-profile.crio.io']\n", runtime, runtime)
	}
	w := private(t, node.Options{Config: config.String()})
	built, err := image.Files{"seccomp.json": `{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 13}]}`}.
		BuildWith("application/vnd.cncf.seccomp-profile.config.v1+json")
	must(t, err)
	w.Registry.Push("profiles", "1", built)
	model, err := image.Files{"seccomp.json": "{}"}.Build()
	must(t, err)
	w.Registry.Push("profiles", "model", model)
	const name = node.RegistryHost + "/profiles"
	withProfile := func(p *cri.SecurityProfile) containerChange {
		return func(c *cri.ContainerConfig) { c.Linux.SecurityContext.Seccomp = p }
	}
	unconfined := withProfile(&cri.SecurityProfile{ProfileType: cri.SecurityProfile_Unconfined})
	each(t, func(t *testing.T, runtime string) {
		of := func(key, value string) *pod {
			return w.run(t, "profiles-"+runtime, annotated(map[string]string{key: value}))
		}
		tagged := of("seccomp-profile.kubernetes.cri-o.io/POD", name+":1")
		for what, c := range map[string]struct {
			p    *pod
			ask  containerChange
			want string
		}{
			"unset":                {tagged, withProfile(nil), "EACCES\n"},
			"unconfined":           {tagged, unconfined, "EACCES\n"},
			"by digest":            {of("seccomp-profile.crio.io/c1", name+"@"+built.Digest().String()), unconfined, "EACCES\n"},
			"of another container": {of("seccomp-profile.crio.io/other", name+":1"), unconfined, "ok\n"},
			"another profile":      {tagged, withProfile(&cri.SecurityProfile{}), "ok\n"},
			"not allowed":          {w.run(t, runtime, annotated(map[string]string{"seccomp-profile.crio.io/POD": name + ":1"})), unconfined, "ok\n"},
		} {
			equal(t, what, c.p.start(t, "sleep", c.ask).exec(t, "try mkdir"), c.want)
		}
		for ref, want := range map[string]codes.Code{name + ":model": codes.InvalidArgument, name + ":none": codes.NotFound, "NONE": codes.InvalidArgument} {
			_, err := of("seccomp-profile.crio.io/POD", ref).try(t.Context(), []string{"sleep"}, unconfined)
			wantCode(t, err, want, "seccomp profile", ref)
		}
	})

	w.Registry.Inject(registry.Fault{Path: "/manifests/", Do: registry.Status(503)})
	digested := w.run(t, "profiles-crun", annotated(map[string]string{"seccomp-profile.crio.io/POD": name + "@" + built.Digest().String()}))
	equal(t, "without the registry", digested.start(t, "sleep", unconfined).exec(t, "try mkdir"), "EACCES\n")
	_, err = w.run(t, "profiles-crun", annotated(map[string]string{"seccomp-profile.crio.io/POD": name + ":1"})).try(t.Context(), []string{"sleep"}, unconfined)
	wantCode(t, err, codes.Unavailable, "seccomp profile", name+":1")
}
