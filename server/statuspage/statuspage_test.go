package statuspage

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"golang.org/x/net/html"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/storage/pull/progress"
)

// node is a node on which everything has the name hostile.
func node(hostile string, pods int) Sources {
	now := time.Now()
	s := Sources{
		Version: "1.2.3", Since: now.Add(-time.Hour),
		Node: func() pod.Summary {
			return pod.Summary{Cleanups: 4, Work: []trace.Work{
				{Operation: "run pod", Object: hostile, Took: time.Minute, Step: "attach network", StepTook: 50 * time.Second},
				{Operation: "start", Object: "quick", Took: time.Second},
			}}
		},
		Runtime: func(context.Context) (*view.RuntimeStatus, error) { return &view.RuntimeStatus{}, nil },
		Network: func(context.Context) (*view.NetworkStatus, error) {
			return &view.NetworkStatus{NotReady: errors.New("no network of " + hostile)}, nil
		},
		Handlers: func(context.Context) []oci.Report {
			return []oci.Report{{Name: "runc", Default: true, Ready: true, Version: "runc 1.3"}, {Name: "kata", Error: "gone " + hostile}}
		},
		Pulls: func() []progress.Pull {
			return []progress.Pull{{Image: hostile, Bytes: 1, Total: 4, Blobs: 3, Done: 1, Unpacking: 2}}
		},
	}
	var sandboxes []*view.Sandbox
	var containers []*view.Container
	for i := range pods {
		id := fmt.Sprintf("pod%d", i)
		sandboxes = append(sandboxes, &view.Sandbox{ID: id, Handler: hostile, CreatedAt: now,
			Config: &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Namespace: "ns", Name: hostile}}})
		for _, state := range []cri.ContainerState{cri.ContainerState_CONTAINER_RUNNING, cri.ContainerState_CONTAINER_EXITED, cri.ContainerState_CONTAINER_CREATED} {
			containers = append(containers, &view.Container{ID: id + "c", SandboxID: id, State: state, Reason: hostile, ExitCode: 3, CreatedAt: now, FinishedAt: now,
				Config: &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: hostile}}})
		}
	}
	s.Pods = func() []*view.Sandbox { return sandboxes }
	s.Containers = func() []*view.Container { return containers }
	return s
}

func get(t *testing.T, s Sources) *httptest.ResponseRecorder {
	t.Helper()
	w := httptest.NewRecorder()
	Handler(s).ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/status", nil))
	if w.Code != 200 {
		t.Fatalf("code %d: %s", w.Code, w.Body)
	}
	return w
}

// seen returns what a browser parses from the page: the text, and the elements
// with their attributes.
func seen(t *testing.T, page string) (text string, elements []html.Token) {
	t.Helper()
	z := html.NewTokenizer(strings.NewReader(page))
	var b strings.Builder
	for {
		switch kind := z.Next(); kind {
		case html.ErrorToken:
			return strings.Join(strings.Fields(b.String()), " "), elements
		case html.TextToken:
			b.WriteString(z.Token().Data + " ")
		case html.StartTagToken, html.SelfClosingTagToken:
			elements = append(elements, z.Token())
		}
	}
}

func TestPage(t *testing.T) {
	t.Parallel()
	var text string
	synctest.Test(t, func(t *testing.T) { text, _ = seen(t, get(t, node("web", 1)).Body.String()) }) // where no time passes
	for _, want := range []string{
		"crius 1.2.3", "up 1h0m0s", "RuntimeReady yes", "NetworkReady NO: no network of web", "pending cleanups 4",
		"run pod web 1m0s attach network 50s", "start quick 1s", "web 25 % 1 of 3 2",
		"runc (default) runc 1.3", "kata NO: gone web", "ns/web web pod0c exited: web, code 3 0s", "ns/web web pod0c created 0s", "ns/web pod0 ready 1 of 3 web 0s",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("without %q: %s", want, text)
		}
	}
}

