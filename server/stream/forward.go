package stream

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/wsstream"

	"github.com/crius-run/crius/internal/fault"
)

// forwardProtocol is port-forward over SPDY: for each connection the client opens
// a stream for the data and one for an error, which name the port and, if there
// are several at once, the connection.
const forwardProtocol = "portforward.k8s.io"

// maxForwards bounds the connections into a pod over one session.
const maxForwards = 1000

// forwarder is a port-forward session.
type forwarder struct {
	session *session
	pod     string

	mu    sync.Mutex
	open  int
	pairs map[string]*pair // those that lack a stream
}

// pair is a connection in the making.
type pair struct {
	port        uint16
	data, error arrival
	late        *time.Timer
}

func (s *Server) portForward(v *session, req *cri.PortForwardRequest) {
	f := &forwarder{session: v, pod: req.GetPodSandboxId(), pairs: make(map[string]*pair)}
	switch {
	case wsstream.IsWebSocketRequestWithTunnelingProtocol(v.r):
		f.tunnel()
	case wsstream.IsWebSocketRequest(v.r):
		f.forwardWebSocket(req.GetPort())
	default:
		f.forwardSPDY(v.w, v.r)
	}
}

// arrive takes a stream that the client has opened. An error refuses it.
func (f *forwarder) arrive(s httpstream.Stream, registered <-chan struct{}) error {
	kind := s.Headers().Get(streamType)
	if kind != "data" && kind != "error" {
		return fmt.Errorf("stream type %q", kind)
	}
	port, err := strconv.ParseUint(s.Headers().Get("port"), 10, 16)
	if err != nil || port == 0 {
		return fmt.Errorf("port %q", s.Headers().Get("port"))
	}
	id := s.Headers().Get("requestID")
	if id == "" { // the oldest clients open one pair after the other, the error stream first
		n := s.Identifier()
		if kind == "data" {
			n -= 2
		}
		id = strconv.FormatUint(uint64(n), 10)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	p := f.pairs[id]
	if p == nil {
		if f.open >= maxForwards {
			return fmt.Errorf("%d connections are open in this session", maxForwards)
		}
		f.open++
		p = &pair{port: uint16(port)}
		p.late = time.AfterFunc(creationTime, func() { f.forget(id, p) })
		f.pairs[id] = p
	}
	half := &p.data
	if kind == "error" {
		half = &p.error
	}
	if half.Stream != nil {
		return errors.New("there are two of its kind")
	}
	if err := confirm(s); err != nil {
		return err
	}
	*half = arrival{s, registered}
	if p.data.Stream == nil || p.error.Stream == nil {
		return nil
	}
	p.late.Stop()
	delete(f.pairs, id)
	f.session.work.Go(func() {
		defer f.release()
		f.connect(p)
	})
	return nil
}

// forget gives up a pair whose other half does not come.
func (f *forwarder) forget(id string, p *pair) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.pairs[id] != p {
		return
	}
	delete(f.pairs, id)
	f.open--
	for _, half := range []arrival{p.data, p.error} {
		if half.Stream != nil {
			go half.Reset() // which may have to wait for the client
		}
	}
}

func (f *forwarder) release() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.open--
}

// connect serves one connection over SPDY.
func (f *forwarder) connect(p *pair) {
	for _, half := range []arrival{p.data, p.error} {
		select {
		case <-half.registered:
		case <-f.session.ctx.Done():
			return
		}
	}
	if err := f.forward(p.port, p.data); err != nil {
		if errors.Is(err, fault.Precondition) { // the pod runs no more: nothing else can be forwarded
			f.session.partFrom()
		}
		_, _ = io.WriteString(p.error, err.Error())
		_ = p.error.Close()
		_ = p.data.Reset() // whatever comes is for nobody
		return
	}
	_ = p.error.Close()
	_ = p.data.Close()
}

func (f *forwarder) forward(port uint16, stream io.ReadWriteCloser) error {
	err := f.session.server.engine.PortForward(f.session.ctx, f.pod, port, stream)
	if err != nil {
		slog.DebugContext(f.session.ctx, "connection into a pod failed", "pod", f.pod, "port", port, "err", err)
		return fmt.Errorf("error forwarding port %d: %w", port, err)
	}
	return nil
}

// forwardWebSocket serves one connection to each of the ports of the request.
// Neither side can end its half alone.
func (f *forwarder) forwardWebSocket(ports []int32) {
	channels := slices.Repeat([]wsstream.ChannelType{wsstream.ReadWriteChannel, wsstream.WriteChannel}, len(ports))
	offer := make(map[string]wsstream.ChannelProtocolConfig)
	for _, name := range []string{"", "v4.channel.k8s.io", "v4.base64.channel.k8s.io"} {
		offer[name] = wsstream.ChannelProtocolConfig{Binary: name != "v4.base64.channel.k8s.io", Channels: channels}
	}
	ws := wsstream.NewConn(offer)
	ws.SetIdleTimeout(f.session.server.cfg.IdleTimeout)
	_, c, err := ws.Open(f.session.w, f.session.r)
	if err != nil {
		slog.DebugContext(f.session.ctx, "client gets no WebSocket", "err", err)
		return
	}
	defer ws.Close()
	var connections sync.WaitGroup
	for i, port := range ports {
		connections.Go(func() {
			data, status := c[2*i], c[2*i+1]
			greeting := binary.LittleEndian.AppendUint16(nil, uint16(port))
			_, _ = data.Write(greeting)
			_, _ = status.Write(greeting)
			if err := f.forward(uint16(port), data); err != nil {
				_, _ = io.WriteString(status, err.Error())
			}
		})
	}
	connections.Wait()
	f.session.partFrom()
}
