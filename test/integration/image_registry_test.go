package integration

import (
	"context"
	"encoding/base64"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/testkit/node"
	"github.com/crius-run/crius/internal/testkit/registry"
)

// serve adds a registry to the node's network.
func (w *world) serve(t *testing.T, address string) *registry.Registry {
	t.Helper()
	l, err := w.Listen(address)
	if err != nil {
		t.Fatal(err)
	}
	r := registry.New()
	r.Serve(l)
	t.Cleanup(r.Close)
	return r
}

// app is named by the registry's address: credentials go to the host that the
// image's name has, and to no other that registries.conf puts in its place.
const app = node.RegistryAddress + "/app:latest"

func (w *world) pullAs(t *testing.T, ref string, auth *cri.AuthConfig) error {
	t.Helper()
	_, err := w.Images().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref}, Auth: auth})
	return err
}

func TestCredentialsInEveryForm(t *testing.T) {
	t.Parallel()
	const user, password, identity, token = "someone", "s3cret-p4ss", "an-identity-t0ken", "a-registry-t0ken"
	encoded := base64.StdEncoding.EncodeToString([]byte(user + ":" + password))
	basic := registry.Auth{Username: user, Password: password}
	bearer := registry.Auth{Username: user, Password: password, IdentityToken: identity, RegistryToken: token, Bearer: true}
	cases := map[string]struct {
		require registry.Auth
		auth    *cri.AuthConfig
		code    codes.Code
	}{
		"basic: user and password":     {basic, &cri.AuthConfig{Username: user, Password: password}, codes.OK},
		"basic: auth":                  {basic, &cri.AuthConfig{Auth: encoded}, codes.OK},
		"basic: with server address":   {basic, &cri.AuthConfig{Auth: encoded, ServerAddress: node.RegistryAddress}, codes.OK},
		"basic: server address as URL": {basic, &cri.AuthConfig{Auth: encoded, ServerAddress: "https://" + node.RegistryAddress + "/v1/"}, codes.OK},
		"basic: for another server":    {basic, &cri.AuthConfig{Auth: encoded, ServerAddress: "elsewhere.test"}, codes.Unauthenticated},
		"basic: wrong password":        {basic, &cri.AuthConfig{Username: user, Password: "wr0ng-p4ss"}, codes.Unauthenticated},
		"basic: nothing":               {basic, nil, codes.Unauthenticated},
		"basic: empty":                 {basic, &cri.AuthConfig{}, codes.Unauthenticated},
		"bearer: user and password":    {bearer, &cri.AuthConfig{Username: user, Password: password}, codes.OK},
		"bearer: identity token":       {bearer, &cri.AuthConfig{IdentityToken: identity}, codes.OK},
		"bearer: registry token":       {bearer, &cri.AuthConfig{RegistryToken: token}, codes.OK},
		"bearer: wrong identity token": {bearer, &cri.AuthConfig{IdentityToken: "wr0ng-identity"}, codes.Unauthenticated},
		"bearer: wrong registry token": {bearer, &cri.AuthConfig{RegistryToken: "wr0ng-registry"}, codes.Unauthenticated},
		"bearer: nothing":              {bearer, nil, codes.Unauthenticated},
	}
	w := store(t)
	w.Registry.Push("app", "latest", unusual(t, ""))
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			w.Registry.Require(c.require)
			err := w.pullAs(t, app, c.auth)
			if status.Code(err) != c.code {
				t.Errorf("got %v, want %v", err, c.code)
			}
			for _, secret := range []string{password, identity, token, encoded, "wr0ng"} {
				if err != nil && strings.Contains(err.Error(), secret) {
					t.Errorf("the message tells the secret: %v", err)
				}
			}
			w.removeImage(t, app)
		})
	}
	err := w.pullAs(t, app, &cri.AuthConfig{Auth: "not base64!"})
	wantCode(t, err, codes.InvalidArgument)
	log := read(t, w.LogFile())
	for _, secret := range []string{password, identity, token, encoded, "wr0ng"} {
		if strings.Contains(log, secret) {
			t.Errorf("the server's log tells the secret %s", secret)
		}
	}
}

// Credentials never reach a server they are not for (CVE-2020-15157).
func TestCredentialsStayWithTheirRegistry_CVE_2020_15157(t *testing.T) {
	t.Parallel()
	w := store(t)
	other := w.serve(t, "127.0.0.2:5000")
	built := unusual(t, "")
	w.Registry.Push("app", "latest", built)
	other.Push("app", "latest", built)
	w.Registry.Require(registry.Auth{Username: "someone", Password: "s3cret"})
	w.Registry.Inject(registry.Fault{Path: "/blobs/", Do: registry.Redirect("http://127.0.0.2:5000")})
	w.pullAs(t, app, &cri.AuthConfig{Username: "someone", Password: "s3cret"}) // may fail or not
	for _, r := range other.Requests() {
		if r.Authorization != "" {
			t.Errorf("%s %s at another server carries credentials", r.Method, r.Path)
		}
	}
}

