package storage

import (
	"bytes"
	"compress/gzip"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
)

// A registry that fails once does not fail the pull; one that goes on failing does.
func TestRegistryFailsOnce(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	unasked := func(answer http.Handler, _ <-chan struct{}) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if req.Header.Get("Range") == "" {
				req.Header.Set("Range", "bytes=0-")
			}
			answer.ServeHTTP(w, req)
		})
	}
	for name, do := range map[string]registry.Action{
		"500":       registry.Status(http.StatusInternalServerError),
		"503":       registry.Page(http.StatusServiceUnavailable),
		"404":       registry.Page(http.StatusNotFound),
		"401":       registry.Status(http.StatusUnauthorized),
		"403":       registry.Status(http.StatusForbidden),
		"206":       unasked,
		"page, 502": registry.Page(http.StatusBadGateway),
	} {
		a := motd(t, name)
		r := serve(t, "app", "1", a)
		for _, blob := range []string{layerDigest(a, 1), a.Config.String()} {
			r.Inject(registry.Fault{Path: blob, Times: 1, Do: do})
		}
		if img, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"}); err != nil || img.ID != a.ID() {
			t.Errorf("%s: %v, %v", name, img, err)
			continue
		}
		n.remove(a.ID())
		r.Inject(registry.Fault{Path: layerDigest(a, 1), Do: do})
		if _, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"}); (err == nil) != (name == "206") {
			t.Errorf("%s always: %v", name, err)
		}
	}
}

// A token that expires in the middle of a pull, earlier than it said, is replaced by a new one. Wrong
// credentials stay wrong.
func TestTokenExpiresDuringPull(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	auth := &cri.AuthConfig{Username: "user", Password: "hunter22"}
	a := motd(t, "token")
	r := serve(t, "app", "1", a)
	r.Require(registry.Auth{Username: "user", Password: "hunter22", Bearer: true})
	expire := func(answer http.Handler, _ <-chan struct{}) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			r.ExpireTokens()
			answer.ServeHTTP(w, req)
		})
	}
	for _, blob := range []string{layerDigest(a, 1), a.Config.String()} { // one of the layers, which are fetched side by side
		r.Inject(registry.Fault{Path: blob, Times: 1, Do: expire})
	}
	if img, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1", Auth: auth}); err != nil || img.ID != a.ID() {
		t.Errorf("%v, %v", img, err)
	}
	n.remove(a.ID())
	r.Inject(registry.Fault{Path: layerDigest(a, 1), Do: expire})
	r.Forget()
	if _, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1", Auth: auth}); err == nil || !strings.Contains(err.Error(), "correct the pull secret") {
		t.Errorf("tokens that never hold: %v", err)
	}
	if asked := len(r.Requests()); asked > 50 {
		t.Errorf("%d requests for tokens that never hold", asked)
	}
}

// What a registry or its storage refuses in the middle of a layer, because a token or the signature in an address has
// expired since the layer began, is asked for with new ones. The bytes that have come are not fetched again.
func TestPermissionExpiresWithinALayer_containerd_9274_distribution_4175(t *testing.T) {
	t.Parallel()
	expired := registry.Replace(func([]byte) []byte { return []byte("<Error><Code>ExpiredToken</Code></Error>") })
	withStatus := func(status int) registry.Action {
		return func(answer http.Handler, stop <-chan struct{}) http.Handler {
			return expired(registry.Status(status)(answer, stop), stop)
		}
	}
	for name, c := range map[string]struct {
		do     registry.Action // to the library, which connects again, and to crius
		stored bool            // the registry redirects to a storage, which refuses
	}{
		"token, 401":   {do: nil},
		"token, 403":   {do: registry.Status(http.StatusForbidden)},
		"storage, 403": {do: withStatus(http.StatusForbidden), stored: true},
		"storage, 400": {do: withStatus(http.StatusBadRequest), stored: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, a := newNode(t), noise(t, 3*mega)
			blob := layerDigest(a, 0)
			r := serve(t, "app", "1", a)
			r.Require(registry.Auth{Username: "user", Password: "hunter22", Bearer: true})
			sends := r
			if c.stored {
				sends = serve(t, "app", "1", a)
				r.Inject(registry.Fault{Path: blob, Do: registry.Redirect("http://" + sends.Addr())})
			}
			sends.Inject(registry.Fault{Path: blob, Times: 1, Do: func(answer http.Handler, stop <-chan struct{}) http.Handler {
				cut := registry.Reset(mega)(answer, stop)
				return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
					if c.do == nil {
						defer r.ExpireTokens()
					}
					cut.ServeHTTP(w, req)
				})
			}})
			if c.do != nil {
				sends.Inject(registry.Fault{Path: blob, Times: 2, Do: c.do})
			}
			if img := n.pullAs(r.Addr()+"/app:1", passwordOf("user", "hunter22")); img.ID != a.ID() {
				t.Errorf("pulled %s", img.ID)
			}
			wholes, parts := asked(sends, blob)
			if size := int64(len(a.Blobs[digest.Digest(blob)])); wholes != 1 || parts != 3 || sends.Sent(blob) > size+mega {
				t.Errorf("%d requests for the whole and %d for parts; %d bytes sent of a layer of %d", wholes, parts, sends.Sent(blob), size)
			}
		})
	}
}

