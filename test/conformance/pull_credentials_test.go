package main_test

import (
	"encoding/base64"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/scene"
)

const (
	user, password = "jane", "p@ss:word"
	identity       = "identity-secret"
	bearer         = "registry-secret"
)

// secrets must be in no message and no log.
var secrets = []string{password, identity, bearer, encode(user, password), "wrong-secret"}

func encode(user, password string) string {
	return base64.StdEncoding.EncodeToString([]byte(user + ":" + password))
}

// guarded is a node with an image that requires credentials. Its name contains
// its registry's address, because credentials are for the host in the name, and
// not for one with which registries.conf replaces it.
func guarded(t *testing.T) (w *scene.World, ref string) {
	t.Helper()
	w = scene.Private(t, node.Options{})
	built, err := images.Build(func(c *imagespec.ImageConfig) { c.Labels = map[string]string{"for": t.Name()} })
	if err != nil {
		t.Fatal(err)
	}
	w.Registry.Push("secret/image", "latest", built)
	return w, node.RegistryAddress + "/secret/image:latest"
}

func pull(t *testing.T, w *scene.World, ref string, auth *cri.AuthConfig) error {
	t.Helper()
	_, err := w.Images().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref}, Auth: auth})
	if err != nil {
		for _, s := range secrets {
			if strings.Contains(err.Error(), s) {
				t.Errorf("the message tells the secret %s: %v", s, err)
			}
		}
	}
	return err
}

// forget removes the image, so that the next pull must ask the registry again.
func forget(t *testing.T, w *scene.World, ref string) {
	t.Helper()
	if _, err := w.Images().RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: ref}}); err != nil {
		t.Fatal(err)
	}
}

// TestPullCredentials tests every form of AuthConfig, right and wrong, against
// registries that require Basic or a token.
func TestPullCredentials(t *testing.T) {
	t.Parallel()
	w, ref := guarded(t)
	basic := registry.Auth{Username: user, Password: password}
	token := registry.Auth{Username: user, Password: password, IdentityToken: identity, RegistryToken: bearer, Bearer: true}
	denied := []codes.Code{codes.Unauthenticated, codes.PermissionDenied}
	for _, test := range []struct {
		name    string
		wants   registry.Auth
		auth    *cri.AuthConfig
		refused bool
	}{
		{"nobody is asked", registry.Auth{}, nil, false},
		{"nobody is asked, but tells", registry.Auth{}, &cri.AuthConfig{Username: user, Password: password}, false},
		{"basic: name and password", basic, &cri.AuthConfig{Username: user, Password: password}, false},
		{"basic: both in one", basic, &cri.AuthConfig{Auth: encode(user, password)}, false},
		{"basic: for this registry", basic, &cri.AuthConfig{Username: user, Password: password, ServerAddress: node.RegistryAddress}, false},
		{"basic: for this registry, as a URL", basic, &cri.AuthConfig{Username: user, Password: password, ServerAddress: "https://" + node.RegistryAddress + "/v2/"}, false},
		{"basic: for this repository", basic, &cri.AuthConfig{Username: user, Password: password, ServerAddress: node.RegistryAddress + "/secret"}, false},
		{"basic: for another registry", basic, &cri.AuthConfig{Username: user, Password: password, ServerAddress: "elsewhere.test"}, true},
		{"basic: for another registry whose name begins alike", basic, &cri.AuthConfig{Username: user, Password: password, ServerAddress: node.RegistryAddress + ".evil.test"}, true},
		{"basic: none", basic, nil, true},
		{"basic: empty", basic, &cri.AuthConfig{}, true},
		{"basic: wrong password", basic, &cri.AuthConfig{Username: user, Password: "wrong-secret"}, true},
		{"basic: wrong name", basic, &cri.AuthConfig{Username: "joe", Password: password}, true},
		{"token: name and password", token, &cri.AuthConfig{Username: user, Password: password}, false},
		{"token: both in one", token, &cri.AuthConfig{Auth: encode(user, password)}, false},
		{"token: identity token", token, &cri.AuthConfig{IdentityToken: identity}, false},
		{"token: registry token", token, &cri.AuthConfig{RegistryToken: bearer}, false},
		{"token: none", token, nil, true},
		{"token: wrong password", token, &cri.AuthConfig{Username: user, Password: "wrong-secret"}, true},
		{"token: wrong identity token", token, &cri.AuthConfig{IdentityToken: "wrong-secret"}, true},
		{"token: wrong registry token", token, &cri.AuthConfig{RegistryToken: "wrong-secret"}, true},
		{"token: registry token for another registry", token, &cri.AuthConfig{RegistryToken: bearer, ServerAddress: "elsewhere.test"}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			w.Registry.Require(test.wants)
			w.Registry.Forget()
			err := pull(t, w, ref, test.auth)
			if test.refused {
				scene.WantOneOf(t, err, denied, ref)
			} else if err != nil {
				t.Error(err)
			}
			for _, r := range w.Registry.Requests() {
				if test.auth.GetServerAddress() == "elsewhere.test" && (strings.Contains(r.Authorization, encode(user, password)) || strings.Contains(r.Authorization, bearer)) {
					t.Errorf("credentials for another registry were sent: %s %s", r.Method, r.Path)
				}
			}
			forget(t, w, ref)
		})
	}
	log := scene.Read(t, w.LogFile())
	for _, s := range secrets {
		if strings.Contains(log, s) {
			t.Errorf("the server's log tells the secret %s", s)
		}
	}
	var left []string
	err := filepath.WalkDir(w.Path("tmp"), func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			left = append(left, path)
		}
		return err
	})
	if err != nil || len(left) > 0 {
		t.Errorf("files left in the directory for temporary files: %q, %v", left, err)
	}
}

