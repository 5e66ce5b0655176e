package storage

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/registry/registrytest"
)

// A mirror that has the image, and cannot give all of it, does not keep the image from coming from
// its registry.
func TestRegistryGivesWhatAMirrorCannot_container_libs_845_containerd_4531(t *testing.T) {
	t.Parallel()
	a := motd(t, "home")
	lastLayer := "/blobs/" + layerDigest(a, 1)
	for name, f := range map[string]registry.Fault{
		"config refused":             {Path: "/blobs/" + a.Config.String(), Do: registry.Status(http.StatusForbidden)},
		"layer refused":              {Path: lastLayer, Do: registry.Status(http.StatusForbidden)},
		"layer missing, with a page": {Path: lastLayer, Do: registry.Page(http.StatusNotFound)},
		"layer missing":              {Path: lastLayer, Do: registry.Status(http.StatusNotFound)},
		"layer of a broken server":   {Path: lastLayer, Do: registry.Status(http.StatusInternalServerError)},
		"layer broken off":           {Path: lastLayer, Do: registry.Reset(10)},
		"layer cut":                  {Path: lastLayer, Do: registry.Replace(registry.Truncate)},
		"other bytes":                {Path: lastLayer, Do: registry.Replace(registry.Corrupt)},
		"manifest is a page":         {Path: "/manifests/", Do: registry.Page(http.StatusOK)},
		"everything is a page":       {Path: "/v2/", Do: registry.Page(http.StatusOK)},
		"manifest empty":             {Path: "/manifests/", Do: registry.Replace(func([]byte) []byte { return nil })},
		"manifest of other JSON":     {Path: "/manifests/", Do: registry.Replace(func([]byte) []byte { return []byte(`{"a": 1}`) })},
		"half a manifest":            {Path: "/manifests/", Do: registry.Replace(registry.Truncate)},
		"manifest missing":           {Path: "/manifests/", Do: registry.Page(http.StatusNotFound)},
		"manifest refused":           {Path: "/manifests/", Do: registry.Status(http.StatusForbidden)},
		"broken server":              {Path: "/v2/", Do: registry.Status(http.StatusServiceUnavailable)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			home, mirror := registrytest.Start(t), registrytest.StartAt(t, "127.0.0.2:0")
			home.Push("app", "1", a)
			mirror.Push("app", "1", a)
			mirror.Inject(f)
			n.write("registries.conf", registryEntry(home.Addr(), home.Addr())+"[[registry.mirror]]\nlocation = \""+mirror.Addr()+"\"\ninsecure = true\n")
			for _, ref := range []string{home.Addr() + "/app:1", home.Addr() + "/app@" + a.Digest().String()} {
				mirror.Forget()
				if img := n.pull(ref); img.ID != a.ID() || len(mirror.Requests()) == 0 {
					t.Errorf("%s: image %s, %d requests at the mirror", ref, img.ID, len(mirror.Requests()))
				}
				n.remove(ref)
			}
			n.empty()
		})
	}
}

// The same with a mirror of containerd's files. Without the registry, the error says what failed at
// the mirror, and that the registry failed, too. A refusal of the signature policy asks nobody else.
func TestMirrorAndRegistryThatFail(t *testing.T) {
	t.Parallel()
	n := newNode(t, func(c *Options) { c.HostsDirs = []string{filepath.Join(filepath.Dir(c.Root), "certs.d")} })
	a := motd(t, "home")
	home, mirror := registrytest.Start(t), registrytest.StartAt(t, "127.0.0.2:0")
	home.Push("app", "1", a)
	mirror.Push("app", "1", a)
	mirror.Inject(registry.Fault{Path: "/blobs/", Do: registry.Status(http.StatusForbidden)})
	ok(t, os.MkdirAll(filepath.Join(n.dir, "certs.d/r.test"), 0o755))
	server := func(address string) {
		n.write("certs.d/r.test/hosts.toml", "server = \"http://"+address+"\"\n[host.\"http://"+mirror.Addr()+"\"]\n")
	}
	const ref = "r.test/app:1"
	server("127.0.0.1:1")
	_, err := n.Pull(testContext(t), PullRequest{Image: ref})
	if !errors.Is(err, fault.Denied) || !strings.Contains(err.Error(), "the registry itself failed, too") {
		t.Errorf("without the registry: %v", err)
	}
	server(home.Addr())
	n.write("policy.json", `{"default": [{"type": "reject"}]}`)
	home.Forget()
	if _, err := n.Pull(testContext(t), PullRequest{Image: ref}); !errors.Is(err, ErrSignature) || len(home.Requests()) > 0 {
		t.Errorf("refused by the policy: %v, %d requests at the registry", err, len(home.Requests()))
	}
	n.write("policy.json", acceptAll)
	if img := n.pull(ref); img.ID != a.ID() {
		t.Errorf("pulled %s", img.ID)
	}
}

