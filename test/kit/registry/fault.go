package registry

import (
	"bytes"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Fault disturbs the answers to requests whose path contains Path, such as
// "/blobs/", "/manifests/latest" or "/v2/".
type Fault struct {
	Path  string
	Times int // how many requests to disturb; 0: all
	Do    Action
}

// Action wraps the registry's answer. It must not outlast the end of the
// request or of stop.
type Action func(answer http.Handler, stop <-chan struct{}) http.Handler

// Inject adds a fault. If several match a request the first one applies.
func (r *Registry) Inject(f Fault) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.faults = append(r.faults, &f)
}

// Heal removes all faults.
func (r *Registry) Heal() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.faults = nil
}

func (r *Registry) fault(req *http.Request) *Fault {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, f := range r.faults {
		if !strings.Contains(req.URL.Path, f.Path) {
			continue
		}
		if f.Times == 1 {
			r.faults = slices.Delete(slices.Clone(r.faults), i, i+1)
		} else if f.Times > 1 {
			f.Times--
		}
		return f
	}
	return nil
}

// Status answers with an HTTP status, the error code that the distribution
// specification has for it, and headers (name, value, ...).
func Status(status int, header ...string) Action {
	code := "UNKNOWN"
	switch status {
	case http.StatusUnauthorized:
		code = "UNAUTHORIZED"
	case http.StatusForbidden:
		code = "DENIED"
	case http.StatusNotFound:
		code = "MANIFEST_UNKNOWN"
	case http.StatusTooManyRequests:
		code = "TOOMANYREQUESTS"
	}
	return func(http.Handler, <-chan struct{}) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			for i := 0; i+1 < len(header); i += 2 {
				w.Header().Set(header[i], header[i+1])
			}
			refuse(w, status, code, http.StatusText(status))
		})
	}
}

// Namespaces makes a mirror answer with the content of other registries, by the
// parameter ns that names one of them, and with 404 without it, like mirrors of
// several registries ("registry proxying" in the distribution specification).
func Namespaces(of map[string]*Registry) Action {
	return func(answer http.Handler, _ <-chan struct{}) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			namespace := req.URL.Query().Get("ns")
			switch r := of[namespace]; {
			case r != nil:
				r.answer(w, req)
			case namespace == "" && req.URL.Path == "/v2/":
				answer.ServeHTTP(w, req)
			default:
				refuse(w, http.StatusNotFound, "NAME_UNKNOWN", "no registry is named "+namespace)
			}
		})
	}
}

// Page answers with an HTTP status and a web page, like a proxy in between.
func Page(status int) Action {
	return func(http.Handler, <-chan struct{}) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/html")
			w.WriteHeader(status)
			fmt.Fprintf(w, "<html><body>%d %s</body></html>", status, http.StatusText(status))
		})
	}
}

// TooManyRequests answers 429 with a Retry-After in seconds.
func TooManyRequests(seconds int) Action {
	return Status(http.StatusTooManyRequests, "Retry-After", strconv.Itoa(seconds))
}

// Redirect redirects the client to the same path of another server; base is its
// scheme and address, such as "http://127.0.0.2:5000".
func Redirect(base string) Action {
	return func(http.Handler, <-chan struct{}) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			http.Redirect(w, req, base+req.URL.Path, http.StatusTemporaryRedirect)
		})
	}
}

// Stall sends the first bytes of the answer and then nothing more, with the
// connection open.
func Stall(after int) Action {
	return body(func(w http.ResponseWriter, req *http.Request, stop <-chan struct{}, content []byte) {
		_, _ = w.Write(content[:min(after, len(content))])
		_ = http.NewResponseController(w).Flush()
		select {
		case <-req.Context().Done():
		case <-stop:
		}
	})
}

// Late answers after a time, like a registry that is far away.
func Late(by time.Duration) Action {
	return func(answer http.Handler, stop <-chan struct{}) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			timer := time.NewTimer(by)
			defer timer.Stop()
			select {
			case <-timer.C:
				answer.ServeHTTP(w, req)
			case <-req.Context().Done():
			case <-stop:
			}
		})
	}
}

// Slow sends that many bytes of the answer's body per second.
func Slow(bytesPerSecond int) Action {
	const ticks = 20 // per second
	return body(func(w http.ResponseWriter, req *http.Request, stop <-chan struct{}, content []byte) {
		tick := time.NewTicker(time.Second / ticks)
		defer tick.Stop()
		for chunk := range slices.Chunk(content, max(1, bytesPerSecond/ticks)) {
			select {
			case <-tick.C:
			case <-req.Context().Done():
				return
			case <-stop:
				return
			}
			_, _ = w.Write(chunk)
			_ = http.NewResponseController(w).Flush()
		}
	})
}

// Reset breaks the connection after the first bytes of the answer's body.
func Reset(after int) Action {
	return body(func(w http.ResponseWriter, _ *http.Request, _ <-chan struct{}, content []byte) {
		_, _ = w.Write(content[:min(after, len(content))])
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
}

// Replace answers with other content, correctly framed, like a registry with a
// wrong or hostile store. Corrupt and Truncate are two ways to make it.
func Replace(change func([]byte) []byte) Action {
	return func(answer http.Handler, _ <-chan struct{}) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			status, header, content := capture(answer, req)
			content = change(content)
			header.Set("Content-Length", strconv.Itoa(len(content)))
			header.Del("Content-Range")
			send(w, status, header)
			_, _ = w.Write(content)
		})
	}
}

// Corrupt flips the last byte and keeps the length.
func Corrupt(content []byte) []byte {
	content = bytes.Clone(content)
	if len(content) > 0 {
		content[len(content)-1] ^= 0xff
	}
	return content
}

// Truncate drops the last half.
func Truncate(content []byte) []byte { return content[:len(content)/2] }

// body makes an Action that sends the true headers and a different body.
func body(write func(w http.ResponseWriter, req *http.Request, stop <-chan struct{}, content []byte)) Action {
	return func(answer http.Handler, stop <-chan struct{}) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			status, header, content := capture(answer, req)
			send(w, status, header)
			write(w, req, stop, content)
		})
	}
}

// recorder is a ResponseWriter that keeps the answer.
type recorder struct {
	status  int
	header  http.Header
	content bytes.Buffer
}

func (r *recorder) Header() http.Header               { return r.header }
func (r *recorder) WriteHeader(status int)            { r.status = status }
func (r *recorder) Write(content []byte) (int, error) { return r.content.Write(content) }

func capture(answer http.Handler, req *http.Request) (int, http.Header, []byte) {
	r := &recorder{status: http.StatusOK, header: http.Header{}}
	answer.ServeHTTP(r, req)
	return r.status, r.header, r.content.Bytes()
}

func send(w http.ResponseWriter, status int, header http.Header) {
	for name, values := range header {
		w.Header()[name] = values
	}
	w.WriteHeader(status)
}