func TestPullCredentialsThatAreNone(t *testing.T) {
	t.Parallel()
	w, ref := guarded(t)
	for name, auth := range map[string]*cri.AuthConfig{
		"no base64":         {Auth: "%%%"},
		"no colon":          {Auth: base64.StdEncoding.EncodeToString([]byte("wrong-secret"))},
		"a line break":      {Username: "a\r\nX-Evil: 1", Password: password},
		"a token with one":  {RegistryToken: "a\r\nX-Evil: 1"},
		"a server with one": {Username: user, Password: password, ServerAddress: "a\nb"},
	} {
		t.Run(name, func(t *testing.T) {
			w.Registry.Require(registry.Auth{Username: user, Password: password})
			err := pull(t, w, ref, auth)
			if err == nil || status.Code(err) == codes.Unknown || status.Code(err) == codes.Internal {
				t.Errorf("got %v", err)
			}
		})
	}
}

// What one pod may pull is not available to the next one without or with other
// credentials, not even during the first pull.
func TestCredentialsOfOnePullNeverServeAnother(t *testing.T) {
	t.Parallel()
	w, ref := guarded(t)
	for _, wants := range []registry.Auth{
		{Username: user, Password: password},
		{Username: user, Password: password, Bearer: true},
	} {
		w.Registry.Require(wants)
		right := &cri.AuthConfig{Username: user, Password: password}
		if err := pull(t, w, ref, right); err != nil {
			t.Fatal(err)
		}
		// The image is present, and still cannot be pulled without credentials.
		for _, other := range []*cri.AuthConfig{nil, {Username: "joe", Password: "wrong-secret"}} {
			if err := pull(t, w, ref, other); err == nil {
				t.Errorf("a pull with %v was let in after one with credentials", other.GetUsername())
			}
		}
		forget(t, w, ref)

		type result struct {
			mayPull bool
			err     error
		}
		results := make(chan result)
		for i := range 8 {
			auth := right
			if i%2 == 1 {
				auth = nil
			}
			go func() {
				_, err := w.Images().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref}, Auth: auth})
				results <- result{auth != nil, err}
			}()
		}
		for range 8 {
			if r := <-results; r.mayPull != (r.err == nil) {
				t.Errorf("side by side: may pull: %v, got %v", r.mayPull, r.err)
			}
		}
		forget(t, w, ref)
	}
}

// The kubelet turns two errors into its own reasons. It recognizes them by the
// beginning of the message, and only with code Unknown, because its client
// keeps the code in all other messages.
func TestPullErrorsThatTheKubeletKnows(t *testing.T) {
	t.Parallel()
	w, ref := guarded(t)
	known := func(t *testing.T, err, want error) {
		t.Helper()
		if status.Code(err) != codes.Unknown || !strings.HasPrefix(status.Convert(err).Message(), want.Error()) {
			t.Errorf("got %v, want code Unknown and a message that begins with %v", err, want)
		}
	}
	t.Run("registry unavailable", func(t *testing.T) {
		if err := w.Registries("[[registry]]\nprefix = \"gone.test\"\nlocation = \"127.0.0.1:9\"\ninsecure = true"); err != nil {
			t.Fatal(err)
		}
		known(t, pull(t, w, "gone.test/some/image:latest", nil), crierrors.ErrRegistryUnavailable)
	})
	t.Run("signature", func(t *testing.T) {
		if err := w.Write("policy.json", `{"default": [{"type": "reject"}]}`); err != nil {
			t.Fatal(err)
		}
		known(t, pull(t, w, ref, nil), crierrors.ErrSignatureValidationFailed)
	})
}
