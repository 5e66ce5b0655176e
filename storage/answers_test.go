package storage

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/registry/source"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/registry/registrytest"
)

// pullAs pulls with credentials or ends the test.
func (n *node) pullAs(ref string, auth *cri.AuthConfig) *Image {
	n.t.Helper()
	img, err := n.Pull(testContext(n.t), PullRequest{Image: ref, Auth: auth})
	ok(n.t, err)
	return img
}

// fails fails the test unless a pull fails with a kind, says one text and does not say another.
func (n *node) fails(what, ref string, auth *cri.AuthConfig, kind error, says, not string) {
	n.t.Helper()
	_, err := n.Pull(testContext(n.t), PullRequest{Image: ref, Auth: auth})
	if err == nil || kind != nil && !errors.Is(err, kind) || !strings.Contains(err.Error(), says) || not != "" && strings.Contains(err.Error(), not) {
		n.t.Errorf("%s: %v: want %q without %q, and %v", what, err, says, not, kind)
	}
}

// A registry that wants another login than crius can do has not refused the credentials of anybody.
func TestLoginsThatCriusDoesNotKnow_jib_4187_moby_50896(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "login")
	r := serve(t, "app", "1", a)
	ref := r.Addr() + "/app:1"
	for _, auth := range []*cri.AuthConfig{nil, passwordOf("user", "hunter22")} {
		for says, do := range map[string]registry.Fault{
			"login by negotiate, and": {Path: "/v2/", Do: wantsLogin("Negotiate")},
			"of its own":              {Path: "/v2/", Do: wantsLogin(`Negotiate, Basic realm="r"`)}, // only the first of a header counts
			"by negotiate or ntlm,":   {Path: "/v2/", Do: wantsLogin("Negotiate", "NTLM")},
			"by digest, and":          {Path: "/v2/", Do: wantsLogin(`Digest realm="r", nonce="n"`)},
			"at /v2/":                 {Path: "/v2/", Do: wantsLogin()},
			"no way to log in":        {Path: "/manifests/", Do: wantsLogin(`Basic realm="r"`)},
		} {
			r.Heal()
			r.Inject(do)
			n.fails(says, ref, auth, fault.Unauthenticated, says, "pull secret")
		}
	}
	r.Require(registry.Auth{Username: "user", Password: "hunter22"})
	for _, wants := range [][]string{{"Negotiate", `Basic realm="r"`}, {`Basic realm="r", Bearer realm="http://r.test/token",service="s"`}, {`BASIC realm="Sonatype Nexus"`}, {"Basic realm=/"}, {"basic"}} {
		r.Heal()
		r.Inject(registry.Fault{Path: "/v2/", Times: 1, Do: wantsLogin(wants...)})
		if img := n.pullAs(ref, passwordOf("user", "hunter22")); img.ID != a.ID() {
			t.Errorf("%q: %s", wants, img.ID)
		}
	}
	r.Heal()
	n.fails("wrong password", ref, passwordOf("user", "wrong"), fault.Unauthenticated, "correct the pull secret", "")
}

// A server of tokens that gives none has not refused anybody either.
func TestTokenServersWithoutTokens_containerd_2157_crio_7007(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r, tokens := serve(t, "app", "1", motd(t, "tokens")), serve(t, "app", "1", motd(t, "tokens"))
	r.Require(registry.Auth{Username: "user", Password: "hunter22", Bearer: true, Realm: "http://" + tokens.Addr() + "/token", Tokens: tokens})
	says := tokens.Addr() + " gave no token for " + r.Addr()
	for _, name := range []string{"token", "access_token"} { // either will do
		tokens.Require(registry.Auth{Username: "user", Password: "hunter22"})
		tokens.Heal()
		tokens.Inject(registry.Fault{Path: "/token", Do: registry.Replace(func(body []byte) []byte {
			return bytes.ReplaceAll(body, []byte(`"`+map[string]string{"token": "access_token", "access_token": "token"}[name]+`"`), []byte(`"other"`))
		})})
		n.remove(n.pullAs(r.Addr()+"/app:1", passwordOf("user", "hunter22")).ID)
	}
	const odd = `{"access_token":"swordfish","token":"\/sword\"fish","issued_at":"2006-01-02 15:04:05"}`
	tokens.Heal()
	tokens.Inject(registry.Fault{Do: registry.Replace(func([]byte) []byte { return []byte(odd) })})
	n.fails("a time that is none", r.Addr()+"/app:1", passwordOf("user", "hunter22"), fault.Unavailable, `body start "<redacted>"): parsing time "2006-01-02 15:04:05" as`, "fish")
	tokens.Heal()
	tokens.Inject(registry.Fault{Do: registry.Page(http.StatusForbidden)})
	n.fails("403", r.Addr()+"/app:1", nil, fault.Denied, "no credentials were sent to "+r.Addr(), "gave no token")
	for _, body := range []string{"", "{}", "null", `{"token":""}`, "<html>please log in</html>"} {
		tokens.Heal()
		tokens.Inject(registry.Fault{Do: answer(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, body) })})
		for _, auth := range []*cri.AuthConfig{nil, passwordOf("user", "hunter22"), {IdentityToken: "identity"}} {
			n.fails(fmt.Sprintf("%q", body), r.Addr()+"/app:1", auth, fault.Unavailable, says, "pull secret")
		}
	}
}