func TestPageOfIdleNode(t *testing.T) {
	t.Parallel()
	s := node("web", 0)
	s.Node = func() pod.Summary { return pod.Summary{} }
	s.Runtime = func(context.Context) (*view.RuntimeStatus, error) { return nil, errors.New("not yet") }
	s.Network = func(context.Context) (*view.NetworkStatus, error) { return nil, errors.New("not yet") }
	s.Pulls = func() []progress.Pull { return nil }
	text, _ := seen(t, get(t, s).Body.String())
	for _, want := range []string{"RuntimeReady not known yet", "NetworkReady not known yet", "Operations none in progress", "Pulls none in progress", "do not run none", "Pods none"} {
		if !strings.Contains(text, want) {
			t.Errorf("without %q: %s", want, text)
		}
	}
}

// Names are text, whatever they contain, and the policy would stop their
// attempts.
func TestPageEscapesNames(t *testing.T) {
	t.Parallel()
	_, plain := seen(t, get(t, node("web", 1)).Body.String())
	for _, hostile := range []string{
		`<script>alert(1)</script>`, `"><img src=//evil.test/ onerror=x>`, `</style><script>`, `</table><a href="javascript:x">`, `{{.Version}}`, "\u202egnp.exe\x1b[2J\xff", "<!--", "&lt;b&gt;",
	} {
		page := get(t, node(hostile, 1)).Body.String()
		text, elements := seen(t, page)
		if fmt.Sprint(elements) != fmt.Sprint(plain) {
			t.Errorf("%q changes the page: %v", hostile, elements)
		}
		if !strings.Contains(text, "ns/"+short(hostile)) {
			t.Errorf("%q is not shown as it is: %s", hostile, text)
		}
		if strings.ContainsAny(page, "\u202e\x1b") || !utf8.ValidString(page) {
			t.Errorf("%q reaches the browser", hostile)
		}
	}
}

// The page needs nothing that a policy would have to allow except its own style
// sheet.
func TestPagePolicy(t *testing.T) {
	t.Parallel()
	w := get(t, node("web", 1))
	page := w.Body.String()
	_, inline, _ := strings.Cut(page, "<style>")
	inline, _, _ = strings.Cut(inline, "</style>")
	want := "default-src 'none'; style-src '" + hash(inline) + "'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
	if got := w.Header().Get("Content-Security-Policy"); got != want {
		t.Errorf("%q, want %q for the style sheet %q", got, want, inline)
	}
	_, elements := seen(t, page)
	for _, e := range elements {
		if e.Data == "script" || e.Data == "link" || e.Data == "img" || e.Data == "iframe" {
			t.Errorf("element %v", e)
		}
		for _, a := range e.Attr {
			if a.Key == "style" || a.Key == "src" || a.Key == "href" || strings.HasPrefix(a.Key, "on") {
				t.Errorf("attribute %v", a)
			}
		}
	}
}

// A node of any size has a page of bounded size.
func TestPageIsBounded(t *testing.T) {
	t.Parallel()
	page := get(t, node(strings.Repeat("<&", 100_000), 2000)).Body.String()
	text, _ := seen(t, page)
	if !strings.Contains(text, "and 3500 more") || !strings.Contains(text, "and 1500 more") {
		t.Error("it does not say how much more there is")
	}
	if len(page) > 8<<20 {
		t.Errorf("%d bytes", len(page))
	}
}

// Frequent requests get the same page, at no cost.
func TestPageIsKept(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, asked := node("web", 1), 0
		inner := s.Node
		s.Node = func() pod.Summary { asked++; return inner() }
		h := Handler(s)
		for range 3 {
			h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), "GET", "/status", nil))
		}
		if asked != 1 {
			t.Errorf("made %d times", asked)
		}
		time.Sleep(pageAge)
		h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), "GET", "/status", nil))
		if asked != 2 {
			t.Errorf("an old page is not made again")
		}
	})
}
