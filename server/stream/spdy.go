package stream

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/moby/spdystream"
	"github.com/moby/spdystream/spdy"
	"k8s.io/streaming/pkg/httpstream"

	"github.com/crius-run/crius/internal/panics"
)

// The subprotocols of exec and attach over SPDY, the best first. From v3 on a
// terminal has a stream for its sizes, from v4 on the status is a document. (The
// first one's known defects, kubernetes#13394 and #13395, are not repeated.)
var spdyProtocols = []string{"v5.channel.k8s.io", "v4.channel.k8s.io", "v3.channel.k8s.io", "v2.channel.k8s.io", "channel.k8s.io"}

const (
	spdy31 = "SPDY/3.1"
	// streamType is the header that says what a stream of a client is for.
	streamType = "streamType"
)

// hijack agrees with a client on one of the subprotocols, and returns the connection on
// which SPDY is spoken from then on. It answers what fails.
func hijack(w http.ResponseWriter, r *http.Request, protocols []string, reset func(stream uint32)) (*guard, string, error) {
	protocol, err := httpstream.Handshake(r, w, protocols)
	if err != nil {
		return nil, "", err // it has answered
	}
	if !strings.Contains(strings.ToLower(r.Header.Get(httpstream.HeaderConnection)), "upgrade") ||
		!strings.EqualFold(r.Header.Get(httpstream.HeaderUpgrade), spdy31) {
		http.Error(w, "upgrade to "+spdy31+" or to a WebSocket is required", http.StatusBadRequest)
		return nil, "", errors.New("client did not request an upgrade")
	}
	w.Header().Set(httpstream.HeaderConnection, httpstream.HeaderUpgrade)
	w.Header().Set(httpstream.HeaderUpgrade, spdy31)
	w.WriteHeader(http.StatusSwitchingProtocols)
	plain, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return nil, "", fmt.Errorf("upgrade: %w", err)
	}
	return &guard{Conn: readAhead{plain, buffered.Reader}, reset: reset}, protocol, nil
}

// upgradeSPDY speaks SPDY with a client by spdystream; see hijack. take gets each stream that the
// client opens, confirms it if it wants it, and says whether it has taken it. reset, if
// not nil, gets the number of each stream that the client resets, maybe before all
// that came on it has been read.
//
// A stream that has been taken must be read until it ends, or be reset: spdystream
// passes on no frame before the last one has been read, and some others share its
// queue.
func upgradeSPDY(w http.ResponseWriter, r *http.Request, protocols []string, take func(*spdystream.Stream) bool, reset func(stream uint32)) (*spdystream.Connection, string, error) {
	guarded, protocol, err := hijack(w, r, protocols, reset)
	if err != nil {
		return nil, "", err
	}
	conn, err := spdystream.NewConnectionWithOptions(&wholeFrames{Conn: guarded}, true,
		spdy.WithMaxControlFramePayloadSize(largestControl), spdy.WithMaxHeaderFieldSize(largestField), spdy.WithMaxHeaderCount(mostFields))
	if err != nil {
		return nil, "", fmt.Errorf("upgrade: %w", err)
	}
	ctx := r.Context()
	go conn.Serve(func(s *spdystream.Stream) {
		panics.Run(ctx, "open stream of session", func() {
			if !take(s) {
				_ = s.Reset()
			}
		})
	})
	return conn, protocol, nil
}

// confirm tells the client that its stream is open, and reports whether it could: to
// write on a stream that is not confirmed waits for ever.
func confirm(s *spdystream.Stream) bool { return s.SendReply(http.Header{}, false) == nil }

// readAhead is a connection of which some has been read already.
type readAhead struct {
	net.Conn
	r *bufio.Reader
}

func (c readAhead) Read(p []byte) (int, error) { return c.r.Read(p) }

// spdyStreams waits for a client to open the streams that are wanted.
func (v *session) spdyStreams(w wanted) (*dialogue, error) {
	arrivals, complete := make(chan *spdyStream), make(chan struct{})
	defer close(complete)
	guarded, protocol, err := hijack(v.w, v.r, spdyProtocols, nil)
	if err != nil {
		return nil, err
	}
	conn, err := newSPDYConn(guarded)
	if err != nil {
		return nil, fmt.Errorf("upgrade: %w", err)
	}
	ctx := v.ctx
	go panics.Run(ctx, "answer pings of session", conn.answerPings)
	go panics.Run(ctx, "read frames of session", func() { // which may outlive the session, as the connection may
		conn.serve(func(s *spdyStream) bool {
			select {
			case arrivals <- s:
				return true
			case <-complete:
				return false
			}
		})
	})
	version := len(spdyProtocols) - slices.Index(spdyProtocols, protocol)
	missing := map[string]bool{"error": true}
	for kind, wanted := range map[string]bool{"stdin": w.stdin, "stdout": w.stdout, "stderr": w.stderr, "resize": w.tty && version >= 3} {
		if wanted {
			missing[kind] = true
		}
	}
	late := time.NewTimer(creationTime)
	defer late.Stop()
	streams := make(map[string]*spdyStream)
	for len(missing) > 0 && err == nil {
		select {
		case s := <-arrivals:
			kind := s.headers.Get(streamType)
			v.atEnd(s.discard)
			if !missing[kind] {
				err = fmt.Errorf("client opened an unexpected stream %q", kind)
				break
			}
			delete(missing, kind)
			streams[kind] = s
		case <-v.ctx.Done():
			err = v.ctx.Err()
		case <-late.C:
			err = fmt.Errorf("client has not opened its streams within %s", creationTime)
		}
	}
	if err != nil {
		return nil, err
	}
	d := &dialogue{document: version >= 4}
	if s, ok := streams["stdin"]; ok {
		d.in = s
	}
	if s, ok := streams["resize"]; ok {
		d.resize = s
	}
	for kind, w := range map[string]*io.WriteCloser{"error": &d.status, "stdout": &d.out, "stderr": &d.err} {
		if s, ok := streams[kind]; ok {
			*w = s
			s.discard()
		}
	}
	return d, nil
}

// forwardSPDY serves port-forward on a connection that w can be upgraded to.
func (f *forwarder) forwardSPDY(w http.ResponseWriter, r *http.Request) {
	conn, _, err := upgradeSPDY(w, r, []string{forwardProtocol}, f.take, f.wires.abandon)
	if err != nil {
		return
	}
	select {
	case <-conn.CloseChan():
	case <-f.session.ctx.Done():
	}
	f.close()
}