// A page in the place of a registry is told from a broken image, and so is where the registry has sent crius.
func TestPagesInThePlaceOfARegistry_moby_30047_podman_5952(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "page")
	r, login := serve(t, "app", "1", index(t, a)), serve(t, "app", "1", a)
	login.Inject(registry.Fault{Do: registry.Page(http.StatusOK)})
	toLogin := answer(func(w http.ResponseWriter, req *http.Request) {
		http.Redirect(w, req, "http://"+login.Addr()+"/login?next=secret", http.StatusFound)
	})
	elsewhere := fmt.Sprintf("the answer of %s/login, to which %s sends crius, is a web page", login.Addr(), r.Addr())
	for _, ref := range []string{r.Addr() + "/app:1", r.Addr() + "/app@" + index(t, a).Digest().String()} {
		for path, says := range map[string]string{"/v2/": elsewhere, "/manifests/": elsewhere} {
			r.Heal()
			r.Inject(registry.Fault{Path: path, Do: toLogin})
			n.fails("redirected at "+path, ref, nil, fault.Unavailable, says, "secret")
		}
		for _, path := range []string{"/v2/", "/manifests/", a.Digest().String()} {
			r.Heal()
			r.Inject(registry.Fault{Path: path, Do: registry.Page(http.StatusOK)})
			n.fails("a page at "+path, ref, nil, fault.Unavailable, "the answer is a web page and begins with \"<html>", "node reaches")
		}
	}
	r.Heal()
	r.Inject(registry.Fault{Path: "/v2/", Do: toLogin})
	login.Heal()
	login.Inject(registry.Fault{Do: registry.Page(http.StatusForbidden)})
	n.fails("refused by the login", r.Addr()+"/app:1", nil, fault.Denied, fmt.Sprintf("%s, to which %s sends crius, does not answer as a registry", login.Addr(), r.Addr()), "pull secret")
	r.Heal()
	r.Inject(registry.Fault{Path: "/manifests/", Do: registry.Page(http.StatusNotFound)})
	n.fails("a page with 404", r.Addr()+"/app:1", nil, fault.NotFound, "check the name and the tag; or look for what answers in the registry's place", "")
	r.Heal()
	n.pull(r.Addr() + "/app:1")
}

