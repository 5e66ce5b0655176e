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

	"github.com/opencontainers/go-digest"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/distribution"
	"github.com/crius-run/crius/test/kit/refusing"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/registry/registrytest"
	"github.com/crius-run/crius/test/kit/wait"
)

// joe is who may pull from registries with credentials.
func joe() *cri.AuthConfig {
	return &cri.AuthConfig{Username: distribution.Username, Password: distribution.Password}
}

// says fails the test unless a pull fails with an error that has a text.
func (n *node) says(ref string, auth *cri.AuthConfig, kind error, want string) {
	n.t.Helper()
	_, err := n.Pull(testContext(n.t), PullRequest{Image: ref, Auth: auth})
	if err == nil || !strings.Contains(err.Error(), want) || kind != nil && !errors.Is(err, kind) {
		n.t.Errorf("%v: want %q and %v", err, want, kind)
	}
}

// A real registry with Basic authentication gives images, and its refusals are told as they are.
func TestDistributionWithPasswords(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "basic")
	r := distribution.Start(t, func(config distribution.Section) { config["auth"] = distribution.Htpasswd(t) })
	r.Push("app", "1", index(t, a))
	ref := r.Address + "/app:1"
	if img, err := n.Pull(testContext(t), PullRequest{Image: ref, Auth: joe()}); err != nil || img.ID != a.ID() {
		t.Errorf("%v, %v", img, err)
	}
	n.says(ref, nil, fault.Unauthenticated, "no credentials were sent to "+r.Address)
	n.says(ref, passwordOf(distribution.Username, "wrong"), fault.Unauthenticated, "correct the pull secret")
	n.says(r.Address+"/app:2", joe(), fault.NotFound, "check the name and the tag")
	n.says(r.Address+"/other:1", joe(), fault.NotFound, "check the name and the tag")
}

// A token that the registry takes for expired in the middle of a pull is replaced by a new one.
func TestDistributionWithTokens(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "token")
	authority := distribution.NewAuthority(t)
	r := distribution.Start(t, func(config distribution.Section) { authority.Tokens(config, "app") })
	r.Push("app", "1", a)
	front := r.Front()
	expired := func(answer http.Handler, _ <-chan struct{}) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			req.Header.Set("Authorization", "Bearer "+authority.Token("app", time.Now().Add(-time.Hour)))
			answer.ServeHTTP(w, req)
		})
	}
	for _, blob := range []string{a.Config.String(), layerDigest(a, 1)} {
		front.Inject(registry.Fault{Path: blob, Times: 1, Do: expired})
	}
	ref := front.Addr() + "/app:1"
	if img, err := n.Pull(testContext(t), PullRequest{Image: ref, Auth: joe()}); err != nil || img.ID != a.ID() {
		t.Errorf("%v, %v", img, err)
	}
	n.says(ref, nil, fault.Unauthenticated, "no credentials were sent to "+front.Addr())
	n.says(ref, passwordOf(distribution.Username, "wrong"), fault.Unauthenticated, "correct the pull secret")
	n.says(front.Addr()+"/other:1", joe(), nil, "correct the pull secret")
}

// A registry that wants a certificate of its clients gets the one of its directory, whichever way that
// is written. Without it the error says what is missing.
func TestDistributionWithClientCertificates(t *testing.T) {
	t.Parallel()
	n := newNode(t, func(c *Options) { c.HostsDirs = []string{filepath.Join(filepath.Dir(c.Root), "certs.d")} })
	a := motd(t, "mTLS")
	authority := distribution.NewAuthority(t)
	r := distribution.Start(t, authority.MutualTLS)
	r.Push("app", "1", a)
	ref := r.Address + "/app:1"
	n.says(ref, nil, nil, r.Address+" speaks TLS, by which it refused crius") // insecure = true for 127.0.0.1
	n.write("registries.conf", "")
	n.says(ref, nil, fault.Unavailable, "to trust the authority, write its certificate to /etc/containers/certs.d/"+r.Address)

	dir := "certs.d/" + r.Address
	ok(t, os.MkdirAll(filepath.Join(n.dir, dir), 0o755))
	copyTo := func(name, file string) {
		content, err := os.ReadFile(file)
		ok(t, err)
		n.write(dir+"/"+name, string(content))
	}
	copyTo("ca.crt", authority.File)
	// The alert comes when the client has long begun to send, and its paused machine may notice
	// only that the connection is closed.
	refused := func() {
		t.Helper()
		wait.Retry(t, func() error {
			_, err := n.Pull(testContext(t), PullRequest{Image: ref})
			if !errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), r.Address+" refused the TLS connection: if it wants a client certificate") {
				return fmt.Errorf("without the right certificate: %w", err)
			}
			return nil
		})
	}
	refused()
	strange, key := distribution.NewAuthority(t).Issue()
	copyTo("client.cert", strange)
	copyTo("client.key", key)
	refused()

	certificate, key := authority.Issue()
	copyTo("client.cert", certificate)
	copyTo("client.key", key)
	n.remove(n.pull(ref).ID)
	n.write(dir+"/hosts.toml", "[host.\"https://"+r.Address+"\"]\nca = \"ca.crt\"\nclient = [[\"client.cert\", \"client.key\"]]\n")
	n.remove(n.pull(ref).ID)
	n.empty()
}

