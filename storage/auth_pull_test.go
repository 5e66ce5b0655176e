package storage

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.podman.io/image/v5/docker/reference"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	reach "github.com/crius-run/crius/storage/registry"
	"github.com/crius-run/crius/storage/registry/source"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/registry/registrytest"
)

// maxErrorText is the most that is shown of an error, in bytes.
const maxErrorText = 4096

func encode(text string) string { return base64.StdEncoding.EncodeToString([]byte(text)) }

func TestEveryFormOfCredentials(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "secret")
	r := serve(t, "app", "1", a)
	ref := r.Addr() + "/app:1"
	basic := registry.Auth{Username: "joe", Password: "hunter2"}
	bearer := registry.Auth{Username: "joe", Password: "hunter2", IdentityToken: "identity", RegistryToken: "as-it-is", Bearer: true}
	good := &cri.AuthConfig{Username: "joe", Password: "hunter2"}
	encoded := &cri.AuthConfig{Auth: encode("joe:hunter2\x00")}
	for _, test := range []struct {
		what string
		auth registry.Auth
		give *cri.AuthConfig
		want error
		says string
	}{
		{"nobody asks", registry.Auth{}, good, nil, ""},
		{"basic: password", basic, good, nil, ""},
		{"basic: base64", basic, encoded, nil, ""},
		{"basic: none", basic, nil, fault.Unauthenticated, "no credentials were sent to"},
		{"basic: wrong", basic, &cri.AuthConfig{Username: "joe", Password: "wrong"}, fault.Unauthenticated, "refused user \"joe\" of the pull request"},
		{"basic: server named", basic, &cri.AuthConfig{Username: "joe", Password: "hunter2", ServerAddress: "http://" + r.Addr()}, nil, ""},
		{"basic: for another server", basic, &cri.AuthConfig{Username: "joe", Password: "hunter2", ServerAddress: "other.example"}, fault.Unauthenticated, "those of the pull request are for another registry"},
		{"bearer: password", bearer, good, nil, ""},
		{"bearer: base64", bearer, encoded, nil, ""},
		{"bearer: identity token", bearer, &cri.AuthConfig{IdentityToken: "identity"}, nil, ""},
		{"bearer: registry token", bearer, &cri.AuthConfig{RegistryToken: "as-it-is"}, nil, ""},
		{"bearer: none", bearer, nil, fault.Unauthenticated, "no credentials were sent to"},
		{"bearer: wrong password", bearer, &cri.AuthConfig{Username: "joe", Password: "wrong"}, fault.Unauthenticated, "refused user \"joe\""},
		{"bearer: wrong identity token", bearer, &cri.AuthConfig{IdentityToken: "wrong"}, fault.Unauthenticated, "refused the token of the pull request"},
		{"bearer: wrong registry token", bearer, &cri.AuthConfig{RegistryToken: "wrong"}, fault.Unauthenticated, "refused the token of the pull request"},
	} {
		r.Require(test.auth)
		_, err := n.Pull(testContext(t), PullRequest{Image: ref, Auth: test.give})
		if !errors.Is(err, test.want) {
			t.Errorf("%s: %v, want %v", test.what, err, test.want)
		}
		if err != nil && !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: %v does not say %q", test.what, err, test.says)
		}
		for _, secret := range reach.Secrets(test.give) {
			if err != nil && len(secret) > 5 && strings.Contains(err.Error(), secret) {
				t.Errorf("%s: %q shows %q", test.what, err, secret)
			}
		}
		n.remove(ref)
	}
	n.empty()
}

// An image that the node has for one pod is pulled for another one with that pod's own credentials: the
// registry is asked at each pull.
func TestPresentImageNeedsCredentials_kubernetes_18787(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "secret")
	r := serve(t, "app", "1", a)
	r.Require(registry.Auth{Username: "joe", Password: "hunter2"})
	good := &cri.AuthConfig{Username: "joe", Password: "hunter2"}
	tag := r.Addr() + "/app:1"
	first, err := n.Pull(testContext(t), PullRequest{Image: tag, Auth: good})
	if err != nil {
		t.Fatal(err)
	}
	for _, ref := range append(first.RepoDigests, tag) {
		for _, auth := range []*cri.AuthConfig{nil, {Username: "joe", Password: "wrong"}} {
			if _, err := n.Pull(testContext(t), PullRequest{Image: ref, Auth: auth}); !errors.Is(err, fault.Unauthenticated) {
				t.Errorf("%s with %v: %v", ref, auth, err)
			}
		}
		if got, err := n.Pull(testContext(t), PullRequest{Image: ref, Auth: good}); err != nil || got.ID != first.ID {
			t.Errorf("%s: %+v, %v", ref, got, err)
		}
	}
}