// What comes in the place of a config or a layer is reported as what it is, with the host that has sent it.
func TestAnswersInThePlaceOfBlobs_trow_210_containerd_1791(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "in the place of blobs")
	r, storage := serve(t, "app", "1", a), serve(t, "app", "1", a)
	with := func(body string) registry.Action {
		return registry.Replace(func([]byte) []byte { return []byte(body) })
	}
	for _, c := range []struct {
		do   registry.Action
		says string
	}{
		{registry.Page(http.StatusOK), `is a web page and begins with "<html>`},
		{with("\n <?xml version=\"1.0\"?><Error/>"), "is a web page and begins with"},
		{with(`{"errors":[{"code":"DENIED","message":"no"}]}`), `is an error with status 200, {"code":"DENIED","message":"no"}; see the log`},
		{with(`{"message":"no route"}`), `is an error with status 200, "no route"; see the log`},
		{with(""), "is empty; check whether a proxy"},
		{with(`{"errors":[],"error":null}`), "has changed it"},
		{registry.Replace(registry.Truncate), "has changed it"},
		{registry.Replace(registry.Corrupt), "has changed it"},
	} {
		for what, d := range map[string]string{"config": "sha256:" + a.ID(), "layer": layerDigest(a, 1)} {
			r.Heal()
			r.Inject(registry.Fault{Path: d, Do: c.do})
			by := "the answer "
			if strings.HasSuffix(c.says, "has changed it") {
				by = ""
			}
			n.fails(what, r.Addr()+"/app:1", nil, fault.Unavailable, by+c.says, "node reaches")
			if by == "" {
				continue
			}
			r.Heal()
			storage.Heal()
			storage.Inject(registry.Fault{Do: c.do})
			r.Inject(registry.Fault{Path: d, Do: registry.Redirect("http://" + storage.Addr())})
			n.fails(what+" of a storage", r.Addr()+"/app:1", nil, fault.Unavailable, fmt.Sprintf("the answer of %s, to which %s sends crius, %s", storage.Addr(), r.Addr(), c.says), "node reaches")
		}
	}
	n.empty()
}

// A wrong Content-Encoding is told apart from a broken image.
func TestContentEncoding_moby_17595_docker_registry_369(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := build(t, image.Image{Layers: []image.Layer{layer(t, image.Regular("noise", 0o644, random(4<<10)))}})
	r := serve(t, "app", "1", a)
	blob := layerDigest(a, 0)
	for _, c := range []struct{ path, encoding, says string }{
		{"/manifests/", "gzip", r.Addr() + ", or a proxy before it, says that the answer is compressed"},
		{"sha256:" + a.ID(), "gzip", r.Addr() + ", or a proxy before it, says that the answer is compressed"},
		{blob, "x-gzip", ""},
	} {
		r.Heal()
		r.Inject(registry.Fault{Path: c.path, Do: func(answer http.Handler, _ <-chan struct{}) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				w.Header().Set("Content-Encoding", c.encoding)
				answer.ServeHTTP(w, req)
			})
		}})
		if c.says == "" {
			n.remove(n.pull(r.Addr() + "/app:1").ID)
			continue
		}
		n.fails(c.path, r.Addr()+"/app:1", nil, fault.Unavailable, c.says, "node reaches")
	}
	n.empty()
}

// A layer whose file is gzip comes as it is, although its server takes that for a Content-Encoding, which net/http
// undoes. What a proxy has compressed on the way is decompressed.
func TestLayersWithContentEncoding_moby_27642_distribution_3754(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := build(t, image.Image{Layers: []image.Layer{layer(t, image.Regular("noise", 0o644, random(4<<10)))}})
	r := serve(t, "app", "1", a)
	encoded := func(body func(answer http.Handler, w http.ResponseWriter, req *http.Request)) registry.Action {
		return func(answer http.Handler, _ <-chan struct{}) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				w.Header().Set("Content-Encoding", "gzip")
				body(answer, w, req)
			})
		}
	}
	stored := func(answer http.Handler, w http.ResponseWriter, req *http.Request) { answer.ServeHTTP(w, req) }
	for what, do := range map[string]registry.Action{
		"a server of files": encoded(stored),
		"one that sends no parts": encoded(func(answer http.Handler, w http.ResponseWriter, req *http.Request) {
			req.Header.Del("Range")
			stored(answer, w, req)
		}),
		"a proxy that compresses": func(answer http.Handler, _ <-chan struct{}) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				if req.Header.Get("Accept-Encoding") != "gzip" {
					t.Error("crius no longer accepts compressed answers: the test proves nothing")
				}
				w.Header().Set("Content-Encoding", "gzip")
				_, _ = w.Write(image.RawLayer(a.Blobs[digest.Digest(layerDigest(a, 0))]).Blob)
			})
		},
	} {
		r.Heal()
		r.Inject(registry.Fault{Path: layerDigest(a, 0), Do: do})
		if img, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"}); err != nil || img.ID != a.ID() {
			t.Errorf("%s: %v, %v", what, img, err)
			continue
		}
		n.remove(a.ID())
	}
	n.empty()
}

