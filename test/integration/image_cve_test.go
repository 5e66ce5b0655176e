package integration

import (
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/registry"
)

// Volumes that an image declares mount and copy nothing of the node, wherever
// their paths and the image's links lead.
func TestVolumesOfImagesStayInThem_CVE_2022_23648(t *testing.T) {
	t.Parallel()
	w := shared(t)
	outside := w.dir(t)
	put(t, filepath.Join(outside, "secret"), "the node's")
	up := "/../../../../../../../../.." + outside
	ref := w.image(t, func(c *imagespec.ImageConfig) {
		c.Volumes = map[string]struct{}{up: {}, "/link": {}, "/link/../..": {}, outside: {}, "/home/app": {}}
	}, image.Symlink("link", outside), image.Text("home/app/file", "the image's"))
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		c := p.start(t, "", fromImage(ref))
		plain, f := p.facts(t), c.facts(t)
		equal(t, "number of mounts", len(f.Mounts), len(plain.Mounts))
		for _, path := range []string{"/link/secret", up + "/secret", outside + "/secret"} {
			if r := c.execResult(t, "cat "+path); r.ExitCode == 0 {
				t.Errorf("%s is in the container: %q", path, r.Stdout)
			}
		}
		equal(t, "file of the image", c.exec(t, "cat /home/app/file"), "the image's")
		entries, err := os.ReadDir(outside)
		if err != nil || len(entries) != 1 {
			t.Errorf("the node's directory holds %v, %v", entries, err)
		}
	})
}

// Labels of an image do not become labels or annotations of its containers,
// because some affect runtimes and crius.
func TestLabelsOfImagesGoNowhere_CVE_2026_53488(t *testing.T) {
	t.Parallel()
	w := shared(t)
	outside := w.dir(t)
	const mark = "of-the-image"
	keys := []string{
		"containerd.io/restart.loguri", "io.containerd.image.config.stop-signal", "io.kubernetes.cri.container-type",
		"io.kubernetes.cri-o.UnifiedCgroup", "org.systemd.property.ExecStopPost", "run.oci.handler",
		"io.kubernetes.container.name", "io.kubernetes.cri-o.ContainerID", "org.criu.checkpoint.container.name",
	}
	ref := w.image(t, func(c *imagespec.ImageConfig) {
		for _, key := range keys {
			c.Labels[key] = "binary:///probe?write=" + outside + "/" + mark
		}
	})
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, "", fromImage(ref))
		if spec := read(t, filepath.Join(w.RunRoot(), "containers", c.id, "config.json")); strings.Contains(spec, mark) {
			t.Errorf("the runtime gets a label of the image: %s", spec)
		}
		if status := c.status(t); strings.Contains(fmt.Sprint(status.Labels, status.Annotations), mark) {
			t.Errorf("the container has a label of the image: %v, %v", status.Labels, status.Annotations)
		}
		c.stop(t, 0)
		empty(t, outside)
	})
}

// For an image for FIPS mode whose crypto policies are a link nothing is
// mounted there.
func TestCryptoPoliciesAreNotMounted_CVE_2024_9341(t *testing.T) {
	t.Parallel()
	w := shared(t)
	outside := w.dir(t)
	put(t, filepath.Join(outside, "secret"), "the node's")
	ref := w.image(t, nil, image.Dir("etc"), image.Text("etc/system-fips", ""), image.Dir("etc/crypto-policies"),
		image.Symlink("etc/crypto-policies/back-ends", outside), image.Dir("usr"), image.Dir("usr/share"),
		image.Dir("usr/share/crypto-policies"), image.Symlink("usr/share/crypto-policies/back-ends", outside))
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		c := p.start(t, "", fromImage(ref))
		for _, m := range c.facts(t).Mounts {
			if strings.Contains(m.Point, "crypto-policies") || strings.HasSuffix(outside, m.Root) && m.Root != "/" {
				t.Errorf("%+v is mounted", m)
			}
		}
		if r := c.execResult(t, "cat /etc/crypto-policies/back-ends/secret"); r.ExitCode == 0 {
			t.Errorf("the container reads %q", r.Stdout)
		}
	})
}

