package stream

import (
	"bufio"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"

	"golang.org/x/net/websocket"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/wsstream"
)

// The subprotocols of exec and attach over WebSockets. In those with base64 the
// frames are text; from v4 on the status is a document; in v5 a client can end
// its input and go on listening.
var webSocketProtocols = []string{"", "channel.k8s.io", "base64.channel.k8s.io", "v4.channel.k8s.io", "v4.base64.channel.k8s.io", "v5.channel.k8s.io"}

// channelsOver opens the channels of a WebSocket that speaks one of the protocols: the first that its
// client offers.
func (v *session) channelsOver(protocols []string, channels []wsstream.ChannelType) (over *wsstream.Conn, protocol string, c []io.ReadWriteCloser, err error) {
	isBase64 := func(name string) bool { return strings.Contains(name, "base64") }
	offer := make(map[string]wsstream.ChannelProtocolConfig)
	for _, name := range protocols {
		offer[name] = wsstream.ChannelProtocolConfig{Binary: !isBase64(name), Channels: channels}
	}
	offered := v.offered()
	if i := slices.IndexFunc(offered, func(name string) bool { return offer[name].Channels != nil }); i >= 0 { // as the library chooses
		protocol = offered[i]
	} else if len(offered) > 0 {
		return nil, "", nil, v.refuseProtocols(protocols)
	}
	over = wsstream.NewConn(offer)
	protocol, c, err = over.Open(inParts{v.w, isBase64(protocol)}, v.r)
	return over, protocol, c, err
}

// offered returns the subprotocols that the client of a WebSocket offers.
func (v *session) offered() (names []string) {
	for name := range strings.SplitSeq(v.r.Header.Get(wsstream.WebSocketProtocolHeader), ",") {
		if name = strings.TrimSpace(name); name != "" {
			names = append(names, name)
		}
	}
	return names
}

// refuseProtocols says which subprotocols there are. The library would answer 403 without a word, as if
// the client lacked permissions.
func (v *session) refuseProtocols(known []string) error {
	known = slices.DeleteFunc(slices.Clone(known), func(name string) bool { return name == "" })
	err := fmt.Errorf("unsupported WebSocket subprotocols %q: offer one of %s", v.offered(), strings.Join(known, ", "))
	http.Error(v.w, err.Error(), http.StatusBadRequest)
	return err
}

// webSocketStreams opens the channels of a WebSocket.
func (v *session) webSocketStreams(w wanted) (*dialogue, error) {
	const stdin, stdout, stderr, status, resize = 0, 1, 2, 3, 4
	channels := make([]wsstream.ChannelType, resize+1) // ignored, if not
	for _, c := range []struct {
		number int
		wanted bool
		kind   wsstream.ChannelType
	}{
		{stdin, w.stdin, wsstream.ReadChannel},
		{stdout, w.stdout, wsstream.WriteChannel},
		{stderr, w.stderr, wsstream.WriteChannel},
		{status, true, wsstream.WriteChannel},
		{resize, w.tty, wsstream.ReadChannel},
	} {
		if c.wanted {
			channels[c.number] = c.kind
		}
	}
	ws, protocol, c, err := v.channelsOver(webSocketProtocols, channels)
	if err != nil {
		return nil, err
	}
	d := &dialogue{status: c[status], document: strings.HasPrefix(protocol, "v"), over: ws}
	greeting := c[status]
	if w.stdin {
		d.in = c[stdin]
	}
	if w.tty {
		d.resize = c[resize]
	}
	if w.stderr {
		d.err, greeting = c[stderr], c[stderr]
	}
	if w.stdout {
		d.out, greeting = c[stdout], c[stdout]
	}
	_, _ = greeting.Write(nil) // by which clients know that the session has begun
	return d, nil
}

// tunnel serves port-forward to clients that speak SPDY inside a WebSocket.
func (f *forwarder) tunnel() {
	const tunnelled = "SPDY/3.1+" + forwardProtocol
	if !slices.Contains(f.session.offered(), tunnelled) {
		slog.DebugContext(f.session.ctx, "WebSocket upgrade failed", "err", f.session.refuseProtocols([]string{tunnelled}))
		return
	}
	server := websocket.Server{
		Handshake: func(config *websocket.Config, _ *http.Request) error {
			config.Protocol = []string{tunnelled}
			return nil
		},
		Handler: func(ws *websocket.Conn) {
			ws.PayloadType = websocket.BinaryFrame
			inner := f.session.r.Clone(f.session.ctx)
			inner.Header = http.Header{
				httpstream.HeaderConnection: {httpstream.HeaderUpgrade},
				httpstream.HeaderUpgrade:    {spdy31},
			}
			inner.Header.Set(httpstream.HeaderProtocolVersion, forwardProtocol)
			f.forwardSPDY(upgraded{ws, make(http.Header)}, inner)
		},
	}
	server.ServeHTTP(f.session.w, f.session.r)
}

// upgraded is the answer to a request whose connection has been upgraded
// already: what is written to it before Hijack goes nowhere.
type upgraded struct {
	conn   net.Conn
	header http.Header
}

func (u upgraded) Header() http.Header         { return u.header }
func (u upgraded) Write(p []byte) (int, error) { return len(p), nil }
func (u upgraded) WriteHeader(int)             {}

func (u upgraded) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	return u.conn, bufio.NewReadWriter(bufio.NewReader(u.conn), bufio.NewWriter(u.conn)), nil
}