// A registry that refuses a pull with a code of its own, or with none, has not failed, and what it does not have is
// not found.
func TestRefusalsWithCodesOfTheirOwn_harbor_13825_git_secret_801(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "refused")
	r := serve(t, "app", "1", a)
	ownReason := r.Addr() + " refused it without a code that says why"
	for _, c := range []struct {
		status int
		body   string
		kind   error
		says   string
	}{
		{http.StatusPreconditionFailed, `{"code":"PROJECTPOLICYVIOLATION","message":"image with 86 vulnerabilities cannot be pulled"}`, fault.Denied, ownReason},
		{http.StatusForbidden, `{"status":403,"message":"download blocking policy configured in Xray"}`, fault.Denied, ownReason},
		{http.StatusForbidden, `{"status":403}`, fault.Denied, ownReason},
		{http.StatusUnauthorized, `{"status":401,"message":"Bad credentials"}`, fault.Denied, ownReason},
		{http.StatusNotFound, `{"code":"NOT_FOUND","message":"artifact app:1 not found"}`, fault.NotFound, "check the name and the tag"},
		{http.StatusNotFound, `{"status":404,"message":"File not found."}`, fault.NotFound, "check the name and the tag"},
		{http.StatusBadRequest, `{"code":"NAME_INVALID","message":"no such project"}`, fault.Invalid, r.Addr() + " refuses requests like this one: check the name and the tag"},
		{http.StatusMethodNotAllowed, `{"code":"UNSUPPORTED"}`, fault.Denied, r.Addr() + " refuses requests like this one: check the name and the tag"},
	} {
		r.Heal()
		r.Inject(registry.Fault{Path: "/manifests/", Do: refusal(c.status, c.body)})
		n.fails(c.body, r.Addr()+"/app:1", passwordOf("user", "hunter22"), c.kind, c.says, "node reaches")
	}
	n.empty()
}

// An answer whose status says neither that a request has succeeded nor that it has failed is told as such, at every
// step of a pull, and so is a redirect that leads nowhere.
func TestStatusesThatAreNoAnswers_docker_registry_proxy_164(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "statuses")
	const nowhere, unused, unasked = "redirects crius without saying where", "that registries do not use for it", "that it cannot ask, or from one to the next without end"
	redirect := func(to string) registry.Action {
		return registry.Status(http.StatusTemporaryRedirect, "Location", to)
	}
	for _, path := range []string{"/v2/", "/manifests/", layerDigest(a, 1)} {
		for says, actions := range map[string][]registry.Action{
			nowhere: {registry.Status(http.StatusFound), redirect("")},
			unused:  {registry.Status(http.StatusAccepted), registry.Status(http.StatusMultipleChoices), registry.Status(http.StatusNotModified)},
			unasked: {redirect("ftp://r.test/x"), redirect("http:///x"), redirect("//"), redirect(":"), redirect("/v2/round/and/round")},
		} {
			for i, do := range actions {
				r := serve(t, "app", "1", a)
				r.Inject(registry.Fault{Path: path, Do: do})
				r.Inject(registry.Fault{Path: "/v2/round/and/round", Do: redirect("/v2/round/and/round")})
				n.fails(fmt.Sprintf("%s, %d", path, i), r.Addr()+"/app:1", nil, fault.Unavailable, says, "node reaches")
			}
		}
	}
	r := serve(t, "app", "1", a)
	for path, to := range map[string]string{"/v2/": "./", "/manifests/": "../manifests/1", layerDigest(a, 1): "./" + layerDigest(a, 1), "sha256:" + a.ID(): "/v2/app/blobs/sha256:" + a.ID()} {
		r.Heal()
		r.Inject(registry.Fault{Path: path, Times: 1, Do: registry.Status(http.StatusFound, "Location", to)})
		n.remove(n.pull(r.Addr() + "/app:1").ID)
	}
	n.empty()
}

