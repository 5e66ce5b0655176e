package stream

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/moby/spdystream"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
)

// The subprotocols of exec and attach over SPDY, the best first. From v3 on a
// terminal has a stream for its sizes, from v4 on the status is a document. (The
// first one's known defects, kubernetes#13394 and #13395, are not repeated.)
var spdyProtocols = []string{"v5.channel.k8s.io", "v4.channel.k8s.io", "v3.channel.k8s.io", "v2.channel.k8s.io", "channel.k8s.io"}

// streamType is the header that says what a stream of a client is for.
const streamType = "streamType"

// arrival is a stream that the client has opened. Once it is registered it will be
// closed together with its connection.
type arrival struct {
	httpstream.Stream
	registered <-chan struct{}
}

// confirm tells the client that its stream is open. The library does that too, but
// not whether it could; and to write on a stream that has not been confirmed waits
// for ever.
func confirm(s httpstream.Stream) error {
	stream, ok := s.(*spdystream.Stream)
	if !ok {
		return fmt.Errorf("stream is a %T", s)
	}
	return stream.SendReply(http.Header{}, false)
}

// spdyStreams waits for a client to open the streams that are wanted.
func (v *session) spdyStreams(w wanted) (*dialogue, io.Closer, error) {
	protocol, err := httpstream.Handshake(v.r, v.w, spdyProtocols)
	if err != nil {
		return nil, nil, err // it has answered
	}
	document := protocol == spdyProtocols[0] || protocol == spdyProtocols[1]
	missing := map[string]bool{"error": true}
	for kind, wanted := range map[string]bool{
		"stdin": w.stdin, "stdout": w.stdout, "stderr": w.stderr,
		"resize": w.tty && (document || protocol == spdyProtocols[2]),
	} {
		if wanted {
			missing[kind] = true
		}
	}
	arrivals, complete := make(chan arrival), make(chan struct{})
	defer close(complete)
	conn := spdy.NewResponseUpgrader().UpgradeResponse(v.w, v.r, func(s httpstream.Stream, registered <-chan struct{}) error {
		if err := confirm(s); err != nil {
			return err
		}
		select {
		case arrivals <- arrival{s, registered}:
			return nil
		case <-complete:
			return errors.New("the session has all its streams")
		}
	})
	if conn == nil {
		return nil, nil, errors.New("no upgrade to SPDY")
	}
	conn.SetIdleTimeout(v.server.cfg.IdleTimeout)
	streams := make(map[string]arrival)
	late := time.NewTimer(creationTime)
	defer late.Stop()
	for len(missing) > 0 && err == nil {
		select {
		case s := <-arrivals:
			kind := s.Headers().Get(streamType)
			if !missing[kind] {
				err = fmt.Errorf("client opens a stream %q that nobody wants", kind)
			}
			delete(missing, kind)
			streams[kind] = s
		case <-v.ctx.Done():
			err = v.ctx.Err()
		case <-late.C:
			err = fmt.Errorf("client has not opened its streams within %s", creationTime)
		}
	}
	for _, s := range streams {
		select {
		case <-s.registered:
		case <-v.ctx.Done():
			err = v.ctx.Err()
		}
	}
	if err != nil {
		_ = conn.Close()
		return nil, nil, err
	}
	d := &dialogue{status: streams["error"], document: document}
	if s, ok := streams["stdin"]; ok {
		d.in = s
	}
	if s, ok := streams["stdout"]; ok {
		d.out = s
	}
	if s, ok := streams["stderr"]; ok {
		d.err = s
	}
	if s, ok := streams["resize"]; ok {
		d.resize = s
	}
	return d, conn, nil
}

// forwardSPDY serves port-forward on a connection that w can be upgraded to.
func (f *forwarder) forwardSPDY(w http.ResponseWriter, r *http.Request) {
	if _, err := httpstream.Handshake(r, w, []string{forwardProtocol}); err != nil {
		return // it has answered
	}
	conn := spdy.NewResponseUpgrader().UpgradeResponse(w, r, f.arrive)
	if conn == nil {
		return
	}
	conn.SetIdleTimeout(f.session.server.cfg.IdleTimeout)
	select {
	case <-conn.CloseChan():
	case <-f.session.ctx.Done():
	}
	_ = f.session.conn.Close() // first: to reset streams is to write, and nobody may read
	_ = conn.Close()
}
