package kubelet

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/gorilla/websocket"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	spdytransport "k8s.io/client-go/transport/spdy"
	"k8s.io/klog/v2"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
)

// Streams opens the sessions behind the URLs that Exec, Attach and PortForward
// return. Well-behaved sessions use client-go, like kubectl; others use the
// connections beneath.
type Streams struct {
	// Within runs a function in the network in which the server listens.
	Within func(func() error) error
	// WebSocket is the transport; the default is SPDY.
	WebSocket bool
	// Protocols are the versions to offer, best first; empty: those that
	// client-go offers.
	Protocols []string
	TLS       rest.TLSClientConfig
}

// Size is a terminal's, in columns and rows.
type Size = remotecommand.TerminalSize

// Wants are the streams of a session, as in the request for its URL.
type Wants struct {
	Stdin, Stdout, Stderr, TTY bool
	// Size is the terminal's initial size, unless it is zero.
	Size Size
	// Unread makes a client that reads no output, Paused one that does not until it is closed.
	Unread bool
	Paused <-chan struct{}
	// To takes the standard output, which the session then does not keep.
	To io.Writer
}

// A Session is an exec or attach session of client-go with the server.
type Session struct {
	Stdout, Stderr Output

	stdin  *io.PipeWriter
	sizes  chan Size
	ctx    context.Context
	cancel context.CancelFunc
	done   chan struct{}
	err    error // valid after done
}

// Open begins a session, which ends by itself, with Leave or with ctx.
func (s Streams) Open(ctx context.Context, address string, w Wants) *Session {
	out := &Session{sizes: make(chan Size, 16), done: make(chan struct{})}
	out.ctx, out.cancel = context.WithCancel(klog.NewContext(ctx, logr.Discard()))
	options := remotecommand.StreamOptions{Tty: w.TTY}
	var stdin *io.PipeReader
	stdin, out.stdin = io.Pipe()
	if w.Stdin {
		options.Stdin = stdin
	}
	switch {
	case w.To != nil:
		options.Stdout = w.To
	case w.Stdout:
		options.Stdout = out.writer(&out.Stdout, w)
	}
	if w.Stderr {
		options.Stderr = out.writer(&out.Stderr, w)
	}
	if w.TTY {
		options.TerminalSizeQueue = (*sizeQueue)(out)
		if w.Size != (Size{}) {
			out.sizes <- w.Size
		}
	}
	go func() {
		defer close(out.done)
		out.err = s.stream(out.ctx, address, options)
		stdin.CloseWithError(errors.New("the session has ended"))
		out.cancel()
	}()
	return out
}

func (s Streams) stream(ctx context.Context, address string, o remotecommand.StreamOptions) error {
	e, err := s.executor(address)
	if err != nil {
		return err
	}
	return s.within(func() error { return e.StreamWithContext(ctx, o) })
}

func (s Streams) within(f func() error) error {
	if s.Within == nil {
		return f()
	}
	return s.Within(f)
}

func (s Streams) executor(address string) (remotecommand.Executor, error) {
	if !s.WebSocket {
		return s.spdy(address)
	}
	if len(s.Protocols) == 0 {
		return remotecommand.NewWebSocketExecutor(s.config(), http.MethodGet, address)
	}
	return remotecommand.NewWebSocketExecutorForProtocols(s.config(), http.MethodGet, address, s.Protocols...)
}

func (s Streams) spdy(address string) (remotecommand.Executor, error) {
	u, err := url.Parse(address)
	if err != nil {
		return nil, err
	}
	if len(s.Protocols) == 0 {
		return remotecommand.NewSPDYExecutor(s.config(), http.MethodPost, u)
	}
	transport, upgrader, err := spdytransport.RoundTripperFor(s.config())
	if err != nil {
		return nil, err
	}
	return remotecommand.NewSPDYExecutorForProtocols(transport, upgrader, http.MethodPost, u, s.Protocols...)
}

func (s Streams) config() *rest.Config {
	direct := func(*http.Request) (*url.URL, error) { return nil, nil }
	return &rest.Config{TLSClientConfig: s.TLS, Proxy: direct}
}

func (s *Session) writer(to *Output, w Wants) io.Writer {
	switch {
	case w.Unread:
		return stuck{s.ctx}
	case w.Paused != nil:
		return paused{to, s.ctx, w.Paused}
	}
	return to
}

// paused is a writer that accepts nothing until it is resumed.
type paused struct {
	io.Writer
	ctx     context.Context
	resumed <-chan struct{}
}

func (p paused) Write(b []byte) (int, error) {
	select {
	case <-p.resumed:
		return p.Writer.Write(b)
	case <-p.ctx.Done():
		return 0, p.ctx.Err()
	}
}

// stuck is a writer that accepts nothing while its session lasts.
type stuck struct{ ctx context.Context }

func (s stuck) Write([]byte) (int, error) {
	<-s.ctx.Done()
	return 0, s.ctx.Err()
}

