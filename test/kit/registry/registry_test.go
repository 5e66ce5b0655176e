package registry_test

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/registry/registrytest"
	"github.com/crius-run/crius/test/kit/wait"
)

func example(t *testing.T) (*registry.Registry, *image.Artifact) {
	t.Helper()
	layer, err := image.NewLayer(image.Regular("file", 0o644, bytes.Repeat([]byte("x"), 1000)))
	if err != nil {
		t.Fatal(err)
	}
	built, err := image.Image{Layers: []image.Layer{layer}}.Build()
	if err != nil {
		t.Fatal(err)
	}
	r := registrytest.Start(t)
	r.Push("a/b", "1", built)
	return r, built
}

func get(t *testing.T, r *registry.Registry, path string, header ...string) (*http.Response, []byte, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+r.Addr()+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	transport := &http.Transport{DisableKeepAlives: true}
	answer, err := transport.RoundTrip(req)
	if err != nil {
		return nil, nil, err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	return answer, body, err
}

func TestServesWhatWasPushed(t *testing.T) {
	r, built := example(t)
	for path, want := range map[string][]byte{
		"/v2/":                nil,
		"/v2/a/b/manifests/1": built.Manifest,
		"/v2/a/b/manifests/" + built.Digest().String(): built.Manifest,
		"/v2/a/b/blobs/" + built.Config.String():       built.Blobs[built.Config],
		"/v2/a/b/tags/list":                            []byte(`{"name":"a/b","tags":["1"]}`),
	} {
		answer, body, err := get(t, r, path)
		if err != nil || answer.StatusCode != http.StatusOK || !bytes.Equal(body, want) {
			t.Errorf("%s: %v %q %v", path, answer, body, err)
		}
	}
	for _, path := range []string{"/v2/a/b/manifests/2", "/v2/a/c/manifests/1", "/v2/a/b/blobs/sha256:00", "/v2/a", "/x"} {
		if answer, body, err := get(t, r, path); err != nil || answer.StatusCode != http.StatusNotFound || !json.Valid(body) {
			t.Errorf("%s: %v %q %v", path, answer, body, err)
		}
	}
	answer, body, err := get(t, r, "/v2/a/b/blobs/"+built.Config.String(), "Range", "bytes=2-5")
	if err != nil || answer.StatusCode != http.StatusPartialContent || string(body) != string(built.Blobs[built.Config][2:6]) {
		t.Errorf("range: %v %q %v", answer, body, err)
	}
	if seen := r.Requests(); seen[len(seen)-1].Range != "bytes=2-5" {
		t.Errorf("last request %+v", seen[len(seen)-1])
	}
}

func TestAuth(t *testing.T) {
	r, _ := example(t)
	status := func(header ...string) int {
		answer, _, err := get(t, r, "/v2/a/b/manifests/1", header...)
		if err != nil {
			t.Fatal(err)
		}
		return answer.StatusCode
	}
	r.Require(registry.Auth{Username: "u", Password: "p"})
	if got := []int{status(), status("Authorization", "Basic dTpx"), status("Authorization", "Basic dTpw")}; got[0] != 401 || got[1] != 401 || got[2] != 200 {
		t.Errorf("basic: %v", got)
	}
	r.Require(registry.Auth{Username: "u", Password: "p", IdentityToken: "id", RegistryToken: "reg", Bearer: true})
	if got := []int{status(), status("Authorization", "Basic dTpw"), status("Authorization", "Bearer reg")}; got[0] != 401 || got[1] != 401 || got[2] != 200 {
		t.Errorf("bearer: %v", got)
	}
	if answer, _, _ := get(t, r, "/token", "Authorization", "Basic dTpx"); answer.StatusCode != 401 {
		t.Error("token for a wrong password")
	}
	for _, ask := range []func() (*http.Response, error){
		func() (*http.Response, error) {
			req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+r.Addr()+"/token", nil)
			req.SetBasicAuth("u", "p")
			return http.DefaultClient.Do(req)
		},
		func() (*http.Response, error) {
			return http.PostForm("http://"+r.Addr()+"/token", url.Values{"refresh_token": {"id"}})
		},
	} {
		answer, err := ask()
		if err != nil {
			t.Fatal(err)
		}
		var token struct{ Token string }
		err = json.NewDecoder(answer.Body).Decode(&token)
		answer.Body.Close()
		if err != nil || status("Authorization", "Bearer "+token.Token) != 200 {
			t.Errorf("token %q: %v", token.Token, err)
		}
	}
}