func TestAuthFileIsTheFallBack(t *testing.T) {
	t.Parallel()
	n := newNode(t, func(c *Options) { c.AuthFile = c.SignaturePolicy + ".auth" })
	r := serve(t, "app", "1", motd(t, "x"))
	r.Require(registry.Auth{Username: "joe", Password: "hunter2"})
	n.write("policy.json.auth", `{"auths": {"`+r.Addr()+`": {"auth": "`+encode("joe:hunter2")+`"}}}`)
	n.pull(r.Addr() + "/app:1")
	wrong := &cri.AuthConfig{Username: "joe", Password: "wrong"}
	if _, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1", Auth: wrong}); !errors.Is(err, fault.Unauthenticated) {
		t.Errorf("the request's credentials come first: %v", err)
	}
	n.write("policy.json.auth", `{"auths": {"`+r.Addr()+`": {"auth": "`+encode("jane:wrong")+`"}}}`)
	_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:2"})
	if said := "refused the credentials in " + n.dir; !errors.Is(err, fault.Unauthenticated) || !strings.Contains(err.Error(), said) {
		t.Errorf("%v does not say %q", err, said)
	}
}

// A credential provider leaves credentials for one pull of one repository by the pods
// of one namespace. Nobody finds them again, however the pull ends.
func TestCredentialsOfANamespace(t *testing.T) {
	t.Parallel()
	n := newNode(t, func(c *Options) { c.NamespacedAuthDir = filepath.Join(filepath.Dir(c.Root), "auth") })
	r := serve(t, "app", "1", motd(t, "x"))
	r.Require(registry.Auth{Username: "joe", Password: "hunter2"})
	ref := r.Addr() + "/app:1"
	digest := sha256.Sum256([]byte(r.Addr() + "/app"))
	file := "auth/team-" + hex.EncodeToString(digest[:]) + ".json"
	auth := func(password string) string {
		return `{"auths": {"` + r.Addr() + `": {"auth": "` + encode("joe:"+password) + `"}}}`
	}
	pull := func(namespace, ref string, want error) {
		t.Helper()
		_, err := n.Pull(testContext(t), PullRequest{Image: ref, Namespace: namespace})
		if !errors.Is(err, want) {
			t.Errorf("namespace %q, %s: %v, want %v", namespace, ref, err, want)
		}
		if err != nil && (strings.Contains(err.Error(), "hunter") || strings.Contains(err.Error(), encode("joe:wrong"))) {
			t.Errorf("a secret is shown: %v", err)
		}
		if errors.Is(err, fault.Unauthenticated) && strings.Contains(err.Error(), "in-use") {
			t.Errorf("a file is named that is gone: %v", err)
		}
	}
	left := func(what string, want bool) {
		t.Helper()
		if _, err := os.Stat(filepath.Join(n.dir, file)); (err == nil) != want {
			t.Errorf("%s: is the file there? %v, want %t", what, err, want)
		}
		if used, err := os.ReadDir(filepath.Join(n.dir, "auth", "in-use")); len(used) > 0 {
			t.Errorf("%s: still in use: %v, %v", what, used, err)
		}
	}
	pull("team", ref, fault.Unauthenticated) // without the directory
	if err := os.Mkdir(n.cfg.NamespacedAuthDir, 0o700); err != nil {
		t.Fatal(err)
	}

	n.write(file, auth("hunter2"))
	for _, namespace := range []string{"", "other", "../auth/team", "TEAM"} {
		pull(namespace, ref, fault.Unauthenticated)
	}
	pull("team", r.Addr()+"/app/other:1", fault.Unauthenticated)
	if _, err := n.Pull(testContext(t), PullRequest{Image: ref, Namespace: "team", Kind: new(source.Kind)}); !errors.Is(err, fault.Unauthenticated) {
		t.Errorf("pull of an artifact that an annotation names: %v", err)
	}
	left("after pulls of others", true)
	pull("team", ref, nil)
	left("after its pull", false)
	n.remove(ref)
	pull("team", ref, fault.Unauthenticated)

	for what, content := range map[string]string{"wrong password": auth("wrong"), "nonsense": "joe:hunter2", "helper": `{"credHelpers": {"` + r.Addr() + `": "hunter2"}}`, "too long": strings.Repeat("hunter2", 1<<20/7+1)} {
		n.write(file, content)
		want := fault.Unauthenticated
		if what != "wrong password" {
			want = fault.Precondition
		}
		pull("team", ref, want)
		left("after "+what, false)
	}

	n.write(file, auth("hunter2"))
	name, err := reference.ParseNamed(ref)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := reach.TakeNamespaceAuth(n.cfg.NamespacedAuthDir, "team", name); err != nil { // by a server that is killed then
		t.Fatal(err)
	}
	n.restart()
	left("after a restart", false)
	pull("team", ref, fault.Unauthenticated)
}