// A password that expires while a layer comes, as those of registries of clouds do, fails the pull for this reason,
// and the next one, with another password, goes on with the layer.
func TestPasswordExpiresWithinALayer_ecr_credential_helper_7(t *testing.T) {
	t.Parallel()
	n, a := newNode(t), noise(t, 3*mega)
	blob := layerDigest(a, 0)
	r := serve(t, "app", "1", a)
	r.Require(registry.Auth{Username: "AWS", Password: "hunter22"})
	r.Inject(registry.Fault{Path: blob, Times: 1, Do: func(answer http.Handler, stop <-chan struct{}) http.Handler {
		cut := registry.Reset(mega)(answer, stop)
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			defer r.Require(registry.Auth{Username: "AWS", Password: "hunter23"})
			cut.ServeHTTP(w, req)
		})
	}})
	n.fails("expired", r.Addr()+"/app:1", passwordOf("AWS", "hunter22"), fault.Unauthenticated, `refused user "AWS" of the pull request: correct the pull secret`, "node reaches")
	r.Forget()
	n.pullAs(r.Addr()+"/app:1", passwordOf("AWS", "hunter23"))
	size := int64(len(a.Blobs[digest.Digest(blob)]))
	if wholes, _ := asked(r, blob); wholes != 0 || r.Sent(blob) > size-mega/2 {
		t.Errorf("%d requests for the whole, %d bytes sent of a layer of %d", wholes, r.Sent(blob), size)
	}
}

// The error of a pull that fails because of what an image is blames neither the network nor the disk.
func TestBrokenImageIsBlamed(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	whole := layer(t, image.Text("file", strings.Repeat("x", 4096)))
	content, err := gzip.NewReader(bytes.NewReader(whole.Blob))
	ok(t, err)
	var archive bytes.Buffer
	_, err = archive.ReadFrom(content)
	ok(t, err)
	cut := archive.Bytes()[:1024]
	var blob bytes.Buffer
	w := gzip.NewWriter(&blob)
	_, err = w.Write(cut)
	ok(t, err)
	ok(t, w.Close())
	broken := map[string]image.Layer{
		"tar cut off": {Blob: blob.Bytes(), Digest: digest.FromBytes(blob.Bytes()), DiffID: digest.FromBytes(cut)},
		"gzip cut off": {
			Blob: blob.Bytes()[:blob.Len()-10], Digest: digest.FromBytes(blob.Bytes()[:blob.Len()-10]), DiffID: digest.FromBytes(cut),
		},
	}
	for name, l := range broken {
		r := serve(t, "app", "1", build(t, image.Image{Layers: []image.Layer{l}}))
		_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"})
		if !errors.Is(err, fault.Invalid) || strings.Contains(err.Error(), "node reaches the registry") || !strings.Contains(err.Error(), "rebuild the image") {
			t.Errorf("%s: %v", name, err)
		}
	}
	// What the registry or a proxy has changed is no fault of the image, wherever it is found first.
	stored, err := image.NewStoredLayer(image.Text("a", strings.Repeat("x", 4096)), image.Text("b", "y"))
	ok(t, err)
	for at, l := range map[string]image.Layer{"header": stored, "compressed": whole} {
		r := serve(t, "app", "1", build(t, image.Image{Layers: []image.Layer{l}}))
		r.Inject(registry.Fault{Path: l.Digest.String(), Do: registry.Replace(func(blob []byte) []byte {
			changed := bytes.Clone(blob)
			changed[min(len(changed)/2, 200)] ^= 0xff
			return changed
		})})
		_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"})
		if err == nil || strings.Contains(err.Error(), "rebuild the image") || !strings.Contains(err.Error(), "has changed it") {
			t.Errorf("changed in a %s: %v", at, err)
		}
	}
	a := motd(t, "cut off")
	r := serve(t, "app", "1", a)
	r.Inject(registry.Fault{Path: "/blobs/", Do: registry.Reset(10)})
	if _, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"}); err == nil || strings.Contains(err.Error(), "heuristic") {
		t.Errorf("broken connection: %v", err)
	}
}