// What a real registry does once does not fail a pull; refused HEAD requests do not either.
func TestDistributionBehindFaults(t *testing.T) {
	t.Parallel()
	r := distribution.Start(t, nil)
	noHEAD := func(status int) registry.Action {
		return func(answer http.Handler, _ <-chan struct{}) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				if req.Method == http.MethodHead {
					w.WriteHeader(status)
					return
				}
				answer.ServeHTTP(w, req)
			})
		}
	}
	wait := func(header string) registry.Action {
		return registry.Status(http.StatusTooManyRequests, "Retry-After", header)
	}
	past := time.Now().Add(-time.Hour).UTC().Format(http.TimeFormat)
	for name, f := range map[string]registry.Fault{
		"HEAD 405":            {Do: noHEAD(http.StatusMethodNotAllowed)},
		"HEAD 404":            {Do: noHEAD(http.StatusNotFound)},
		"no ranges":           {Path: "/blobs/", Do: noRanges},
		"layer 502":           {Path: "/blobs/", Times: 1, Do: registry.Page(http.StatusBadGateway)},
		"layer cut":           {Path: "/blobs/", Times: 1, Do: registry.Reset(10)},
		"wait 0":              {Path: "/manifests/", Times: 1, Do: wait("0")},
		"wait -5":             {Path: "/manifests/", Times: 1, Do: wait("-5")},
		"wait until before":   {Path: "/manifests/", Times: 1, Do: wait(past)},
		"wait for nonsense":   {Path: "/blobs/", Times: 1, Do: wait("soon")},
		"wait beyond numbers": {Path: "/blobs/", Times: 1, Do: wait("99999999999999999999")},
		"wait without time":   {Path: "/v2/", Times: 1, Do: registry.Status(http.StatusTooManyRequests)},
	} {
		a := motd(t, name)
		r.Push("app", digest.FromString(name).Encoded(), a)
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			front := r.Front()
			front.Inject(f)
			if img := n.pull(front.Addr() + "/app:" + digest.FromString(name).Encoded()); img.ID != a.ID() {
				t.Errorf("pulled %s", img.ID)
			}
		})
	}
}

// What a registry has lost of an image comes from the next source. If there is none, the error blames
// the registry, and not the name of the image.
func TestDistributionThatLostParts(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	home, mirror := distribution.Start(t, nil), distribution.Start(t, nil)
	for what, lose := range map[string]func(r *distribution.Registry, text string) (whole digest.Digest){
		"layer": func(r *distribution.Registry, text string) digest.Digest {
			a := motd(t, text)
			r.Push("app", text, index(t, a))
			r.Lose(digest.Digest(layerDigest(a, 1)))
			return a.Config
		},
		"config": func(r *distribution.Registry, text string) digest.Digest {
			a := motd(t, text)
			r.Push("app", text, index(t, a))
			r.Lose(a.Config)
			return a.Config
		},
		"manifest": func(r *distribution.Registry, text string) digest.Digest {
			a := motd(t, text)
			r.Push("app", text, index(t, a))
			r.Lose(a.Digest())
			return a.Config
		},
	} {
		n.write("registries.conf", insecure("127.0.0.1"))
		lose(home, what)
		n.says(home.Address+"/app:"+what, nil, fault.NotFound, home.Address+" has the image's manifest, and not all that it names: push the image again")
		lose(mirror, what+"-mirrored")
		a := motd(t, what+"-mirrored")
		home.Push("app", what+"-mirrored", index(t, a))
		n.write("registries.conf", registryEntry(home.Address, home.Address)+"[[registry.mirror]]\nlocation = \""+mirror.Address+"\"\ninsecure = true\n")
		if img := n.pull(home.Address + "/app:" + what + "-mirrored"); img.ID != a.ID() {
			t.Errorf("%s: pulled %s", what, img.ID)
		}
		n.remove(a.ID())
	}
	n.empty()
}

