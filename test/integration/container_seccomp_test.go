package integration

import (
	"os"
	"path/filepath"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const noMkdir = `{
	"defaultAction": "SCMP_ACT_ALLOW",
	"syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}]
}`

func TestSeccomp(t *testing.T) {
	t.Parallel()
	w := shared(t)
	profile := filepath.Join(w.dir(t), "no-mkdir.json")
	if err := os.WriteFile(profile, []byte(noMkdir), 0o600); err != nil {
		t.Fatal(err)
	}
	type security = cri.LinuxContainerSecurityContext
	typed := func(kind cri.SecurityProfile_ProfileType, ref string) func(*security) {
		return func(s *security) { s.Seccomp = &cri.SecurityProfile{ProfileType: kind, LocalhostRef: ref} }
	}
	// Kubelets up to 1.18 send nothing but this deprecated string.
	deprecated := func(path string) func(*security) {
		return func(s *security) { s.Seccomp, s.SeccompProfilePath = nil, path } //nolint:staticcheck // the point of the case
	}
	const filter, none = 2, 0
	cases := map[string]struct {
		set   func(*security)
		mode  int
		mkdir string
		user  string // unshare(CLONE_NEWUSER), which a process with threads may not do
	}{
		"runtime default":            {typed(cri.SecurityProfile_RuntimeDefault, ""), filter, "ok", "EPERM"},
		"unconfined":                 {typed(cri.SecurityProfile_Unconfined, ""), none, "ok", "EINVAL"},
		"localhost":                  {typed(cri.SecurityProfile_Localhost, profile), filter, "ENOSYS", "EINVAL"},
		"none":                       {func(s *security) { s.Seccomp = nil }, none, "ok", "EINVAL"},
		"deprecated runtime default": {deprecated("runtime/default"), filter, "ok", "EPERM"},
		"deprecated docker default":  {deprecated("docker/default"), filter, "ok", "EPERM"},
		"deprecated unconfined":      {deprecated("unconfined"), none, "ok", "EINVAL"},
		"deprecated localhost":       {deprecated("localhost/" + profile), filter, "ENOSYS", "EINVAL"},
		"both: the new one counts": {func(s *security) {
			typed(cri.SecurityProfile_Localhost, profile)(s)
			s.SeccompProfilePath = "unconfined" //nolint:staticcheck // the point of the case
		}, filter, "ENOSYS", "EINVAL"},
	}
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		for name, c := range cases {
			made := p.start(t, "facts ; try mkdir ; try unshare-user", func(config *cri.ContainerConfig) { c.set(config.Linux.SecurityContext) })
			made.wait(t)
			equal(t, name+": mode", lastFacts(t, made).Seccomp, c.mode)
			log := made.log(t)
			if len(log) < 3 {
				t.Errorf("%s: output is %v", name, log)
				continue
			}
			equal(t, name+": mkdir", log[len(log)-2].Content, c.mkdir)
			equal(t, name+": new user namespace", log[len(log)-1].Content, c.user)
		}
	})
}

// The default profile with all capabilities granted by name still keeps out
// what no container needs.
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

func TestSeccompFailsClosed_CVE_2023_2431(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "runc")
	broken := filepath.Join(w.dir(t), "broken.json")
	if err := os.WriteFile(broken, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, profile := range map[string]*cri.SecurityProfile{
		"empty reference": {ProfileType: cri.SecurityProfile_Localhost},
		"missing file":    {ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "/no/such/profile.json"},
		"not JSON":        {ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: broken},
		"a directory":     {ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "/tmp"},
		"endless":         {ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "/dev/zero"},
	} {
		_, err := p.try(t.Context(), steps("sleep"), func(c *cri.ContainerConfig) { c.Linux.SecurityContext.Seccomp = profile })
		if err == nil {
			t.Errorf("%s: the container was made", name)
		}
	}
}