type sizeQueue Session

// Next implements remotecommand.TerminalSizeQueue.
func (s *sizeQueue) Next() *Size {
	select {
	case size := <-s.sizes:
		return &size
	case <-s.ctx.Done():
		return nil
	}
}

// Type sends text to the session's standard input.
func (s *Session) Type(text string) error {
	_, err := io.WriteString(s.stdin, text)
	return err
}

// Send copies everything to the session's standard input.
func (s *Session) Send(r io.Reader) error {
	_, err := io.Copy(s.stdin, r)
	return err
}

// EndInput closes the session's standard input and leaves the rest open.
func (s *Session) EndInput() { _ = s.stdin.Close() }

// Resize tells the server another size; it waits until client-go takes it.
func (s *Session) Resize(columns, rows uint16) {
	select {
	case s.sizes <- Size{Width: columns, Height: rows}:
	case <-s.ctx.Done():
	}
}

// Leave ends the session from this side and waits until client-go has ended it.
func (s *Session) Leave() {
	s.cancel()
	<-s.done
}

// Done is closed when the session has ended.
func (s *Session) Done() <-chan struct{} { return s.done }

// Wait returns how the session ended; a utilexec.CodeExitError carries an exit
// code other than 0. A session that lasts longer than patience is an error,
// too.
func (s *Session) Wait(patience time.Duration) error {
	select {
	case <-s.done:
		return s.err
	case <-time.After(patience):
		return fmt.Errorf("the session goes on after %v; its output ends with %q", patience, s.Stdout.Tail(100))
	}
}

// Output is the output of a session so far.
type Output struct {
	mu   sync.Mutex
	data bytes.Buffer
}

// Write implements io.Writer.
func (o *Output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.data.Write(p)
}

// String returns everything written so far.
func (o *Output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.data.String()
}

// Tail returns the end of what has been written.
func (o *Output) Tail(n int) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	b := o.data.Bytes()
	return string(b[max(0, len(b)-n):])
}

// A Line is the connection beneath a session, for clients that misbehave.
type Line struct {
	*net.TCPConn
	r      io.Reader
	frozen atomic.Bool
	closed chan struct{}
	once   sync.Once
}