// Each mirror is tried before the registry, whatever an earlier one sends: here the registry cannot
// be reached.
func TestNextMirrorGivesWhatOneCannot(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a, other := motd(t, "home"), motd(t, "another")
	all := index(t, a)
	first, second := registrytest.StartAt(t, "127.0.0.2:0"), registrytest.StartAt(t, "127.0.0.3:0")
	for _, mirror := range []*registry.Registry{first, second} {
		mirror.Push("app", "1", all)
	}
	n.write("registries.conf", registryEntry("r.test", "127.0.0.1:1")+mirrorEntries(first, second))
	lastLayer := "/blobs/" + layerDigest(a, 1)
	for name, f := range map[string]registry.Fault{
		"empty":                   replaceManifest(nil),
		"a page":                  {Path: "/v2/", Do: registry.Page(http.StatusOK)},
		"another image":           {Path: a.Digest().String(), Do: registry.Replace(func([]byte) []byte { return other.Manifest })},
		"manifest of the image":   {Path: a.Digest().String(), Do: registry.Page(http.StatusNotFound)},
		"layer missing, a page":   {Path: lastLayer, Do: registry.Page(http.StatusNotFound)},
		"layer refused":           {Path: lastLayer, Do: registry.Status(http.StatusForbidden)},
		"layer gone":              {Path: lastLayer, Do: registry.Page(http.StatusGone)},
		"layer wants credentials": {Path: lastLayer, Do: registry.Status(http.StatusUnauthorized)},
		"layer redirected":        {Path: lastLayer, Do: registry.Redirect("http://127.0.0.1:1")},
		"layer cut":               {Path: lastLayer, Do: registry.Reset(10)},
		"config cut":              {Path: "/blobs/" + a.Config.String(), Do: registry.Reset(10)},
	} {
		first.Heal()
		first.Inject(f)
		for _, ref := range []string{"r.test/app:1", "r.test/app@" + all.Digest().String()} {
			if img, err := n.Pull(testContext(t), PullRequest{Image: ref}); err != nil || img.ID != a.ID() {
				t.Errorf("%s: %s: %v, %v", name, ref, img, err)
				continue
			}
			n.remove(ref)
		}
	}
	n.empty()
}

// A mirror that accepts connections and says nothing has a share of the time, after which the next one
// and the registry are asked.
func TestSilentMirrorLeavesTimeForOthers(t *testing.T) {
	t.Parallel()
	silent := func(_ http.Handler, stop <-chan struct{}) http.Handler {
		return http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
			select {
			case <-req.Context().Done():
			case <-stop:
			}
		})
	}
	a := motd(t, "home")
	for name, path := range map[string]string{"everything": "/v2/", "manifest": "/manifests/", "config": a.Config.String(), "layer": layerDigest(a, 1)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.puller.Settings.Load().ProgressTimeout = 30 * time.Second // enough for a request in a share of it on a slow machine
			home, first, second := registrytest.Start(t), registrytest.StartAt(t, "127.0.0.2:0"), registrytest.StartAt(t, "127.0.0.3:0")
			for _, r := range []*registry.Registry{home, first, second} {
				r.Push("app", "1", a)
			}
			for _, r := range []*registry.Registry{first, second} {
				r.Inject(registry.Fault{Path: path, Do: silent})
			}
			n.write("registries.conf", registryEntry(home.Addr(), home.Addr())+mirrorEntries(first, second))
			if img := n.pull(home.Addr() + "/app:1"); img.ID != a.ID() || len(second.Requests()) == 0 {
				t.Errorf("image %s, %d requests at the second mirror", img.ID, len(second.Requests()))
			}
		})
	}
}

func mirrorEntries(mirrors ...*registry.Registry) (text string) {
	for _, mirror := range mirrors {
		text += fmt.Sprintf("[[registry.mirror]]\nlocation = %q\ninsecure = true\n", mirror.Addr())
	}
	return text
}

// A mirror by its IPv6 address, which the library cannot ask, does not keep others from being asked.
func TestMirrorByIPv6AddressIsLeftOut(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "home")
	home, mirror := serve(t, "app", "1", a), registrytest.StartAt(t, "127.0.0.2:0")
	mirror.Push("app", "1", a)
	n.write("registries.conf", registryEntry(home.Addr(), home.Addr())+"[[registry.mirror]]\nlocation = \"[::1]:5000\"\n"+mirrorEntries(mirror))
	if img := n.pull(home.Addr() + "/app:1"); img.ID != a.ID() || len(mirror.Requests()) == 0 {
		t.Errorf("image %s, %d requests at the other mirror", img.ID, len(mirror.Requests()))
	}
	if _, err := n.Pull(testContext(t), PullRequest{Image: "[::1]:5000/app:1"}); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "use a name") {
		t.Error(err)
	}
}