// A registry that sends clients to a storage for layers is not blamed for what that refuses, nor are
// credentials, which the storage does not see.
func TestStorageBehindARegistryIsBlamed_k8s_io_4214(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "storage")
	r := distribution.Start(t, func(config distribution.Section) { config["auth"] = distribution.Htpasswd(t) })
	r.Push("app", "1", a)
	front, storage := r.Front(), registrytest.StartAt(t, "127.0.0.2:0")
	storage.Push("app", "1", a)
	front.Inject(registry.Fault{Path: "/blobs/", Do: registry.Redirect("http://" + storage.Addr())})
	ref := front.Addr() + "/app:1"
	if img, err := n.Pull(testContext(t), PullRequest{Image: ref, Auth: joe()}); err != nil || img.ID != a.ID() {
		t.Errorf("%v, %v", img, err)
	}
	n.remove(ref)
	blamed := storage.Addr() + ", to which " + front.Addr() + " sends crius for layers, refused"
	for name, do := range map[string]registry.Action{
		"asks for Basic":    registry.Status(http.StatusUnauthorized, "WWW-Authenticate", `Basic realm="storage"`),
		"denies access":     registry.Page(http.StatusForbidden),
		"does not have it":  registry.Page(http.StatusNotFound),
		"finds a bad query": registry.Page(http.StatusBadRequest),
	} {
		storage.Heal()
		storage.Inject(registry.Fault{Path: "/blobs/", Do: do})
		_, err := n.Pull(testContext(t), PullRequest{Image: ref, Auth: joe()})
		if err == nil || !strings.Contains(err.Error(), blamed) || strings.Contains(err.Error(), "pull secret") {
			t.Errorf("%s: %v", name, err)
		}
	}
	storage.Heal()
	storage.Inject(registry.Fault{Path: "/blobs/", Do: registry.Page(http.StatusBadGateway)})
	n.says(ref, joe(), fault.Unavailable, storage.Addr()+", to which "+front.Addr()+" sends crius, failed")
	nobody := fmt.Sprint("127.0.0.1:", refusing.Port(t))
	front.Heal()
	front.Inject(registry.Fault{Path: "/blobs/", Do: registry.Redirect("http://" + nobody)})
	n.says(ref, joe(), fault.Unavailable, "check that the node reaches "+nobody+", to which "+front.Addr()+" sends crius")
	for _, request := range storage.Requests() {
		if request.Authorization != "" {
			t.Errorf("the storage got %q", request.Authorization)
		}
	}
	n.empty()
}

// Who answers in the place of a registry, or of its server of tokens, is blamed for that, and not the
// name of the image or the pull secret.
func TestWhoIsNoRegistryIsBlamed(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "no registry")
	for name, status := range map[string]int{"refuses": http.StatusForbidden, "knows nothing": http.StatusNotFound} {
		r := serve(t, "app", "1", a)
		r.Inject(registry.Fault{Path: "/v2/", Do: registry.Page(status)})
		_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1", Auth: joe()})
		if err == nil || !strings.Contains(err.Error(), r.Addr()+" does not answer as a registry") || strings.Contains(err.Error(), "pull secret") {
			t.Errorf("%s: %v", name, err)
		}
	}
	tokens := registrytest.StartAt(t, "127.0.0.2:0")
	for name, do := range map[string]registry.Action{
		"page":        registry.Page(http.StatusOK),
		"not found":   registry.Page(http.StatusNotFound),
		"bad request": registry.Status(http.StatusBadRequest),
		"broken":      registry.Page(http.StatusBadGateway),
	} {
		r := serve(t, "app", "1", a)
		r.Require(registry.Auth{Username: distribution.Username, Password: distribution.Password, Bearer: true, Realm: "http://" + tokens.Addr() + "/token", Tokens: tokens})
		tokens.Heal()
		tokens.Inject(registry.Fault{Do: do})
		_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1", Auth: joe()})
		if err == nil || !strings.Contains(err.Error(), tokens.Addr()+" gave no token for "+r.Addr()) || strings.Contains(err.Error(), "pull secret") {
			t.Errorf("%s: %v", name, err)
		}
	}
	n.empty()
}
