// Package registry is a small OCI distribution server for tests and the demo:
// images in memory, pulled over HTTP, with credentials, recorded requests and
// injected faults. It only serves; images arrive through Push.
//
//	r := registry.New()
//	r.Push("library/hello", "latest", built)
//	err := r.Listen("127.0.0.1:0")
//	defer r.Close()
//	// pull r.Addr() + "/library/hello:latest", with http allowed
package registry

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"

	"github.com/crius-run/crius/test/kit/image"
)

// Registry is an http.Handler that serves the OCI distribution API's pull
// half. It is safe for concurrent use, and may be changed while it serves.
type Registry struct {
	mu       sync.Mutex
	repos    map[string]*repository
	auth     Auth
	tokens   map[string]bool
	faults   []*Fault
	requests []Request
	behind   http.Handler // gives the answers; nil: this registry

	counting sync.Mutex
	sent     map[string]int64 // bytes of bodies, by path; Forget replaces it

	server   *http.Server
	listener net.Listener
	done     chan struct{} // closed when the server's loop has ended
	closing  chan struct{} // closed to end answers that stall
	close    sync.Once
}

type repository struct {
	tags      map[string]digest.Digest
	manifests map[digest.Digest]*image.Artifact
	blobs     map[digest.Digest][]byte
	large     map[digest.Digest]sized
}

// sized is a blob that is not in memory.
type sized struct {
	io.ReaderAt
	size int64
}

// Request is a recorded request.
type Request struct {
	Method        string
	Host          string // as the client named it
	Path          string
	Query         string
	Range         string
	Authorization string
	Body          string // of a token request
}

// New returns an empty registry that admits everyone.
func New() *Registry {
	return &Registry{
		repos:   map[string]*repository{},
		tokens:  map[string]bool{},
		sent:    map[string]int64{},
		closing: make(chan struct{}),
	}
}

// Before returns a registry that has the answers of another one, such as a real registry, and only
// records requests and injects faults itself.
func Before(behind http.Handler) *Registry {
	r := New()
	r.behind = behind
	return r
}

// Push stores an image or index under repo:tag, and everything below it under
// its digest. An empty tag stores it under its digest only.
func (r *Registry) Push(repo, tag string, a *image.Artifact) {
	r.mu.Lock()
	defer r.mu.Unlock()
	in := r.repository(repo)
	in.add(a)
	if tag != "" {
		in.tags[tag] = a.Digest()
	}
}

// PushBlob stores, under its digest, a blob that is read only when it is
// served.
func (r *Registry) PushBlob(repo string, d digest.Digest, blob io.ReaderAt, size int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.repository(repo).large[d] = sized{blob, size}
}

// repository returns the repository, which it makes on first use. The caller
// holds the lock.
func (r *Registry) repository(repo string) *repository {
	in := r.repos[repo]
	if in == nil {
		in = &repository{
			tags:      map[string]digest.Digest{},
			manifests: map[digest.Digest]*image.Artifact{},
			blobs:     map[digest.Digest][]byte{},
			large:     map[digest.Digest]sized{},
		}
		r.repos[repo] = in
	}
	return in
}

func (in *repository) add(a *image.Artifact) {
	in.manifests[a.Digest()] = a
	for d, blob := range a.Blobs {
		in.blobs[d] = blob
	}
	for _, child := range a.Children {
		in.add(child)
	}
}

// Listen serves on a TCP address; port 0 takes a free one, which Addr returns.
func (r *Registry) Listen(address string) error {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("registry: %w", err)
	}
	r.Serve(l)
	return nil
}

// Serve serves on l, which it owns from now on, until Close.
func (r *Registry) Serve(l net.Listener) {
	r.listener = l
	r.server = &http.Server{Handler: r, ReadHeaderTimeout: time.Minute}
	r.done = make(chan struct{})
	go func() {
		defer close(r.done)
		_ = r.server.Serve(l) // ends with ErrServerClosed
	}()
}

// Addr returns host:port of the server.
func (r *Registry) Addr() string { return r.listener.Addr().String() }

// Close ends the server, and aborts every answer under way.
func (r *Registry) Close() {
	r.close.Do(func() {
		close(r.closing)
		if r.server == nil {
			return
		}
		_ = r.server.Close()
		<-r.done
	})
}

// Requests returns the requests received so far, in order of arrival.
func (r *Registry) Requests() []Request {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.requests)
}

// Sent returns how many bytes of bodies were sent in answers to requests whose
// path contains path, whether the client has read them or not.
func (r *Registry) Sent(path string) (bytes int64) {
	r.counting.Lock()
	defer r.counting.Unlock()
	for p, n := range r.sent {
		if strings.Contains(p, path) {
			bytes += n
		}
	}
	return bytes
}

// Forget empties the list of requests, and the counts. Answers under way no
// longer count: one to a client that is gone may end much later.
func (r *Registry) Forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.requests = nil
	r.counting.Lock()
	defer r.counting.Unlock()
	r.sent = map[string]int64{}
}