func TestFaults(t *testing.T) {
	r, built := example(t)
	path := "/v2/a/b/manifests/1"
	want := string(built.Manifest)
	for name, test := range map[string]struct {
		do    registry.Action
		check func(answer *http.Response, body string, err error, took time.Duration) bool
	}{
		"status": {registry.TooManyRequests(7), func(a *http.Response, _ string, err error, _ time.Duration) bool {
			return err == nil && a.StatusCode == 429 && a.Header.Get("Retry-After") == "7"
		}},
		"redirect": {registry.Redirect("http://elsewhere"), func(a *http.Response, _ string, err error, _ time.Duration) bool {
			return err == nil && a.StatusCode == 307 && a.Header.Get("Location") == "http://elsewhere"+path
		}},
		"corrupt": {registry.Replace(registry.Corrupt), func(_ *http.Response, body string, err error, _ time.Duration) bool {
			return err == nil && len(body) == len(want) && body != want
		}},
		"truncate": {registry.Replace(registry.Truncate), func(_ *http.Response, body string, err error, _ time.Duration) bool {
			return err == nil && body == want[:len(want)/2]
		}},
		"reset": {registry.Reset(10), func(_ *http.Response, body string, err error, _ time.Duration) bool {
			return err != nil && body == want[:10]
		}},
		"slow": {registry.Slow(10 * len(want)), func(_ *http.Response, body string, err error, took time.Duration) bool {
			return err == nil && body == want && took > 90*time.Millisecond
		}},
	} {
		r.Inject(registry.Fault{Path: "/manifests/", Times: 1, Do: test.do})
		start := time.Now()
		answer, body, err := get(t, r, path)
		if !test.check(answer, string(body), err, time.Since(start)) {
			t.Errorf("%s: %v %q %v", name, answer, body, err)
		}
		if _, body, err := get(t, r, path); err != nil || string(body) != want {
			t.Errorf("after %s: %q %v", name, body, err)
		}
	}
}

// A stalled client must neither delay Close nor wait for ever.
func TestCloseEndsStalledAnswers(t *testing.T) {
	r, built := example(t)
	r.Inject(registry.Fault{Path: "/blobs/", Do: registry.Stall(3)})
	ended := make(chan error, 1)
	go func() {
		_, _, err := get(t, r, "/v2/a/b/blobs/"+built.Config.String())
		ended <- err
	}()
	wait.For(t, "the request", func() bool { return len(r.Requests()) > 0 })
	r.Close()
	if err := <-ended; err == nil {
		t.Error("a stalled answer arrived whole")
	}
}

func TestDigestHeaderAndHeal(t *testing.T) {
	r, built := example(t)
	r.Inject(registry.Fault{Path: "", Do: registry.Status(500)})
	r.Heal()
	answer, body, err := get(t, r, "/v2/a/b/manifests/1")
	if err != nil || answer.Header.Get("Docker-Content-Digest") != digest.FromBytes(body).String() {
		t.Errorf("%v %v", answer, err)
	}
	if strings.Contains(string(body), "errors") || !bytes.Equal(body, built.Manifest) {
		t.Errorf("%q", body)
	}
}

// late is a blob whose content can be read only after release.
type late struct {
	io.ReaderAt
	asked   chan<- struct{}
	release <-chan struct{}
}

func (l late) ReadAt(p []byte, from int64) (int, error) {
	l.asked <- struct{}{}
	<-l.release
	return l.ReaderAt.ReadAt(p, from)
}

// An answer that was under way at Forget does not count.
func TestForgetAnswersUnderWay(t *testing.T) {
	r, _ := example(t)
	const content = "0123456789"
	d := digest.FromString(content)
	asked, release := make(chan struct{}, 10), make(chan struct{})
	r.PushBlob("a/b", d, late{strings.NewReader(content), asked, release}, int64(len(content)))
	ended := make(chan string, 1)
	go func() {
		_, body, _ := get(t, r, "/v2/a/b/blobs/"+d.String())
		ended <- string(body)
	}()
	<-asked
	r.Forget()
	close(release)
	if body := <-ended; body != content {
		t.Errorf("%q", body)
	}
	if sent := r.Sent(""); sent != 0 {
		t.Errorf("%d bytes are said to have been sent since", sent)
	}
}

// A blob that is not in memory is served like others, in full and in part.
func TestPushBlob(t *testing.T) {
	r, _ := example(t)
	const content = "0123456789"
	d := digest.FromString(content)
	r.PushBlob("a/b", d, strings.NewReader(content), int64(len(content)))
	path := "/v2/a/b/blobs/" + d.String()
	resp, body, err := get(t, r, path)
	if err != nil || resp.StatusCode != http.StatusOK || string(body) != content || resp.Header.Get("Docker-Content-Digest") != d.String() {
		t.Errorf("%v %q, %v", resp, body, err)
	}
	resp, body, err = get(t, r, path, "Range", "bytes=3-")
	if err != nil || resp.StatusCode != http.StatusPartialContent || string(body) != content[3:] {
		t.Errorf("from the middle: %v %q, %v", resp, body, err)
	}
	if sent := r.Sent("/blobs/"); sent != int64(2*len(content)-3) {
		t.Errorf("%d bytes are said to have been sent", sent)
	}
	if resp, _, err := get(t, r, strings.Replace(path, "a/b", "a/c", 1)); err != nil || resp.StatusCode != http.StatusNotFound {
		t.Errorf("in another repository: %v, %v", resp, err)
	}
}