// What is too large in an image is told with the limit and with what to do about it.
func TestImagesAboveLimits_docker_371(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	l := layer(t, image.Text("file", "x"))
	long := strings.Repeat("x", source.MaxConfig)
	inManifest := made{manifest: altered(plainManifest, `{"schemaVersion"`, `{"annotations":{"a":"`+long+`"},"schemaVersion"`)}.artifact(l)
	inManifest.Platform = imagespec.Platform{OS: "linux", Architecture: runtime.GOARCH}
	for says, a := range map[string]*image.Artifact{
		"image manifest: it has more than 4194304 bytes":               inManifest,
		"with fewer or shorter annotations":                            index(t, inManifest),
		"more than 4194304; rebuild the image with fewer or shorter":   made{config: altered(plainConfig, `"os"`, `"x":"`+long+`","os"`)}.artifact(l),
		"more than 100000 JSON tokens; rebuild the image with fewer":   made{config: altered(plainConfig, `"os"`, `"x":[`+strings.Repeat("1,", source.MaxConfigTokens)+`1],"os"`)}.artifact(l),
		"its user has 1025 bytes, more than 1024; rebuild the image":   made{config: altered(plainConfig, `"os"`, `"config":{"User":"`+long[:source.MaxUser+1]+`"},"os"`)}.artifact(l),
		"it has 501 layers, more than 500; rebuild the image with few": build(t, image.Image{Layers: slices.Repeat([]image.Layer{l}, source.MaxLayers+1)}),
	} {
		n.fails(says, serve(t, "app", "1", a).Addr()+"/app:1", nil, fault.Invalid, says, "node reaches")
	}
	n.empty()
}

// An expired token is one that the registry has refused, whatever status it has for that.
func TestExpiredTokens_gradle_oci_144_ecr_credential_helper_7(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := serve(t, "app", "1", motd(t, "expired"))
	auth := passwordOf("AWS", "hunter22")
	for _, c := range []struct {
		status int
		body   string
		says   string
	}{
		{http.StatusForbidden, `{"errors":[{"code":"DENIED","message":"Your authorization token has expired. Reauthenticate and try again."}]}`, "Your authorization token has expired. Reauthenticate"},
		{http.StatusBadRequest, `{"errors":[{"code":"DENIED","message":"Your Authorization Token is invalid."}]}`, "Your Authorization Token is invalid."},
		{http.StatusForbidden, "Your Authorization Token has expired. Please run 'aws ecr get-login' to fetch a new one.", "Your Authorization Token has expired."},
	} {
		r.Heal()
		r.Inject(registry.Fault{Path: "/manifests/", Do: answer(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(c.status)
			_, _ = io.WriteString(w, c.body)
		})})
		n.fails(c.body, r.Addr()+"/app:1", auth, fault.Denied, c.says, "node reaches")
		n.fails(c.body, r.Addr()+"/app:1", auth, fault.Denied, `refused user "AWS" of the pull request: correct the pull secret`, "")
	}
	n.empty()
}

// A registry that sends crius to another host for the manifest has not refused the credentials for itself, which that
// host does not get.
func TestManifestOfAnotherHost_podman_15187(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "elsewhere")
	r, other := serve(t, "app", "1", a), registrytest.StartAt(t, "127.0.0.2:0")
	other.Push("app", "1", a)
	auth := registry.Auth{Username: "user", Password: "hunter22"}
	r.Require(auth)
	r.Inject(registry.Fault{Path: "/manifests/", Do: registry.Redirect("http://" + other.Addr())})
	n.pullAs(r.Addr()+"/app:1", passwordOf("user", "hunter22"))
	n.remove(a.ID())
	other.Require(auth)
	n.fails("refused", r.Addr()+"/app:1", passwordOf("user", "hunter22"), fault.Unauthenticated,
		fmt.Sprintf("%s, to which %s sends crius for the manifest, refused: it is not sent the credentials for %[2]s", other.Addr(), r.Addr()), "pull secret")
	n.empty()
}

// A manifest that a proxy or mirror has replaced is told as such, behind an index and by a digest.
func TestReplacedManifests_podman_11993(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a, other := motd(t, "one"), motd(t, "another")
	all := index(t, a)
	r := serve(t, "app", "1", all)
	r.Inject(registry.Fault{Path: a.Digest().String(), Do: registry.Replace(func([]byte) []byte { return other.Manifest })})
	n.fails("behind an index", r.Addr()+"/app:1", nil, fault.Unavailable, "another one than "+a.Digest().String()+": not what was asked for: a proxy, a mirror or the registry has changed it", "rebuild")
	n.fails("by digest", r.Addr()+"/app@"+a.Digest().String(), nil, fault.Unavailable, "has changed it", "rebuild")
	r.Heal()
	r.Inject(registry.Fault{Path: a.Digest().String(), Do: registry.Status(http.StatusNotFound)})
	n.fails("missing behind an index", r.Addr()+"/app:1", nil, fault.NotFound, "push the image again", "check the name")
	n.empty()
}