// Without auth_file, the files of the user who started the process are not read.
func TestNoAuthFileMeansNone(t *testing.T) {
	n := newNode(t)
	r := serve(t, "app", "1", motd(t, "x"))
	r.Require(registry.Auth{Username: "joe", Password: "hunter2"})
	t.Setenv("HOME", n.dir)
	t.Setenv("XDG_RUNTIME_DIR", n.dir)
	for _, dir := range []string{".docker", "containers"} {
		if err := os.Mkdir(filepath.Join(n.dir, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	secret := `{"auths": {"` + r.Addr() + `": {"auth": "` + encode("joe:hunter2") + `"}}}`
	n.write(".docker/config.json", secret)
	n.write("containers/auth.json", secret)
	if _, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"}); !errors.Is(err, fault.Unauthenticated) {
		t.Errorf("%v", err)
	}
}

// CVE-2020-15157: credentials go to the registry they are for. Mirrors, hosts
// that the registry redirects to, and hosts that an image names see none.
func TestCredentialsGoToTheirRegistryOnly_CVE_2020_15157(t *testing.T) {
	t.Parallel()
	password := &cri.AuthConfig{Username: "joe", Password: "hunter2"}
	for what, auth := range map[string]*cri.AuthConfig{
		"password":       password,
		"base64":         {Auth: encode("joe:hunter2")},
		"identity token": {IdentityToken: "identity"},
		"registry token": {RegistryToken: "as-it-is"},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			a := motd(t, what)
			home, other := registrytest.Start(t), registrytest.StartAt(t, "127.0.0.2:0")
			home.Push("app", "1", a)
			other.Push("app", "1", a)
			n.stranger(other, home.Addr()+"/app:1", auth, func() {
				// A mirror that asks for credentials, before the registry.
				other.Require(registry.Auth{Username: "joe", Password: "hunter2", Bearer: what != "password" && what != "base64"})
				n.write("registries.conf", insecure("127.0.0.1")+registryEntry(home.Addr(), home.Addr())+
					"[[registry.mirror]]\nlocation = \""+other.Addr()+"\"\ninsecure = true\n")
			})
			n.stranger(other, home.Addr()+"/app:1", auth, func() {
				// The registry sends layers to a host that asks for more.
				n.write("registries.conf", insecure("127.0.0.1"))
				home.Require(registry.Auth{Username: "joe", Password: "hunter2", IdentityToken: "identity", RegistryToken: "as-it-is",
					Bearer: what != "password" && what != "base64"})
				home.Inject(registry.Fault{Path: "/blobs/", Do: registry.Redirect("http://" + other.Addr())})
			})
			n.stranger(other, "moved.example/app:1", auth, func() {
				// The operator moves a registry; the secret was for its old name.
				n.write("registries.conf", registryEntry("moved.example", other.Addr()))
			})
		})
	}
}

// stranger pulls after a change and fails the test if r has seen credentials,
// or has not been asked at all.
func (n *node) stranger(r *registry.Registry, ref string, auth *cri.AuthConfig, change func()) {
	n.t.Helper()
	change()
	r.Forget()
	n.Pull(testContext(n.t), PullRequest{Image: ref, Auth: auth}) // it may well fail
	requests := r.Requests()
	if len(requests) == 0 {
		n.t.Error("nobody asked the other host, so that nothing is proved")
	}
	nobody := "Basic " + encode(":")
	for _, request := range requests {
		if request.Authorization != "" && request.Authorization != nobody || strings.Contains(request.Query+request.Body, "identity") || strings.Contains(request.Query, "joe") {
			n.t.Errorf("%s got %+v", r.Addr(), request)
		}
	}
	n.Remove(testContext(n.t), ref)
}

// A layer that is to be fetched from a server of the image's choice is refused
// before anybody is asked: no SSRF, no credentials.
func TestForeignLayerIsRefused_CVE_2020_15157(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	elsewhere := registrytest.StartAt(t, "127.0.0.3:0")
	l := layer(t, image.Text("a", "b"))
	l.URLs = []string{"http://" + elsewhere.Addr() + "/v2/app/blobs/" + l.Digest.String()}
	for _, docker := range []bool{false, true} {
		a := build(t, image.Image{Layers: []image.Layer{l}, Docker: docker})
		r := serve(t, "app", "1", a)
		r.Push("app", "2", index(t, a))
		elsewhere.Push("app", "1", a)
		for _, tag := range []string{"1", "2"} {
			_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:" + tag})
			if !errors.Is(err, fault.Invalid) || len(elsewhere.Requests()) > 0 {
				t.Errorf("docker %t, tag %s: %v, %d requests", docker, tag, err, len(elsewhere.Requests()))
			}
		}
	}
	n.empty()
}

// So is a config that is to be fetched from there.
func TestForeignConfigIsRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	elsewhere := registrytest.StartAt(t, "127.0.0.3:0")
	a := motd(t, "hostile")
	elsewhere.Push("app", "1", a)
	r := serve(t, "app", "1", manifestOf(t, func(m map[string]any) {
		m["config"].(map[string]any)["urls"] = []string{"http://" + elsewhere.Addr() + "/v2/app/blobs/" + a.Config.String()}
	}))
	_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"})
	if !errors.Is(err, fault.Invalid) || len(elsewhere.Requests()) > 0 {
		t.Errorf("%v, %d requests", err, len(elsewhere.Requests()))
	}
	n.empty()
}

func passwordOf(user, password string) *cri.AuthConfig {
	return &cri.AuthConfig{Username: user, Password: password}
}
