package stream

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/server/tlsfile"
	"github.com/crius-run/crius/server/trail"
)

// Config is where sessions are served and how.
type Config struct {
	Address     string        // HOST:PORT; port 0: any
	IdleTimeout time.Duration // of a session in which nothing is said

	// MaxSessions and MaxSessionsPerContainer bound the sessions of the node, and
	// those of a container, or port-forwards of a pod; 0: any number.
	MaxSessions, MaxSessionsPerContainer int

	// Namespace returns the namespace of a container's or a pod's id, of which none may
	// have all places; nil: all are in one.
	Namespace func(id string) string

	// Forwarded returns the pod to which connections to an address of the node go instead of to this server, because
	// it has the port as a host port; empty: they come here. nil: they always do.
	Forwarded func(to netip.AddrPort) (pod string)

	// Text returns the text of an error for clients; nil: that of the error.
	Text func(err error) string

	// Trail records sessions; nil: nothing does.
	Trail *trail.Trail

	// TLS, if the first two are given; with the third, clients must have a
	// certificate of that authority. New files are noticed.
	TLSCertFile, TLSKeyFile, TLSClientCAFile string
	TLS                                      tlsfile.Rules
}

// Engine runs the sessions; *pod.Engine is the one there is.
type Engine interface {
	// Exec returns the command's exit code. An error means that there is none.
	Exec(ctx context.Context, id string, cmd oci.Command, client pod.Client) (exitCode int32, err error)
	Attach(ctx context.Context, id string, client pod.Client) error
	// PortForward takes the closing of stream for the end of what is sent to the
	// client.
	PortForward(ctx context.Context, id string, port uint16, stream io.ReadWriteCloser) error
}

// Server is the streaming server.
type Server struct {
	cfg      Config
	engine   Engine
	secure   *tls.Config // nil: without TLS
	hangups  *hangups
	http     *http.Server
	tickets  *tickets
	forwards *forwards
	sessions sync.WaitGroup
	idle     atomic.Int64 // Config.IdleTimeout

	mu       sync.Mutex
	base     url.URL // of the URLs of sessions
	listener net.Listener
	closed   bool
}

// Check is what New finds wrong without listening.
func (cfg Config) Check() error {
	_, err := cfg.check()
	return err
}

// check returns the configuration of TLS, nil without TLS.
func (cfg Config) check() (*tls.Config, error) {
	secure, err := tlsfile.Config("streaming", tlsfile.Files{Cert: cfg.TLSCertFile, Key: cfg.TLSKeyFile, ClientCA: cfg.TLSClientCAFile}, cfg.TLS)
	if err != nil {
		return nil, fmt.Errorf("api.stream_tls_cert_file, stream_tls_key_file and stream_tls_client_ca_file: %w", err)
	}
	if err := checkAddress(cfg.Address); err != nil {
		return nil, err
	}
	if cfg.IdleTimeout < 0 {
		return nil, fmt.Errorf("api.stream_idle_timeout = %q: give a positive duration, or 0 for none: %w", cfg.IdleTimeout, fault.Invalid)
	}
	return secure, nil
}

// New listens, so that URLs can be given from then on.
func New(cfg Config, engine Engine) (*Server, error) {
	secure, err := cfg.check()
	if err != nil {
		return nil, err
	}
	hangups, err := newHangups(maxStrangers)
	if err != nil {
		return nil, err
	}
	s := &Server{
		cfg: cfg, engine: engine, secure: secure, hangups: hangups,
		tickets:  newTickets(cfg.MaxSessions, cfg.MaxSessionsPerContainer),
		forwards: &forwards{places: newShares(maxForwardsInSum)},
	}
	s.idle.Store(int64(cfg.IdleTimeout))
	if err := s.listen(); err != nil {
		hangups.close()
		return nil, err
	}
	s.http = s.newHTTP()
	return s, nil
}

