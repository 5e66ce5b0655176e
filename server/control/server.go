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
	"time"
)

// Paths and parameters of requests.
const (
	checkPath    = "/check"
	holdingsPath = "/holdings"
	wipePath     = "/wipe"
	repairKey    = "repair"
	imagesKey    = "keep_images"
)

// Server answers on the socket.
type Server struct {
	http     *http.Server
	listener net.Listener
}

// Listen makes a server for node. The socket of a dead server is replaced; two
// live ones cannot meet, since each has locked its state.
func Listen(socket string, node Node) (*Server, error) {
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("serve checks: %w", err)
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return nil, fmt.Errorf("serve checks: %w", err)
	}
	if err := os.Chmod(socket, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("serve checks: %w", err), listener.Close())
	}
	return &Server{listener: listener, http: &http.Server{
		Handler:           handler(node),
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
	}}, nil
}

// Serve answers until Close.
func (s *Server) Serve() error {
	if err := s.http.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// Close lets requests under way end, for as long as ctx lasts.
func (s *Server) Close(ctx context.Context) error { return s.http.Shutdown(ctx) }

func handler(node Node) http.Handler {
	mux := http.NewServeMux()
	answer(mux, "POST "+checkPath, func(r *http.Request) (Checked, error) {
		repair, err := strconv.ParseBool(r.FormValue(repairKey))
		if err != nil {
			return Checked{}, err
		}
		return node.Check(r.Context(), repair)
	})
	answer(mux, "GET "+holdingsPath, func(r *http.Request) (Holdings, error) { return node.Holdings(r.Context()) })
	answer(mux, "POST "+wipePath, func(r *http.Request) (Wiped, error) {
		keepImages, err := strconv.ParseBool(r.FormValue(imagesKey))
		if err != nil {
			return Wiped{}, err
		}
		return node.Wipe(r.Context(), keepImages)
	})
	return mux
}

func answer[T any](mux *http.ServeMux, pattern string, work func(*http.Request) (T, error)) {
	mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
		result, err := work(r)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(result) // who has left does not miss it
	})
}
