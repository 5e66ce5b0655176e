package stream

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/moby/spdystream"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/streaming/pkg/httpstream/wsstream"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
)

// forwardProtocol is port-forward over SPDY: for each connection the client opens
// a stream for the data and one for an error, which name the port and, if there
// are several at once, the connection.
const forwardProtocol = "portforward.k8s.io"

// Limits of the connections into pods, each of which takes some 100 KiB.
const (
	maxForwards      = 1000 // over one session, those that lack a stream included
	maxForwardsInSum = 4000 // over all sessions
)

// forwarder is a port-forward session.
type forwarder struct {
	session *session
	pod     string
	party   party

	wires wires

	mu     sync.Mutex
	closed bool
	open   int
	pairs  map[string]*pair    // those that lack a stream
	stood  map[uint16]struct{} // ports to which some connection has been made
}

// pair is a connection in the making.
type pair struct {
	port        uint16
	data, error *spdystream.Stream
	late        *time.Timer
}

// wire is the data stream of a connection as the engine has it.
type wire struct {
	*spdystream.Stream
	stands    func()                  // called when the connection has been made
	give      context.CancelCauseFunc // ends the connection
	abandoned atomic.Bool             // the client has reset the stream
}

// resetTime is how long a pod may take to read what the client sent before it reset the
// connection.
const resetTime = 10 * time.Second

var errReset = errors.New("connection reset by the client")

// Read is called by the engine once it has connected, and not before.
func (w *wire) Read(p []byte) (int, error) {
	w.stands()
	n, err := w.Stream.Read(p)
	if err != nil && (w.abandoned.Load() || w.IsFinished()) { // or this side has ended, too
		w.give(errReset)
	}
	return n, err
}

// Write fails on a stream that the client has reset, where spdystream goes on sending.
func (w *wire) Write(p []byte) (int, error) {
	if w.abandoned.Load() {
		return 0, errReset
	}
	return w.Stream.Write(p)
}

// wires are connections, by the number of their data stream. Their lock is never held
// while something is sent, since it is taken where frames are read.
type wires struct {
	mu  sync.Mutex
	all map[uint32]*wire
}

func (l *wires) add(w *wire) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all[w.Identifier()] = w
}

func (l *wires) remove(w *wire) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.all, w.Identifier())
}

// abandon notes that the client has reset a stream.
func (l *wires) abandon(stream uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w := l.all[stream]; w != nil && !w.abandoned.Swap(true) {
		time.AfterFunc(resetTime, func() { w.give(errReset) })
	}
}

// reset forgets the streams, and what the client still says on them.
func (p *pair) reset() {
	for _, s := range []*spdystream.Stream{p.data, p.error} {
		if s != nil {
			_ = s.Reset()
		}
	}
}

func (s *Server) portForward(v *session, req *cri.PortForwardRequest) {
	id := req.GetPodSandboxId()
	f := &forwarder{session: v, pod: id, party: s.partyOf(id), pairs: make(map[string]*pair), wires: wires{all: make(map[uint32]*wire)}, stood: make(map[uint16]struct{})}
	switch {
	case wsstream.IsWebSocketRequestWithTunnelingProtocol(v.r):
		f.tunnel()
	case wsstream.IsWebSocketRequest(v.r):
		f.forwardWebSocket(req.GetPort())
	default:
		f.forwardSPDY(v.w, v.r)
	}
}

// offered reads from its headers what a stream of that number is for: the data or
// the error of the connection id, to a port.
func offered(h http.Header, number uint32) (kind, id string, port uint16, ok bool) {
	kind = h.Get(streamType)
	n, err := strconv.ParseUint(h.Get("port"), 10, 16)
	if kind != "data" && kind != "error" || err != nil || n == 0 {
		return "", "", 0, false
	}
	id = h.Get("requestID")
	if id == "" { // the oldest clients open one pair after the other, the error stream first
		if kind == "data" {
			number -= 2
		}
		id = strconv.FormatUint(uint64(number), 10)
	}
	return kind, id, uint16(n), true
}