// listen makes the server listen at its address.
func (s *Server) listen() error {
	l, err := net.Listen("tcp", s.cfg.Address)
	if err != nil {
		return fmt.Errorf("api.stream_address: %w", err)
	}
	s.base, s.listener = url.URL{Scheme: "http", Host: l.Addr().String()}, watched{l, s.hangups}
	if s.secure != nil {
		s.base.Scheme, s.listener = "https", tls.NewListener(s.listener, s.secure)
	}
	return nil
}

// Bound replaces Config.IdleTimeout for later sessions, and the numbers of sessions of Config. No
// session ends because of that.
func (s *Server) Bound(idle time.Duration, most, mostEach int) {
	s.idle.Store(int64(idle))
	s.tickets.bound(most, mostEach)
}

// checkAddress wants an address that a client can be sent to.
func checkAddress(address string) error {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("api.stream_address: %w: %w", err, fault.Invalid)
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		return fmt.Errorf("api.stream_address = %q: give an address at which the kubelet and its clients can reach this node: %w", address, fault.Invalid)
	}
	return nil
}

// newHTTP returns a server without keep-alive or HTTP/2: a client sends one short
// request, and then speaks another protocol.
func (s *Server) newHTTP() *http.Server {
	mux := http.NewServeMux()
	mux.HandleFunc("/exec/{token}", serve(s, s.exec))
	mux.HandleFunc("/attach/{token}", serve(s, s.attach))
	mux.HandleFunc("/portforward/{token}", serve(s, s.portForward))
	srv := &http.Server{
		Handler:        mux,
		ReadTimeout:    10 * time.Second, // until the upgrade, after which there is no limit
		MaxHeaderBytes: 16 << 10,
		Protocols:      new(http.Protocols),
		ErrorLog:       slog.NewLogLogger(slog.Default().Handler(), slog.LevelDebug),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			if over, ok := c.(*tls.Conn); ok {
				c = over.NetConn()
			}
			return context.WithValue(ctx, connKey{}, c.(*conn))
		},
	}
	srv.Protocols.SetHTTP1(true) // HTTP/2 has no upgrades
	srv.SetKeepAlivesEnabled(false)
	return srv
}

type connKey struct{}

// Serve serves until Close.
func (s *Server) Serve() error {
	for {
		l := s.current()
		err := s.http.Serve(l)
		if errors.Is(err, http.ErrServerClosed) {
			return nil
		}
		if s.current() == l {
			return fmt.Errorf("serve sessions: %w", err)
		}
	}
}

func (s *Server) current() net.Listener {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.listener
}

// reachable returns the base of URLs. If a pod has taken the server's port, the server moves to another
// one, unless its configuration names that port: that is fault.Precondition.
func (s *Server) reachable() (url.URL, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.cfg.Forwarded != nil && !s.closed {
		at := s.listener.Addr().(*net.TCPAddr).AddrPort()
		pod := s.cfg.Forwarded(at)
		if pod == "" {
			break
		}
		if _, port, _ := net.SplitHostPort(s.cfg.Address); port != "0" {
			return s.base, fmt.Errorf("port %d of api.stream_address is a host port of pod %s, to which all connections go: use another port, best any (0), or remove that pod: %w",
				at.Port(), pod, fault.Precondition)
		}
		former := s.listener
		if err := s.listen(); err != nil {
			return s.base, err
		}
		_ = former.Close() // its sessions go on
		slog.Info("the port of sessions has become a host port of a pod, serving them on another one", "pod", pod, "port", at.Port(), "now", s.base.Host)
	}
	return s.base, nil
}

// Close ends all sessions and waits for them, but not beyond ctx: a runtime that
// hangs may hold one up. The processes in the containers live on.
func (s *Server) Close(ctx context.Context) error {
	err := s.http.Close()
	s.mu.Lock()
	s.closed = true
	_ = s.listener.Close() // if it was never served
	s.mu.Unlock()
	s.hangups.abortAll()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.sessions.Wait()
		s.hangups.close()
	}()
	select {
	case <-ended:
		return err
	case <-ctx.Done():
		return errors.Join(err, fmt.Errorf("end sessions: %w", context.Cause(ctx)))
	}
}