func TestMirrors(t *testing.T) {
	t.Parallel()
	w := store(t)
	first, second := w.serve(t, "127.0.0.2:5000"), w.serve(t, "127.0.0.3:5000")
	err := w.Registries(`
[[registry]]
prefix = "mirrored.test"
location = "` + node.RegistryAddress + `"
insecure = true
[[registry.mirror]]
location = "127.0.0.2:5000"
insecure = true
[[registry.mirror]]
location = "127.0.0.3:5000/below"
insecure = true

[[registry]]
prefix = "blocked.test"
location = "127.0.0.4:5000"
insecure = true
blocked = true
`)
	if err != nil {
		t.Fatal(err)
	}
	pull := func(repo string) error { return w.pullAs(t, "mirrored.test/"+repo+":latest", nil) }
	served := func(r *registry.Registry) bool { return len(r.Requests()) > 0 }

	first.Push("a", "latest", unusual(t, "a"))
	if err := pull("a"); err != nil || !served(first) || served(second) {
		t.Errorf("an image of the first mirror: %v", err)
	}
	second.Push("below/b", "latest", unusual(t, "b"))
	if err := pull("b"); err != nil {
		t.Errorf("an image of the second mirror: %v", err)
	}
	w.Registry.Push("c", "latest", unusual(t, "c"))
	if err := pull("c"); err != nil {
		t.Errorf("an image of the registry only: %v", err)
	}
	first.Close()
	second.Inject(registry.Fault{Do: registry.Status(http.StatusInternalServerError)})
	w.Registry.Push("d", "latest", unusual(t, "d"))
	if err := pull("d"); err != nil {
		t.Errorf("with all mirrors broken: %v", err)
	}
	img := w.imageStatus(t, "mirrored.test/d:latest")
	if img == nil || len(img.RepoTags) != 1 || img.RepoTags[0] != "mirrored.test/d:latest" {
		t.Errorf("image is %v, want it under the name that was asked for", img)
	}
	if err := w.pullAs(t, "blocked.test/c:latest", nil); err == nil {
		t.Error("an image of a blocked registry was pulled")
	}
}

func TestPolicyIsObeyed(t *testing.T) {
	t.Parallel()
	w := store(t)
	w.Registry.Push("app", "latest", unusual(t, ""))
	put(t, w.Path("policy.json"), `{"default": [{"type": "reject"}]}`)
	err := w.pullAs(t, app, nil)
	// A kubelet knows this failure by its first word, and only under this code.
	wantCode(t, err, codes.Unknown, "SignatureValidationFailed: ")
	if img := w.imageStatus(t, app); img != nil {
		t.Error("the rejected image is there")
	}
}

func TestRegistryFaults(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: "[image]\nprogress_timeout = \"10s\"\n"})
	cases := map[string]struct {
		fault registry.Fault
		ok    bool // it heals, or can be worked around
	}{
		"500 for ever":       {registry.Fault{Do: registry.Status(500)}, false},
		"not found":          {registry.Fault{Path: "/manifests/", Do: registry.Status(404)}, false},
		"forbidden":          {registry.Fault{Path: "/manifests/", Do: registry.Status(403)}, false},
		"too many requests":  {registry.Fault{Path: "/manifests/", Times: 1, Do: registry.TooManyRequests(1)}, true},
		"a stalled blob":     {registry.Fault{Path: "/blobs/", Do: registry.Stall(1000)}, false},
		"a stalled manifest": {registry.Fault{Path: "/manifests/", Do: registry.Stall(0)}, false},
		"wrong bytes":        {registry.Fault{Path: "/blobs/", Do: registry.Replace(registry.Corrupt)}, false},
		"too few bytes":      {registry.Fault{Path: "/blobs/", Do: registry.Replace(registry.Truncate)}, false},
		"a broken manifest":  {registry.Fault{Path: "/manifests/", Do: registry.Replace(registry.Truncate)}, false},
		"broken once":        {registry.Fault{Path: "/blobs/", Times: 1, Do: registry.Reset(1000)}, true},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			repo := strings.ReplaceAll(name, " ", "-")
			ref := node.RegistryHost + "/" + repo + ":latest"
			w.Registry.Push(repo, "latest", unusual(t, name))
			w.Registry.Inject(c.fault)
			defer w.Registry.Heal()
			began := time.Now()
			err := w.pullAs(t, ref, nil)
			if took := time.Since(began); took > endless {
				t.Errorf("took %v", took)
			}
			if (err == nil) != c.ok {
				t.Errorf("PullImage: %v, want success %v", err, c.ok)
			}
			if img := w.imageStatus(t, ref); (img != nil) != (err == nil) {
				t.Errorf("after %v the image is %v", err, img)
			}
			w.Registry.Heal()
			if err := w.pullAs(t, ref, nil); err != nil {
				t.Errorf("after the registry has healed: %v", err)
			}
		})
	}
	entries, err := os.ReadDir(w.Path("tmp"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		t.Errorf("a failed pull left %s", filepath.Join(w.Path("tmp"), e.Name()))
	}
}

func TestPullErrorsHaveTheirCodes(t *testing.T) {
	t.Parallel()
	w := shared(t)
	err := w.pullAs(t, node.RegistryHost+"/no/such/repository:latest", nil)
	wantCode(t, err, codes.NotFound, "no/such/repository")
	err = w.pullAs(t, "unreachable.test:9/x:latest", nil)
	wantCode(t, err, codes.Unknown, "RegistryUnavailable: ", "unreachable.test")
}

// A pull outlives the client that asked for it.
func TestPullGoesOnWithoutItsCaller(t *testing.T) {
	t.Parallel()
	w := store(t)
	w.Registry.Push("app", "latest", unusual(t, ""))
	gone := make(chan struct{})
	w.Registry.Inject(registry.Fault{Path: "/manifests/", Times: 1, Do: func(answer http.Handler, stop <-chan struct{}) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			select {
			case <-gone: // the caller
			case <-stop:
			}
			answer.ServeHTTP(w, req)
		})
	}})
	w.Registry.Forget()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	pulled := make(chan error, 1)
	go func() {
		_, err := w.Images().PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: app}})
		pulled <- err
	}()
	if !eventually(func() bool { return len(w.Registry.Requests()) > 0 }) {
		t.Fatal("the pull never began")
	}
	cancel()
	wantCode(t, <-pulled, codes.Canceled)
	close(gone)
	if !eventually(func() bool { return w.imageStatus(t, app) != nil }) {
		t.Error("the image never came")
	}
}