// take takes a stream that the client has opened, or refuses it.
func (f *forwarder) take(s *spdystream.Stream) bool {
	kind, id, port, ok := offered(s.Headers(), s.Identifier())
	if !ok {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	p := f.pairs[id]
	if p == nil {
		if f.closed || f.open >= maxForwards || !f.admit(1) {
			return false
		}
		f.open++
		p = &pair{port: port}
		p.late = time.AfterFunc(creationTime, func() { f.forget(id, p) })
		f.pairs[id] = p
	}
	half := &p.data
	if kind == "error" {
		half = &p.error
	}
	if *half != nil || !confirm(s) {
		return false
	}
	*half = s
	clear(s.Headers()) // the client may have sent more of them than anybody needs
	if p.data == nil || p.error == nil {
		return true
	}
	p.late.Stop()
	delete(f.pairs, id)
	ctx, give := context.WithCancelCause(f.session.ctx)
	w := &wire{Stream: p.data, give: give, stands: sync.OnceFunc(func() { f.stands(p.port) })}
	f.wires.add(w)
	f.session.do(func() {
		defer give(nil)
		defer f.release(w)
		f.connect(ctx, p, w)
	})
	return true
}

var errForwards = fmt.Errorf("too many port-forward connections on this node (at most %d, of which some are kept for other pods and namespaces)", maxForwardsInSum)

// admit takes the places of n connections, if there are.
func (f *forwarder) admit(n int) bool {
	s := f.session.server
	ok := s.forwards.take(f.party, n)
	if !ok {
		s.tickets.refused.add(refusedForward, f.party, errForwards)
	}
	return ok
}

// forget gives up a pair whose other half does not come.
func (f *forwarder) forget(id string, p *pair) {
	f.mu.Lock()
	known := f.pairs[id] == p
	if known {
		delete(f.pairs, id)
		f.releaseLocked()
	}
	f.mu.Unlock()
	if known {
		p.reset()
	}
}

func (f *forwarder) release(w *wire) {
	f.wires.remove(w)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.releaseLocked()
}

func (f *forwarder) releaseLocked() {
	f.open--
	f.session.server.forwards.release(f.party, 1)
}

// close ends the session: no connection begins any more.
func (f *forwarder) close() {
	_ = f.session.conn.Close() // first: to reset a stream is to write, and nobody may read
	f.mu.Lock()
	f.closed = true
	pairs := f.pairs
	f.pairs = nil
	for range pairs {
		f.releaseLocked()
	}
	f.mu.Unlock()
	for _, p := range pairs {
		p.late.Stop()
		p.reset()
	}
}

// connect serves one connection over SPDY.
func (f *forwarder) connect(ctx context.Context, p *pair, w *wire) {
	defer p.reset()
	f.session.do(func() { _, _ = io.Copy(io.Discard, p.error) })
	err := f.forward(ctx, p.port, w)
	conclude := func() {
		if f.tells(p.port, err) {
			_, _ = io.WriteString(p.error, f.session.server.text(err))
		} else {
			_ = p.data.Close()
		}
		_ = p.error.Close()
	}
	if podEnded(err) { // nothing else can be forwarded
		f.session.partWith(conclude)
	} else {
		conclude()
	}
}

// tells reports whether an error is written to the client. Since 1.23 kubectl closes the
// session, prints "lost connection to pod" and exits when there is any text on the error
// stream of one connection. So only errors that concern more than that connection are
// written: the pod has ended, or no connection to the port has ever been made, because the
// port is wrong for instance. Later connections that cannot be made, to a server that
// restarts for instance, just end (kubernetes#111825, kubernetes#74551).
func (f *forwarder) tells(port uint16, err error) bool {
	switch {
	case err == nil, errors.Is(err, unix.ECONNRESET): // somebody listens who did not want this connection
		return false
	case podEnded(err):
		return true
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	_, stood := f.stood[port]
	return !stood
}

func (f *forwarder) stands(port uint16) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stood[port] = struct{}{}
}

func podEnded(err error) bool {
	return errors.Is(err, fault.Precondition) || errors.Is(err, fault.NotFound)
}

func (f *forwarder) forward(ctx context.Context, port uint16, stream io.ReadWriteCloser) error {
	f.session.entry.Connect(port)
	err := f.session.server.engine.PortForward(ctx, f.pod, port, f.session.entry.Both(stream))
	if err != nil {
		f.session.entry.Fail(err)
		slog.DebugContext(ctx, "connection into a pod failed", "pod", f.pod, "port", port, "err", err)
		return fmt.Errorf("error forwarding port %d: %w", port, err)
	}
	return nil
}

// forwardWebSocket serves one connection to each of the ports of the request.
// Neither side can end its half alone.
func (f *forwarder) forwardWebSocket(ports []int32) {
	channels := slices.Repeat([]wsstream.ChannelType{wsstream.ReadWriteChannel, wsstream.WriteChannel}, len(ports))
	if !f.admit(len(ports)) {
		http.Error(f.session.w, errForwards.Error(), http.StatusServiceUnavailable)
		return
	}
	defer f.session.server.forwards.release(f.party, len(ports))
	ws, _, c, err := f.session.channelsOver([]string{"", "v4.channel.k8s.io", "v4.base64.channel.k8s.io"}, channels)
	if err != nil {
		slog.DebugContext(f.session.ctx, "WebSocket upgrade failed", "err", err)
		return
	}
	defer func() { _ = ws.Close() }()
	var connections panics.Group
	for i, port := range ports {
		connections.Go(func() {
			data, status := c[2*i], c[2*i+1]
			greeting := binary.LittleEndian.AppendUint16(nil, uint16(port))
			_, _ = data.Write(greeting)
			_, _ = status.Write(greeting)
			if err := f.forward(f.session.ctx, uint16(port), data); err != nil {
				_, _ = io.WriteString(status, f.session.server.text(err))
			}
		})
	}
	connections.Wait()
	f.session.partWith(func() {}) // each has had its own
}