// Exec returns the URL of a session. The request must have been checked. It says
// fault.Exhausted where there are too many sessions, for which it waits some seconds
// while ctx lasts: one may be about to end.
func (s *Server) Exec(ctx context.Context, r *cri.ExecRequest) (string, error) {
	return s.url(ctx, "exec", r, trail.Request{Verb: trail.Exec, ID: r.GetContainerId(), Command: r.GetCmd(), Terminal: r.GetTty()})
}

// Attach is the same for the container's own process.
func (s *Server) Attach(ctx context.Context, r *cri.AttachRequest) (string, error) {
	return s.url(ctx, "attach", r, trail.Request{Verb: trail.Attach, ID: r.GetContainerId(), Terminal: r.GetTty()})
}

// PortForward is the same for connections to the pod's ports.
func (s *Server) PortForward(ctx context.Context, r *cri.PortForwardRequest) (string, error) {
	return s.url(ctx, "portforward", r, trail.Request{Verb: trail.PortForward, ID: r.GetPodSandboxId()})
}

func (s *Server) url(ctx context.Context, kind string, session any, about trail.Request) (string, error) {
	base, err := s.reachable()
	if err != nil {
		return "", err
	}
	token, err := s.tickets.issue(ctx, s.partyOf(about.ID), session, s.cfg.Trail.Begin(ctx, about))
	return base.JoinPath(kind, token).String(), err
}

func (s *Server) partyOf(target string) party {
	p := party{target: target}
	if s.cfg.Namespace != nil {
		p.namespace = s.cfg.Namespace(target)
	}
	return p
}

// text returns what a client is told of an error.
func (s *Server) text(err error) string {
	if s.cfg.Text != nil {
		return s.cfg.Text(err)
	}
	return fault.Text(err)
}

// Counts are what the stream server refused since it was started.
type Counts struct {
	Refused map[string]uint64 // sessions and forwarded connections, by reason
	Closed  uint64            // connections without a session URL, for which there was no room
}

// Counts returns them.
func (s *Server) Counts() Counts {
	return Counts{s.tickets.refused.snapshot(), s.hangups.strangers.Closed()}
}

// serve makes a handler of one for a kind of session.
func serve[T any](s *Server, handle func(*session, T)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		request, entry, ended, ok := redeem[T](s.tickets, r.PathValue("token"))
		if !ok {
			http.NotFound(w, r)
			return
		}
		s.sessions.Add(1)
		defer s.sessions.Done()
		c := r.Context().Value(connKey{}).(*conn)
		defer c.whenClosed(ended) // a client that does not take the rest keeps its place
		c.introduce()
		ctx, cancel := context.WithCancelCause(r.Context())
		answer := &answer{ResponseWriter: w}
		v := &session{server: s, conn: c, w: answer, r: r.WithContext(ctx), ctx: ctx, entry: entry}
		entry.From(r.RemoteAddr)
		v.work.Go(func() {
			if c.wait(ctx, time.Duration(s.idle.Load())) {
				cancel(c.why())
				_ = c.Close() // whoever still writes is told
			}
		})
		began := time.Now()
		err := panics.Do(ctx, "serve session", func() error { handle(v, request); return nil })
		entry.End(v.exitCode, err)
		if err != nil && !answer.hijacked {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
		if answer.hijacked {
			_ = c.Close()
		}
		cancel(nil)
		for _, end := range v.ends {
			end()
		}
		v.work.Wait()
		slog.DebugContext(r.Context(), "session ended", "path", r.Pattern, "took", time.Since(began))
	}
}

// answer knows whether the connection is still net/http's.
type answer struct {
	http.ResponseWriter
	hijacked bool
}

func (a *answer) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	a.hijacked = true
	return http.NewResponseController(a.ResponseWriter).Hijack()
}

var (
	errGone = fmt.Errorf("client disconnected: %w", context.Canceled)
	errIdle = fmt.Errorf("nothing sent in either direction for api.stream_idle_timeout: %w", context.Canceled)
)

// why says why wait has returned true.
func (c *conn) why() error {
	select {
	case <-c.gone:
		return errGone
	default:
		return errIdle
	}
}
