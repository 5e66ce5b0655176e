// Package statuspage shows the node to a person with a browser: whether it is
// ready, what is under way, and which containers do not run.
//
// The page is self-contained: no script, no resource of another server, and its
// policy (Content-Security-Policy) allows none. Text from pods and images is
// hostile: it is escaped, bounded in length and in number, and cannot be more
// than text.
package statuspage

import (
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"html/template"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/storage/pull/progress"
)

const (
	// pageTime bounds how long a reader waits, for example for a hanging runtime.
	pageTime = 5 * time.Second
	// pageAge is how old a page may be: any client that reaches the address may
	// ask often.
	pageAge = time.Second
)

// Sources are called for each page.
type Sources struct {
	Version    string
	Since      time.Time // of the server
	Node       func() pod.Summary
	Pods       func() []*view.Sandbox
	Containers func() []*view.Container
	// Runtime and Network fail while the status is unknown.
	Runtime  func(context.Context) (*view.RuntimeStatus, error)
	Network  func(context.Context) (*view.NetworkStatus, error)
	Handlers func(context.Context) []oci.Report
	Pulls    func() []progress.Pull
}

var (
	//go:embed page.css
	style string
	//go:embed page.html
	markup string

	layout = template.Must(template.New("page").Funcs(template.FuncMap{
		"style": func() template.CSS { return template.CSS(style) }, "brief": brief, "percent": percent,
	}).Parse(markup))
	policy = "default-src 'none'; style-src '" + hash(style) + "'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

// hash returns the hash by which a policy allows an inline style sheet.
func hash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "sha256-" + base64.StdEncoding.EncodeToString(sum[:])
}

// Handler answers requests for the page.
func Handler(s Sources) http.Handler { return &handler{sources: s} }

type handler struct {
	sources Sources

	mu   sync.Mutex // held while a page is being made
	at   time.Time
	page []byte
}

func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	page, err := h.now(r.Context())
	if err != nil {
		slog.ErrorContext(r.Context(), "cannot make the status page", "err", err)
		http.Error(w, "cannot make the page; the log says why", http.StatusInternalServerError)
		return
	}
	for key, value := range map[string]string{
		"Content-Type":            "text/html; charset=utf-8",
		"Content-Security-Policy": policy,
		"X-Content-Type-Options":  "nosniff",
		"Referrer-Policy":         "no-referrer",
		"Cache-Control":           "no-store",
	} {
		w.Header().Set(key, value)
	}
	_, _ = w.Write(page) // a client that has left does not need it
}

// now returns the last page or, if that is too old, a new one. A new one
// outlives the request, for the next request.
func (h *handler) now(ctx context.Context) ([]byte, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.page != nil && time.Since(h.at) < pageAge {
		return h.page, nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), pageTime)
	defer cancel()
	var page bytes.Buffer
	if err := layout.Execute(&page, h.sources.collect(ctx, time.Now())); err != nil {
		return nil, err
	}
	h.page, h.at = page.Bytes(), time.Now()
	return h.page, nil
}
