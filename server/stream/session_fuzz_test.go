package stream

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/crius-run/crius/oci/stdio"
)

// A client may send any sizes of its terminal at any speed: the newest one
// arrives, and nonsense ends the stream of sizes and nothing else.
func FuzzSizes(f *testing.F) {
	f.Add([]byte(`{"Width":80,"Height":24}{"Width":81,"Height":24}`))
	f.Add([]byte(`{"Width":-1}`))
	f.Add([]byte(`{"Width":65536} {"Width":1}`))
	f.Add([]byte(`[]null"x"{"width":3,"height":4,"other":{}}`))
	f.Add(append(bytes.Repeat([]byte(" "), 2<<10), `{"Width":1}`...))
	f.Fuzz(func(t *testing.T, text []byte) {
		var want []stdio.Size
		for decoder := json.NewDecoder(bytes.NewReader(text)); ; {
			var size stdio.Size
			if decoder.Decode(&size) != nil {
				break
			}
			want = append(want, size)
		}
		v := &session{ctx: t.Context()}
		sizes := v.sizes(iotest.OneByteReader(bytes.NewReader(text)))
		v.work.Wait() // nobody has looked meanwhile
		var got []stdio.Size
		for size := range sizes {
			got = append(got, size)
		}
		if len(got) > 2 || len(got) > len(want) {
			t.Fatalf("%q has the sizes %v, want the last two of %v", text, got, want)
		}
		if len(text) < 1<<10 && !slices.Equal(got, want[max(0, len(want)-2):]) {
			t.Errorf("%q has the sizes %v, want the last two of %v", text, got, want)
		}
	})
}

// A stream that is forwarded names a port, and belongs to one connection: the
// halves of a pair find each other, with and without a name for it.
func FuzzForwardHeaders(f *testing.F) {
	f.Add("data", "80", "", uint32(3))
	f.Add("error", "65535", "7", uint32(1))
	f.Add("data", "65536", "x", uint32(1))
	f.Add("error", "-1", "", uint32(1<<31-1))
	f.Add("resize", "0080", "\xff", uint32(0))
	f.Fuzz(func(t *testing.T, kind, port, request string, number uint32) {
		h := http.Header{}
		h.Set(streamType, kind)
		h.Set("Port", port)
		h.Set("RequestID", request)
		gotKind, id, gotPort, ok := offered(h, number)
		n, err := strconv.ParseUint(port, 10, 16)
		if want := (kind == "data" || kind == "error") && err == nil && n > 0; ok != want {
			t.Fatalf("stream %q to port %q is taken: %v", kind, port, ok)
		}
		if !ok {
			return
		}
		if gotKind != kind || uint64(gotPort) != n || id == "" || request != "" && id != request {
			t.Errorf("%q, %q, %q became %q, %q, %d", kind, port, request, gotKind, id, gotPort)
		}
		other, next := "data", number+2
		if kind == "data" {
			other, next = "error", number-2
		}
		h.Set(streamType, other)
		if _, same, _, _ := offered(h, next); same != id {
			t.Errorf("stream %d is of connection %q, stream %d of %q", number, id, next, same)
		}
	})
}

// hijacked is an answer whose connection is read from text and goes nowhere.
type hijacked struct {
	*httptest.ResponseRecorder
	text io.Reader
}

func (h hijacked) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn := silent{said{Reader: h.text}}
	return conn, bufio.NewReadWriter(bufio.NewReader(conn), bufio.NewWriter(conn)), nil
}

// silent is a client that says something and does not care about answers.
type silent struct{ said }

func (silent) Write(p []byte) (int, error)      { return len(p), nil }
func (silent) Close() error                     { return nil }
func (silent) SetDeadline(time.Time) error      { return nil }
func (silent) SetReadDeadline(time.Time) error  { return nil }
func (silent) SetWriteDeadline(time.Time) error { return nil }
func (silent) RemoteAddr() net.Addr             { return &net.TCPAddr{} }

