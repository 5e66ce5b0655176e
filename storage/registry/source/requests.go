package source

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"slices"
	"strings"
	"sync"

	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/pull/notice"
	"github.com/crius-run/crius/storage/pull/pullerror"
)

// requests follows which hosts the library asks for an image, and how: registries send clients to servers of
// tokens and to storages, and the library's errors do not say which of them has failed. It refuses to be sent
// from TLS to plain HTTP.
type requests struct {
	names    map[string]string      // of the registry and its mirrors, by address
	insecure map[string]bool        // the same that may speak plain HTTP, by address
	plain    func(host string) bool // whether any other host may

	mu       sync.Mutex
	last     *url.URL
	from     string // the registry or mirror that was asked last
	fromAny  bool   // one of those that sent the library on may speak plain HTTP
	step     pullerror.Step
	opened   bool     // what follows is for parts of the image
	apart    bool     // what follows is not for the image, but for signatures at an address of registries.d
	tokens   string   // host and path
	other    string   // host to which requests for parts were sent on
	schemes  []string // of logins that the registry wants and the library does not know
	sent     bool     // the last request to a registry or mirror had an Authorization
	noToken  bool     // which has no token in it
	manifest string   // what the registry has sent the library to for the manifest; empty: it has answered itself
}

// follow makes sys report all requests for an image.
func follow(sys *types.SystemContext, name reference.Named, plain func(host string) bool) *requests {
	r := &requests{names: map[string]string{}, insecure: map[string]bool{}, plain: plain}
	for _, s := range Sources(sys, name) {
		r.names[s.Address()] = s.Host
	}
	sources, _ := pullSources(sys, name) // the library reports its error
	for _, s := range sources {
		address := notice.Source{Host: reference.Domain(s.Reference)}.Address()
		r.insecure[address] = r.insecure[address] || s.Endpoint.Insecure
	}
	proxy := sys.DockerProxy
	sys.DockerProxy = func(u *url.URL) (*url.URL, error) {
		if err := r.note(u); err != nil {
			return nil, err
		}
		if proxy != nil {
			return proxy(u)
		}
		return http.ProxyFromEnvironment(&http.Request{URL: u}) // as the library does
	}
	return r
}

// listen returns ctx for the requests until the manifest has come. The caller must call end.
func (r *requests) listen(ctx context.Context) (_ context.Context, end func()) {
	heard := notice.Begin(nil, notice.Listener{Scheme: r.unknown})
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteHeaderField: r.wrote}), heard.End
}

// note takes the address of a request. Until the image is opened, one request follows the other. The error
// refuses the request.
func (r *requests) note(u *url.URL) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.apart {
		return nil
	}
	name, known := r.names[u.Host]
	r.last = u
	switch {
	case known && u.Path == "/v2/":
		r.step, r.from, r.tokens, r.schemes = pullerror.Ping, name, "", nil
		r.fromAny = r.insecure[u.Host] || r.opened && r.fromAny
	case known && (strings.Contains(u.Path, "/manifests/") || strings.Contains(u.Path, "/blobs/")):
		r.step, r.from, r.sent, r.noToken = pullerror.Manifest, name, false, false
		r.fromAny = r.insecure[u.Host] || r.opened && r.fromAny
	case r.step == pullerror.Ping, r.step == pullerror.Token && !r.opened, u.Host+u.Path == r.tokens:
		r.step, r.tokens = pullerror.Token, u.Host+u.Path
	case r.opened:
		r.other = u.Host
	}
	switch {
	case u.Scheme != "http" || r.fromAny || r.plain(u.Host):
		return nil
	case r.step == pullerror.Token: // as all others do: many of these send clients back to TLS
		slog.Warn("registry with TLS has credentials sent without it: correct the address of its token server", "registry", r.from, "address", u.Host)
		return nil
	}
	return pullerror.PlainHTTP{From: r.from, Host: u.Host}
}

// wrote takes a header of a request.
func (r *requests) wrote(name string, value []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case name == "Authorization" && r.step == pullerror.Manifest:
		r.sent, r.noToken = true, slices.Equal(value, []string{"Bearer"})
	case name == "Docker-Distribution-Api-Version" && r.step == pullerror.Token: // none for a token: the ping was sent on
		r.step, r.tokens = pullerror.Ping, ""
	}
}

// unknown takes a way to log in that the library does not know. It may be one of another pull, unless this one has
// just asked a registry how to log in.
func (r *requests) unknown(scheme string) {
	const most = 4
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.step == pullerror.Ping && len(r.schemes) < most {
		r.schemes = append(r.schemes, scheme)
	}
}

// setApart says whether the requests that follow are for something else than the image.
func (r *requests) setApart(apart bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.apart = apart
}

// reached notes that the manifest has come.
func (r *requests) reached() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.opened = true
	if _, known := r.names[r.last.Host]; !known || !strings.Contains(r.last.Path, "/manifests/") {
		r.manifest = fmt.Sprintf("%s%.100s, to which %s sends crius", r.last.Host, r.last.Path, r.from)
	}
}

// sentOn returns the host and path to which the registry has sent the library for the manifest; empty: to none.
func (r *requests) sentOn() string {
	if r == nil { // an image that was not opened
		return ""
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.manifest
}

// sentOnForParts returns the host to which the registry has sent the library for what the manifest names; empty: to
// none. Like ofPart, it takes all parts to be there.
func (r *requests) sentOnForParts() string {
	if r == nil { // an image that was not opened
		return ""
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.other == "" {
		return ""
	}
	return fmt.Sprintf("%s, to which %s sends crius", r.other, r.from)
}

// failed notes in an error where it has arisen, before the manifest came.
func (r *requests) failed(err error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.last == nil {
		return err
	}
	at := pullerror.Point{Step: r.step, From: r.from, Plain: r.last.Scheme == "http" && r.step == pullerror.Ping}
	if _, known := r.names[r.last.Host]; !known {
		at.Host = r.last.Host
	}
	switch refused := pullerror.Unauthenticated(err); {
	case refused && r.step == pullerror.Manifest && !r.sent && at.Host == "": // the library has found no way that it knows
		at.Step, at.Schemes = pullerror.Login, r.schemes
	case refused && r.step == pullerror.Manifest && r.noToken: // the server of tokens has given none
		at.Step = pullerror.Token
		at.Host, _, _ = strings.Cut(r.tokens, "/")
		err = fmt.Errorf("%v: %w", err, fault.Unavailable) //nolint:errorlint // no credentials were refused
	case at.Answered(err):
		err = fmt.Errorf("%w: %w", err, fault.Unavailable)
	}
	return pullerror.At(at, err)
}

// ofPart notes the same in an error of something that the manifest names. Requests for parts are made
// side by side: all are taken to be sent to the same host.
func (r *requests) ofPart(err error) error {
	if r == nil { // an image that was not opened
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return pullerror.At(pullerror.Point{Step: pullerror.Part, Host: r.other, From: r.from}, err)
}