// No registry with TLS sends crius to plain HTTP for an image, unless registries.conf allows it for one of the two.
// For a token it may.
func TestNoWayFromTLSToPlainHTTP_distribution_479_regclient_865(t *testing.T) {
	t.Parallel()
	n := newNode(t, withHostsDirs)
	n.write("registries.conf", "")
	a := motd(t, "plain")
	storage, front := serve(t, "app", "1", a), registry.New()
	front.Push("app", "1", a)
	ref := n.trusted(front) + "/app:1"
	host, _, _ := strings.Cut(ref, "/")
	for _, path := range []string{"/blobs/", "/manifests/", layerDigest(a, 1)} {
		front.Heal()
		front.Inject(registry.Fault{Path: path, Do: registry.Redirect("http://" + storage.Addr())})
		n.fails(path, ref, nil, fault.Denied, fmt.Sprintf("%s is asked by TLS and sends crius to plain HTTP", host), "node reaches")
		if asked := storage.Requests(); len(asked) > 0 {
			t.Errorf("%s: asked by plain HTTP: %+v", path, asked)
		}
	}
	front.Heal()
	front.Inject(registry.Fault{Path: "/blobs/", Do: registry.Redirect("http://" + storage.Addr())})
	n.write("registries.conf", insecure(storage.Addr()))
	n.remove(n.pull(ref).ID)
	trusting := newNode(t)
	trusting.write("registries.conf", insecure(host))
	trusting.pull(ref)
	n.write("registries.conf", "")
	n.fails("no longer allowed", ref, nil, fault.Denied, "to plain HTTP", "")

	front.Heal()
	tokens := serve(t, "app", "1", a)
	tokens.Require(registry.Auth{Username: "user", Password: "hunter22"})
	front.Require(registry.Auth{Username: "user", Password: "hunter22", Bearer: true, Realm: "http://" + tokens.Addr() + "/token", Tokens: tokens})
	n.remove(n.pullAs(ref, passwordOf("user", "hunter22")).ID)
	front.Require(registry.Auth{})

	front.Inject(registry.Fault{Path: "/blobs/", Do: registry.Redirect("https://" + n.trusted(storage))})
	n.fails("a storage with TLS that is not trusted", ref, nil, fault.Unavailable, "to trust the authority", "")
	n.empty()
}

// A transfer that breaks is resumed, whatever HTTP the registry offers: crius asks by HTTP/1.1, in which
// connections carry one answer and there is neither GOAWAY nor RST_STREAM.
func TestBrokenTransferOverTLSResumes_for_win_856(t *testing.T) {
	t.Parallel()
	n := newNode(t, withHostsDirs)
	n.write("registries.conf", "")
	blob := random(3 << 20)
	whole, err := image.NewStoredLayer(image.Regular("noise", 0o644, blob))
	ok(t, err)
	a := build(t, image.Image{Layers: []image.Layer{whole}, Config: imagespec.ImageConfig{}})
	front := registry.New()
	front.Push("app", "1", a)
	name := n.trusted(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.ProtoMajor != 1 {
			t.Errorf("%s %s by %s: what does the library do about GOAWAY and RST_STREAM?", req.Method, req.URL.Path, req.Proto)
		}
		front.ServeHTTP(w, req)
	})) + "/app:1"
	front.Inject(registry.Fault{Path: whole.Digest.String(), Times: 1, Do: answer(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write(whole.Blob[:2<<20]) // without a length, in chunks
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})})
	if img := n.pull(name); img.ID != a.ID() {
		t.Errorf("pulled %s", img.ID)
	}
	var asked []string
	for _, request := range front.Requests() {
		if request.Path == "/v2/app/blobs/"+digest.FromBytes(whole.Blob).String() {
			asked = append(asked, request.Range)
		}
	}
	if len(asked) != 2 || asked[0] != "" || !strings.HasPrefix(asked[1], "bytes=") || asked[1] == "bytes=0-" {
		t.Errorf("asked for the ranges %q", asked)
	}
}