// What a client sends over a WebSocket ends up on the channel that it names, in
// its order, whatever frames come before and after.
func FuzzWebSocketChannels(f *testing.F) {
	f.Add(uint8(1), []byte("hello"), byte(0), []byte(`{"Width":80}`), byte(4), []byte(nil))
	f.Add(uint8(4), []byte("x"), byte(1), []byte("y"), byte(255), webFrame(0x82, 1<<62, []byte("\x00end")))
	f.Add(uint8(5), []byte(""), byte(0), []byte("\x00"), byte(255), webFrame(0x88, 0, nil))
	f.Add(uint8(2), bytes.Repeat([]byte("a"), 3*largestPart), byte(0), []byte("="), byte(9), []byte{0x82})
	f.Fuzz(func(t *testing.T, protocol uint8, first []byte, channel byte, second []byte, other byte, rest []byte) {
		name := webSocketProtocols[int(protocol)%len(webSocketProtocols)]
		encode := func(channel byte, payload []byte) []byte {
			message := append([]byte{channel}, payload...)
			if strings.Contains(name, "base64") {
				message = append([]byte{channel + '0'}, base64.StdEncoding.EncodeToString(payload)...)
			}
			return webFrame(0x82, uint64(len(message)), message)
		}
		text := append(encode(channel, first), encode(other, second)...)
		text = append(text, webFrame(0x88, 0, nil)...)
		stdin := webSocketInput(t, name, append(text, rest...))
		var want []byte
		if channel == 0 {
			want = append(want, first...)
		}
		if closes := name == "v5.channel.k8s.io" && (channel == 255 || other == 255); closes {
			if len(stdin) > len(first)+len(second) {
				t.Errorf("%s: %q, %q: standard input is %q", name, first, second, stdin)
			}
			return
		}
		if other == 0 {
			want = append(want, second...)
		}
		if !bytes.Equal(stdin, want) {
			t.Errorf("%s: %q on %d, %q on %d: standard input is %q", name, first, channel, second, other, stdin)
		}
	})
}

// Any bytes in the place of frames end the session with no more input than there
// were bytes.
func FuzzWebSocketFrames(f *testing.F) {
	f.Add(uint8(0), webFrame(0x82, 4, []byte("\x00abc")))
	f.Add(uint8(5), webFrame(0x82, 2, []byte("\xff\x01")))
	f.Add(uint8(5), webFrame(0x82, 2, []byte("\xff\x03")))
	f.Add(uint8(4), webFrame(0x81, 4, []byte("0===")))
	f.Add(uint8(1), webFrame(0x02, 1<<40, []byte{0}))
	f.Fuzz(func(t *testing.T, protocol uint8, text []byte) {
		name := webSocketProtocols[int(protocol)%len(webSocketProtocols)]
		if stdin := webSocketInput(t, name, text); len(stdin) > len(text) {
			t.Errorf("%s: %q became the input %q", name, text, stdin)
		}
	})
}

// webSocketInput is what comes of a client's bytes on standard input.
func webSocketInput(t *testing.T, protocol string, text []byte) []byte {
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://x/exec/y", nil)
	for key, value := range map[string]string{
		"Connection": "Upgrade", "Upgrade": "websocket", "Origin": "http://x",
		"Sec-Websocket-Version": "13", "Sec-Websocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==", "Sec-Websocket-Protocol": protocol,
	} {
		if value != "" {
			r.Header.Set(key, value)
		}
	}
	var v *session
	var d *dialogue
	var err error
	for range 100 { // the end of the bytes may be noticed before the session is ready
		v = &session{ctx: t.Context(), r: r, w: hijacked{httptest.NewRecorder(), bytes.NewReader(text)}}
		if d, err = v.webSocketStreams(wanted{stdin: true, stdout: true, tty: true}); err == nil {
			break
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	v.do(func() { _, _ = io.Copy(io.Discard, d.resize) })
	stdin, _ := io.ReadAll(d.in)
	v.work.Wait()
	return stdin
}
