package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/unixsocket"
	"github.com/crius-run/crius/storage/foreign"
)

// Paths and parameters of requests.
const (
	checkPath    = "/check"
	holdingsPath = "/holdings"
	wipePath     = "/wipe"
	foreignPath  = "/foreign"
	reloadPath   = "/reload"
	repairKey    = "repair"
	imagesKey    = "keep_images"
	measureKey   = "measure"
	idKey        = "id"
	secondsKey   = "seconds"

	goroutinesPath = "/goroutines"
	heapPath       = "/heap"
	cpuPath        = "/cpu"
)

// Server accepts commands on the control socket.
type Server struct {
	http     *http.Server
	listener net.Listener
	cancel   context.CancelFunc // for the work of all requests
	work     sync.RWMutex       // each request holds it for reading
}

// Listen returns a server for node, which Close ends, not ctx. It replaces the
// socket of a dead server; two live ones cannot meet, because each has locked
// its state.
func Listen(ctx context.Context, socket string, node Node) (*Server, error) {
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("serve control socket: %w", err)
	}
	listener, err := unixsocket.Listen(ctx, socket, unixsocket.Private)
	if err != nil {
		return nil, fmt.Errorf("serve control socket: %w", err)
	}
	return newServer(ctx, listener, handler(node)), nil
}

func newServer(ctx context.Context, listener net.Listener, h http.Handler) *Server {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s := &Server{listener: listener, cancel: cancel}
	s.http = &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			s.work.RLock()
			defer s.work.RUnlock()
			if ctx.Err() != nil {
				http.Error(w, "the server is stopping", http.StatusServiceUnavailable)
				return
			}
			h.ServeHTTP(w, r)
		}),
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
	}
	return s
}

// Serve answers until Close.
func (s *Server) Serve() error {
	if err := s.http.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// Close cancels the requests under way. They may answer for as long as ctx
// lasts; Close waits for their work in any case, because the node is closed
// next.
func (s *Server) Close(ctx context.Context) error {
	s.cancel()
	err := s.http.Shutdown(ctx)
	if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		err = s.http.Close()
	}
	s.work.Lock() // a later request finds the context cancelled
	defer s.work.Unlock()
	return err
}

func handler(node Node) http.Handler {
	mux := http.NewServeMux()
	answer(mux, "POST "+checkPath, func(r *http.Request) (Checked, error) {
		repair, err := formBool(r, repairKey)
		if err != nil {
			return Checked{}, err
		}
		return node.Check(r.Context(), repair)
	})
	answer(mux, "GET "+holdingsPath, func(r *http.Request) (Holdings, error) { return node.Holdings(r.Context()) })
	answer(mux, "POST "+wipePath, func(r *http.Request) (Wiped, error) {
		keepImages, err := formBool(r, imagesKey)
		if err != nil {
			return Wiped{}, err
		}
		return node.Wipe(r.Context(), keepImages)
	})
	answer(mux, "GET "+foreignPath, func(r *http.Request) ([]foreign.Container, error) {
		measure, err := formBool(r, measureKey)
		if err != nil {
			return nil, err
		}
		return node.Foreign(r.Context(), measure)
	})
	answer(mux, "POST "+foreignPath, func(r *http.Request) (ForeignRemoved, error) {
		if err := r.ParseForm(); err != nil {
			return ForeignRemoved{}, fmt.Errorf("%w: %w", errForm, err)
		}
		return node.RemoveForeign(r.Context(), r.PostForm[idKey])
	})
	answer(mux, "POST "+reloadPath, func(r *http.Request) (Reloaded, error) { return node.Reload(r.Context()) })
	serveDumps(mux)
	return mux
}

// errForm is a request with invalid parameters.
var errForm = errors.New("malformed request")

func formBool(r *http.Request, key string) (bool, error) {
	value, err := strconv.ParseBool(r.FormValue(key))
	if err != nil {
		return false, fmt.Errorf("%w: %s: %w", errForm, key, err)
	}
	return value, nil
}

func answer[T any](mux *http.ServeMux, pattern string, work func(*http.Request) (T, error)) {
	mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
		result, err := work(r)
		switch {
		case errors.Is(err, errForm):
			http.Error(w, fault.Text(err), http.StatusBadRequest)
			return
		case err != nil:
			http.Error(w, fault.Text(err), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(result) // a client that has left does not need it
	})
}
