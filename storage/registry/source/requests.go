package source

import (
	"net/http"
	"net/url"
	"strings"
	"sync"

	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/storage/pull/pullerror"
)

// requests follows which hosts the library asks for an image: registries send clients to servers of
// tokens and to storages, and the library's errors do not say which of them has failed.
type requests struct {
	names map[string]string // of the registry and its mirrors, by address

	mu     sync.Mutex
	last   *url.URL
	from   string // the registry or mirror that was asked last
	step   pullerror.Step
	opened bool // what follows is for parts of the image
	tokens string
	other  string // host to which requests for parts were sent on
}

// follow makes sys report all requests for an image.
func follow(sys *types.SystemContext, name reference.Named) *requests {
	r := &requests{names: map[string]string{}}
	for _, s := range Sources(sys, name) {
		r.names[s.Address()] = s.Host
	}
	proxy := sys.DockerProxy
	sys.DockerProxy = func(u *url.URL) (*url.URL, error) {
		r.note(u)
		if proxy != nil {
			return proxy(u)
		}
		return http.ProxyFromEnvironment(&http.Request{URL: u}) // as the library does
	}
	return r
}

// note takes the address of a request. Until the image is opened, one request follows the other.
func (r *requests) note(u *url.URL) {
	r.mu.Lock()
	defer r.mu.Unlock()
	name, known := r.names[u.Host]
	r.last = u
	switch {
	case known && u.Path == "/v2/":
		r.step, r.from, r.tokens = pullerror.Ping, name, ""
	case known && (strings.Contains(u.Path, "/manifests/") || strings.Contains(u.Path, "/blobs/")):
		r.step, r.from = pullerror.Manifest, name
	case r.step == pullerror.Ping, r.step == pullerror.Token, u.Host == r.tokens:
		r.step, r.tokens = pullerror.Token, u.Host
	case r.opened:
		r.other = u.Host
	}
}

// reached notes that the manifest has come.
func (r *requests) reached() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.opened = true
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