// An image that claims to be a checkpoint is an image like any other.
func TestCheckpointImagesAreNotRestored_CVE_2024_8676_CVE_2026_50195_CVE_2026_53489_CVE_2026_53492_CVE_2026_92574_CVE_2026_95837_CVE_2026_115520_CVE_2026_119101(t *testing.T) {
	t.Parallel()
	w := shared(t)
	outside := w.dir(t)
	dump := `{"process":{"args":["/probe","write","/restored","x"],"noNewPrivileges":false},"mounts":[{"destination":"/stolen","source":"` + outside + `"}]}`
	built, err := images.Build(func(c *imagespec.ImageConfig) { c.Labels = map[string]string{"test": t.Name()} },
		image.Text("spec.dump", dump), image.Text("config.dump", `{"rootfsImageName":"`+probe+`"}`), image.Dir("checkpoint"),
		image.Symlink("container.log", outside))
	if err != nil {
		t.Fatal(err)
	}
	var m map[string]any
	if err := json.Unmarshal(built.Manifest, &m); err != nil {
		t.Fatal(err)
	}
	m["annotations"] = map[string]string{
		"io.kubernetes.cri-o.annotations.checkpoint.name": "other", "org.criu.checkpoint.container.name": "other",
		"org.criu.checkpoint.rootfsImageName": probe,
	}
	if built.Manifest, err = json.Marshal(m); err != nil {
		t.Fatal(err)
	}
	ref := w.PushAndPull(t, built)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		before := p.create(t, "sleep").status(t).ImageRef
		c := p.start(t, "", fromImage(ref), func(c *cri.ContainerConfig) { c.Linux.SecurityContext.NoNewPrivs = true })
		f := c.facts(t)
		equal(t, "no new privileges", f.NoNewPrivs, true)
		equalSlices(t, "arguments of the container", strings.Fields(f.Processes[1]), []string{"/probe", "sleep"})
		if f.Mount("/stolen") != nil {
			t.Error("a mount of the archive was made")
		}
		if r := c.execResult(t, "stat /restored"); r.ExitCode == 0 {
			t.Error("the command of the archive has run")
		}
		equal(t, "image behind the name that the archive has", p.create(t, "sleep").status(t).ImageRef, before)
		empty(t, outside)
	})
}

// Credentials are not sent to a token service that the node does not trust,
// whatever registry names it.
func TestTokenServiceIsVerified_CVE_2019_10214(t *testing.T) {
	t.Parallel()
	trusted, other := newAuthority(t, "trusted"), newAuthority(t, "other")
	roots := filepath.Join(t.TempDir(), "roots.pem")
	put(t, roots, string(trusted.pem))
	w := private(t, node.Options{Env: []string{"SSL_CERT_FILE=" + roots}})
	built, err := images.Build(nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		authority *authority
		gets      bool
	}{"of an authority that the node trusts": {trusted, true}, "of another authority": {other, false}} {
		home, tokens := w.serveTLS(t, trusted), w.serveTLS(t, c.authority)
		home.Push("app", "1", built)
		auth := registry.Auth{Username: "joe", Password: "hunter2", Bearer: true}
		tokens.Require(auth)
		auth.Realm, auth.Tokens = "https://"+tokens.Addr()+"/token", tokens
		home.Require(auth)
		_, err := w.Images().PullImage(t.Context(), &cri.PullImageRequest{
			Image: &cri.ImageSpec{Image: home.Addr() + "/app:1"}, Auth: &cri.AuthConfig{Username: "joe", Password: "hunter2"},
		})
		equal(t, "image pulled with a token service "+name, err == nil, c.gets)
		got := slices.ContainsFunc(tokens.Requests(), func(r registry.Request) bool { return r.Authorization != "" })
		equal(t, "credentials sent to a token service "+name, got, c.gets)
	}
}

// serveTLS starts a registry with TLS in the node's network.
func (w *world) serveTLS(t *testing.T, a *authority) *registry.Registry {
	t.Helper()
	cert, key := a.issue(t, 1)
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	r := registry.New()
	err = w.Do(func() error {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err == nil {
			r.Serve(tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{pair}}))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r
}
