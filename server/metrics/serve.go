package metrics

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/crius-run/crius/internal/crowd"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/unixsocket"
	"github.com/crius-run/crius/server/tlsfile"
)

// Config says where metrics are served, and which pod metrics there are.
type Config struct {
	// IncludedPodMetrics is for the CRI server (server.Services.PodMetrics).
	IncludedPodMetrics []string `toml:"included_pod_metrics" apply:"reload" choices:"cpu,memory,disk,diskIO,network,tcp,udp,process,oom,pressure,hugetlb,spec,all" help:"kinds of pod metrics served to kubelets with the feature gate PodAndContainerStatsFromCRI, with the names that cAdvisor uses: cpu, memory, network, disk, diskIO, process, oom, pressure, spec, hugetlb, tcp, udp, or all; empty list: none"`

	Address         string `toml:"address" apply:"restart: the listener is opened at the start" help:"HOST:PORT on which metrics are served, in addition to the unix socket metrics.sock in run_root; empty: none"`
	TLSCertFile     string `toml:"tls_cert_file" apply:"restart: the listener is opened at the start; new content of the file takes effect at once" input:"yes" help:"PEM certificate for metrics over TLS; reloaded when the file changes"`
	TLSKeyFile      string `toml:"tls_key_file" apply:"restart: the listener is opened at the start; new content of the file takes effect at once" input:"yes" help:"PEM key of that certificate"`
	TLSClientCAFile string `toml:"tls_client_ca_file" apply:"restart: the listener is opened at the start; new content of the file takes effect at once" help:"PEM file of CA certificates that client certificates must be signed by; empty: clients need no certificate"`

	StatusPage bool `toml:"status_page" apply:"restart: the pages are set up at the start" help:"serve a page for browsers at /status, beside /metrics: conditions, operations, pulls, handlers, pods, and containers that do not run, by their names; whoever reaches metrics.address can read it"`
}

// Options are the inputs of Listen.
type Options struct {
	Config
	// Socket is a unix socket for root.
	Socket string
	// TLS applies to the address as it does to sessions (server.Config.TLS).
	TLS tlsfile.Rules
	// Healthy returns what is wrong with the server, for probes.
	Healthy func(context.Context) error
	// Page is the status page, which StatusPage enables.
	Page http.Handler
}

// maxConnections bounds connections to the address: any client that reaches it
// may connect, and each connection takes some kilobytes and a descriptor.
const maxConnections = 64

// Server answers scrapes, probes and browsers on the socket and, if configured,
// at the address.
type Server struct {
	http      *http.Server
	crowd     *crowd.Crowd // connections to the address
	listeners []net.Listener
}

// Listen returns a server that answers once Serve is called. It replaces the
// socket of a dead server; two live ones cannot meet, because each has locked
// its run root.
func (m *Metrics) Listen(ctx context.Context, cfg Options) (_ *Server, err error) {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", m.Handler())
	mux.Handle("GET /healthz", &health{check: cfg.Healthy})
	if cfg.StatusPage {
		mux.Handle("GET /status", cfg.Page)
	}
	s := &Server{crowd: crowd.New("metrics.address", maxConnections), http: &http.Server{
		Handler:        mux,
		ReadTimeout:    10 * time.Second,
		WriteTimeout:   time.Minute,
		IdleTimeout:    10 * time.Second,
		MaxHeaderBytes: 16 << 10,
	}}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("serve metrics: %w", err), s.close())
		}
	}()
	if err := os.Remove(cfg.Socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	socket, err := unixsocket.Listen(ctx, cfg.Socket, unixsocket.Private)
	if err != nil {
		return nil, err
	}
	s.listeners = append(s.listeners, socket)
	return s, s.listenAt(ctx, cfg)
}

// Check returns what Listen would refuse, without listening.
func (cfg Options) Check() error {
	_, err := cfg.check()
	return err
}

// check returns the configuration of TLS, nil without TLS.
func (cfg Options) check() (*tls.Config, error) {
	secure, err := tlsfile.Config("metrics", tlsfile.Files{Cert: cfg.TLSCertFile, Key: cfg.TLSKeyFile, ClientCA: cfg.TLSClientCAFile}, cfg.TLS)
	switch {
	case err != nil:
		return nil, err
	case cfg.Address == "" && secure != nil:
		return nil, fmt.Errorf("metrics.tls_cert_file has no effect without metrics.address: set metrics.address or remove it: %w", fault.Invalid)
	case cfg.Address == "":
		return nil, nil
	}
	if _, _, err := net.SplitHostPort(cfg.Address); err != nil {
		return nil, fmt.Errorf("metrics.address = %q: give HOST:PORT: %w: %w", cfg.Address, err, fault.Invalid)
	}
	return secure, nil
}

func (s *Server) listenAt(ctx context.Context, cfg Options) error {
	secure, err := cfg.check()
	if err != nil || cfg.Address == "" {
		return err
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", cfg.Address)
	if err != nil {
		return err
	}
	l = s.crowd.Limit(l)
	if secure != nil {
		l = tls.NewListener(l, secure)
	}
	s.listeners = append(s.listeners, l)
	return nil
}

// Serve answers until Close.
func (s *Server) Serve() error {
	ended := make(chan error, len(s.listeners))
	for _, l := range s.listeners {
		go func() { ended <- s.http.Serve(l) }()
	}
	var errs []error
	for range s.listeners {
		if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Close lets scrapes under way end, for as long as ctx lasts.
func (s *Server) Close(ctx context.Context) error { return s.http.Shutdown(ctx) }

func (s *Server) close() error {
	var errs []error
	for _, l := range s.listeners {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}