// Dial connects to the server of a URL and sends nothing yet.
func (s Streams) Dial(ctx context.Context, address string) (*Line, error) {
	u, err := url.Parse(address)
	if err != nil {
		return nil, err
	}
	var conn net.Conn
	err = s.within(func() (err error) {
		conn, err = new(net.Dialer).DialContext(ctx, "tcp", u.Host)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &Line{TCPConn: conn.(*net.TCPConn), r: conn, closed: make(chan struct{})}, nil
}

// Freeze makes the client stop reading, whatever the server sends.
func (l *Line) Freeze() { l.frozen.Store(true) }

// Read implements net.Conn.
func (l *Line) Read(p []byte) (int, error) {
	if l.frozen.Load() {
		<-l.closed
		return 0, net.ErrClosed
	}
	return l.r.Read(p)
}

// Close implements net.Conn.
func (l *Line) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.TCPConn.Close()
}

// Cut ends the connection with an RST.
func (l *Line) Cut() {
	_ = l.SetLinger(0)
	_ = l.Close()
}

// Upgrade requests another protocol, or none if it is empty, and returns the
// server's answer. The line then carries what follows it.
func (l *Line) Upgrade(address, protocol string, header http.Header) (*http.Response, error) {
	req, err := http.NewRequest(http.MethodGet, address, nil)
	if err != nil {
		return nil, err
	}
	for k, v := range header {
		req.Header[k] = v
	}
	if protocol != "" {
		req.Header.Set("Connection", "Upgrade")
		req.Header.Set("Upgrade", protocol)
	}
	if err := req.Write(l.TCPConn); err != nil {
		return nil, err
	}
	r := bufio.NewReader(l.TCPConn)
	resp, err := http.ReadResponse(r, req)
	l.r = r
	return resp, err
}

// SPDY returns an upgraded connection without any stream, and the line beneath
// it. It offers protocols as versions.
func (s Streams) SPDY(ctx context.Context, address string, protocols ...string) (httpstream.Connection, *Line, error) {
	l, err := s.Dial(ctx, address)
	if err != nil {
		return nil, nil, err
	}
	resp, err := l.Upgrade(address, spdy.HeaderSpdy31, http.Header{httpstream.HeaderProtocolVersion: protocols}) //nolint:bodyclose // the line is closed
	if err == nil && resp.StatusCode != http.StatusSwitchingProtocols {
		body, _ := io.ReadAll(io.LimitReader(resp.Body, 1000))
		err = fmt.Errorf("%s: %s", resp.Status, body)
	}
	if err == nil && !slices.Contains(protocols, resp.Header.Get(httpstream.HeaderProtocolVersion)) {
		err = fmt.Errorf("the server chose version %q of %v", resp.Header.Get(httpstream.HeaderProtocolVersion), protocols)
	}
	if err != nil {
		_ = l.Close()
		return nil, nil, err
	}
	conn, err := spdy.NewClientConnection(l)
	return conn, l, err
}

// RawWebSocket returns a WebSocket on which the caller sends its own messages.
// Its Subprotocol is the negotiated protocol.
func (s Streams) RawWebSocket(ctx context.Context, address string, protocols ...string) (*websocket.Conn, *Line, error) {
	u, err := url.Parse(address)
	if err != nil {
		return nil, nil, err
	}
	u.Scheme = "ws"
	l, err := s.Dial(ctx, address)
	if err != nil {
		return nil, nil, err
	}
	header := http.Header{}
	if len(protocols) > 0 {
		header.Set("Sec-Websocket-Protocol", strings.Join(protocols, ", "))
	}
	conn, resp, err := websocket.NewClient(l, u, header, 0, 0) //nolint:bodyclose,staticcheck // the line is closed; a Dialer would dial another
	if err != nil {
		_ = l.Close()
		if resp != nil {
			err = fmt.Errorf("%w: %s", err, resp.Status)
		}
		return nil, nil, err
	}
	return conn, l, nil
}

// A Tunnel is a port-forward session over SPDY that may carry many connections.
type Tunnel struct {
	Line *Line

	conn httpstream.Connection
	mu   sync.Mutex
	next int
}

// A Wire is one connection to a port of the pod. Closing it ends only the
// client's sending direction.
type Wire struct {
	httpstream.Stream
	Errors httpstream.Stream // the server's error message, until EOF
}

// Tunnel opens a port-forward session.
func (s Streams) Tunnel(ctx context.Context, address string) (*Tunnel, error) {
	conn, line, err := s.SPDY(ctx, address, portforward.PortForwardProtocolV1Name)
	if err != nil {
		return nil, err
	}
	return &Tunnel{Line: line, conn: conn}, nil
}

// Connect opens a connection to a port, as kubectl does.
func (t *Tunnel) Connect(port int) (*Wire, error) {
	t.mu.Lock()
	id := t.next
	t.next++
	t.mu.Unlock()
	header := http.Header{}
	header.Set("port", strconv.Itoa(port))
	header.Set("requestID", strconv.Itoa(id))
	header.Set("streamType", "error")
	e, err := t.conn.CreateStream(header)
	if err != nil {
		return nil, fmt.Errorf("error stream: %w", err)
	}
	_ = e.Close() // nothing is sent on it
	header = header.Clone()
	header.Set("streamType", "data")
	d, err := t.conn.CreateStream(header)
	if err != nil {
		return nil, fmt.Errorf("data stream: %w", err)
	}
	return &Wire{Stream: d, Errors: e}, nil
}

// Forget drops the two streams of a wire, as kubectl does at its end.
func (t *Tunnel) Forget(w *Wire) { t.conn.RemoveStreams(w.Stream, w.Errors) }

// Ended is closed when the connection has ended.
func (t *Tunnel) Ended() <-chan bool { return t.conn.CloseChan() }

// Close ends the session.
func (t *Tunnel) Close() error {
	err := t.conn.Close()
	_ = t.Line.Close()
	return err
}

// Forward does what kubectl port-forward does: it listens in the server's
// network, and returns its port.
func (s Streams) Forward(ctx context.Context, address string, port int) (local int, ended <-chan error, err error) {
	u, err := url.Parse(address)
	if err != nil {
		return 0, nil, err
	}
	dialer, err := s.forwardDialer(u)
	if err != nil {
		return 0, nil, err
	}
	ready, done := make(chan struct{}), make(chan error, 1)
	ctx = klog.NewContext(ctx, logr.Discard())
	f, err := portforward.NewOnAddressesForStreamingWithContext(ctx, dialer, []string{"127.0.0.1"}, []string{fmt.Sprintf("0:%d", port)}, ready, io.Discard, io.Discard)
	if err != nil {
		return 0, nil, err
	}
	go func() { done <- s.within(f.ForwardPorts) }()
	select {
	case <-ready:
	case err := <-done:
		return 0, nil, fmt.Errorf("the forwarding has ended before it began: %w", err)
	}
	ports, err := f.GetPorts()
	if err != nil {
		return 0, nil, err
	}
	return int(ports[0].Local), done, nil
}

func (s Streams) forwardDialer(u *url.URL) (httpstream.Dialer, error) {
	if s.WebSocket {
		return portforward.NewSPDYOverWebsocketDialerForStreaming(u, s.config())
	}
	transport, upgrader, err := spdytransport.RoundTripperFor(s.config())
	if err != nil {
		return nil, err
	}
	return spdytransport.NewDialerForStreaming(upgrader, &http.Client{Transport: transport}, http.MethodPost, u), nil
}