// counter counts the bytes of an answer.
type counter struct {
	http.ResponseWriter
	of   *Registry
	sent map[string]int64
	path string
}

// count makes the answer's writer count its bytes, in the present counts.
func (r *Registry) count(w http.ResponseWriter, path string) *counter {
	r.counting.Lock()
	defer r.counting.Unlock()
	return &counter{w, r, r.sent, path}
}

// Write implements http.ResponseWriter. The bytes count before they are sent,
// because a client may request the count as soon as it has them all.
func (c *counter) Write(p []byte) (int, error) {
	c.add(len(p))
	n, err := c.ResponseWriter.Write(p)
	c.add(n - len(p))
	return n, err
}

func (c *counter) add(bytes int) {
	c.of.counting.Lock()
	defer c.of.counting.Unlock()
	c.sent[c.path] += int64(bytes)
}

// Unwrap is for http.ResponseController.
func (c *counter) Unwrap() http.ResponseWriter { return c.ResponseWriter }

// ServeHTTP implements http.Handler.
func (r *Registry) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	r.record(req)
	answer := http.Handler(http.HandlerFunc(r.answer))
	if r.behind != nil {
		answer = r.behind
	}
	if f := r.fault(req); f != nil {
		answer = f.Do(answer, r.closing)
	}
	answer.ServeHTTP(r.count(w, req.URL.Path), req)
}

func (r *Registry) record(req *http.Request) {
	seen := Request{
		Method:        req.Method,
		Host:          req.Host,
		Path:          req.URL.Path,
		Query:         req.URL.RawQuery,
		Range:         req.Header.Get("Range"),
		Authorization: req.Header.Get("Authorization"),
	}
	if req.Method == http.MethodPost && req.ParseForm() == nil {
		seen.Body = req.PostForm.Encode()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.requests = append(r.requests, seen)
}

// answer serves the distribution API: /v2/, /v2/<repo>/manifests/<tag or
// digest>, /v2/<repo>/blobs/<digest>, /v2/<repo>/tags/list; and /token.
func (r *Registry) answer(w http.ResponseWriter, req *http.Request) {
	if req.URL.Path == tokenPath {
		r.serveToken(w, req)
		return
	}
	if !r.admit(w, req) {
		return
	}
	w.Header().Set("Docker-Distribution-API-Version", "registry/2.0")
	path, found := strings.CutPrefix(req.URL.Path, "/v2/")
	switch {
	case !found:
		refuse(w, http.StatusNotFound, "NOT_FOUND", "no such path")
	case path == "":
		w.WriteHeader(http.StatusOK)
	default:
		r.serveContent(w, req, path)
	}
}

func (r *Registry) serveContent(w http.ResponseWriter, req *http.Request, path string) {
	parts := strings.Split(path, "/")
	if len(parts) < 3 {
		refuse(w, http.StatusNotFound, "NAME_INVALID", "no such path")
		return
	}
	repo := strings.Join(parts[:len(parts)-2], "/")
	kind, name := parts[len(parts)-2], parts[len(parts)-1]
	if blob, ok := r.largeBlob(repo, kind, name); ok {
		w.Header().Set("Content-Type", "application/octet-stream")
		w.Header().Set("Docker-Content-Digest", name)
		http.ServeContent(w, req, "", time.Time{}, io.NewSectionReader(blob, 0, blob.size))
		return
	}
	body, mediaType, code := r.lookup(repo, kind, name)
	if code != "" {
		refuse(w, http.StatusNotFound, code, name+" is unknown to "+repo)
		return
	}
	w.Header().Set("Content-Type", mediaType)
	if kind != "tags" {
		w.Header().Set("Docker-Content-Digest", digest.FromBytes(body).String())
	}
	http.ServeContent(w, req, "", time.Time{}, bytes.NewReader(body))
}

// largeBlob finds what PushBlob has stored.
func (r *Registry) largeBlob(repo, kind, name string) (sized, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	in := r.repos[repo]
	if in == nil || kind != "blobs" {
		return sized{}, false
	}
	blob, ok := in.large[digest.Digest(name)]
	return blob, ok
}

// lookup finds what a path names; code is the error code of the distribution
// specification if there is nothing.
func (r *Registry) lookup(repo, kind, name string) (body []byte, mediaType, code string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	in := r.repos[repo]
	if in == nil {
		return nil, "", "NAME_UNKNOWN"
	}
	switch kind {
	case "manifests":
		d, tagged := in.tags[name]
		if !tagged {
			d = digest.Digest(name)
		}
		if a := in.manifests[d]; a != nil {
			return a.Manifest, a.MediaType, ""
		}
		return nil, "", "MANIFEST_UNKNOWN"
	case "blobs":
		if blob, ok := in.blobs[digest.Digest(name)]; ok {
			return blob, "application/octet-stream", ""
		}
		return nil, "", "BLOB_UNKNOWN"
	case "tags":
		return in.tagList(repo), "application/json", ""
	}
	return nil, "", "UNSUPPORTED"
}
