package stream

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/moby/spdystream"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/test/kit/wait"
)

// webFrame is a frame of a client, of which the payload's end may be missing.
func webFrame(first byte, size uint64, payload []byte) []byte {
	frame := []byte{first}
	switch {
	case size < 126:
		frame = append(frame, 0x80|byte(size))
	case size < 1<<16:
		frame = binary.BigEndian.AppendUint16(append(frame, 0x80|126), uint16(size))
	default:
		frame = binary.BigEndian.AppendUint64(append(frame, 0x80|127), size)
	}
	key := [4]byte{1, 2, 4, 200}
	frame = append(frame, key[:]...)
	for i, b := range payload {
		frame = append(frame, b^key[i%len(key)])
	}
	return frame
}

// message is what a frame has said.
type message struct {
	first   byte
	payload string
}

// unframed are the messages in what has come through a guard.
func unframed(t *testing.T, text []byte) (list []message) {
	t.Helper()
	for len(text) > 0 {
		first, size := text[0], uint64(text[1]&0x7f)
		text = text[2:]
		switch size {
		case 126:
			size, text = uint64(binary.BigEndian.Uint16(text)), text[2:]
		case 127:
			size, text = binary.BigEndian.Uint64(text), text[8:]
		}
		key, payload := text[:4], text[4:4+size]
		plain := make([]byte, size)
		for i := range plain {
			plain[i] = payload[i] ^ key[i%4]
		}
		list = append(list, message{first, string(plain)})
		text = text[4+size:]
	}
	return list
}

// What goes in comes out, in parts that all name their channel.
func TestFrameGuardPassesOn(t *testing.T) {
	t.Parallel()
	const text, ping = 0x81, 0x89
	for _, size := range []int{0, 1, 2, 125, 126, largestPart - 1, largestPart, largestPart + 1, largestPart + 2, 3*largestPart + 7, 1 << 20} {
		content := strings.Repeat("0123456789", size/10+1)
		payload := ("7" + content)[:size]
		in := bytes.Join([][]byte{webFrame(ping, 2, []byte("hi")), webFrame(text, uint64(size), []byte(payload)), webFrame(text, 2, []byte("8x"))}, nil)
		for how, r := range map[string]io.Reader{"at once": bytes.NewReader(in), "by bytes": iotest.OneByteReader(bytes.NewReader(in))} {
			out, err := io.ReadAll(&frameGuard{r: r})
			if err != nil {
				t.Fatal(err)
			}
			list := unframed(t, out)
			if first, last := list[0], list[len(list)-1]; first != (message{ping, "hi"}) || last != (message{text, "8x"}) {
				t.Errorf("%d bytes %s: between %v and %v", size, how, first, last)
			}
			got := ""
			parts := list[1 : len(list)-1]
			for i, part := range parts {
				if part.first != text || len(part.payload) > 1+largestPart {
					t.Errorf("%d bytes %s, part %d: %x, %d bytes", size, how, i, part.first, len(part.payload))
				}
				if i > 0 {
					if part.payload[0] != '7' || (len(got)-1)%4 != 0 {
						t.Errorf("%d bytes %s, part %d: for channel %q, after %d bytes", size, how, i, part.payload[0], len(got))
					}
					part.payload = part.payload[1:]
				}
				got += part.payload
			}
			if got != payload {
				t.Errorf("%d bytes %s: %d came through, or others", size, how, len(got))
			}
		}
	}
}

// The frames of one message are for one channel, also around control frames.
func TestFrameGuardNamesTheChannelOfFragments_kubernetes_client_python_2375(t *testing.T) {
	t.Parallel()
	const first, next, last, ping = 0x02, 0x00, 0x80, 0x89
	content := strings.Repeat("\x00\x01\x04\xff0123", largestPart)
	for _, sizes := range [][]int{{1, 1, 1}, {4095, 4096, 4097}, {2, 0, 3, 126}, {largestPart + 3, 3*largestPart + 2, 5}} {
		in, want, rest := []byte(nil), "", content
		for i, size := range sizes {
			payload, opcode := rest[:size], byte(next)
			want, rest = want+payload, rest[size:]
			if i == 0 {
				opcode, payload = first, "\x07"+payload
			}
			in = append(in, webFrame(opcode, uint64(len(payload)), []byte(payload))...)
			in = append(in, webFrame(ping, 2, []byte("hi"))...)
		}
		in = append(in, webFrame(last, 0, nil)...)
		in = append(in, webFrame(0x82, 2, []byte("\x08x"))...)
		out, err := io.ReadAll(&frameGuard{r: bytes.NewReader(in)})
		if err != nil {
			t.Fatal(err)
		}
		got, pings := "", 0
		list := unframed(t, out)
		for _, part := range list[:len(list)-1] {
			switch {
			case part == message{ping, "hi"}:
				pings++
			case part.first != 0x82 || !strings.HasPrefix(part.payload, "\x07"):
				t.Errorf("%v: a frame that begins with %#x, and says %.4q", sizes, part.first, part.payload)
			default:
				got += part.payload[1:]
			}
		}
		if end := list[len(list)-1]; got != want || pings != len(sizes) || end != (message{0x82, "\x08x"}) {
			t.Errorf("%v: %d bytes of %d came through, or others, %d pings, and then %v", sizes, len(got), len(want), pings, end)
		}
	}
	for what, in := range map[string][]byte{
		"a fragment of no message":         webFrame(next, 2, []byte("\x00x")),
		"a message within another":         append(webFrame(first, 2, []byte("\x00x")), webFrame(0x82, 2, []byte("\x00x"))...),
		"a fragment behind the last one":   slices.Concat(webFrame(first, 2, []byte("\x00x")), webFrame(last, 1, []byte("y")), webFrame(last, 1, []byte("z"))),
		"a fragment of an unknown channel": append(webFrame(first, 0, nil), webFrame(last, 1, []byte("y"))...),
	} {
		if _, err := io.ReadAll(&frameGuard{r: bytes.NewReader(in)}); !errors.Is(err, errFrame) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// A message in base64 may be divided anywhere, also within the four characters that make three bytes.
func TestFragmentsOfBase64(t *testing.T) {
	t.Parallel()
	const first, next, last, ping = 0x01, 0x00, 0x80, 0x89
	content := strings.Repeat("0123456789", largestPart/5) + "x"
	heard := make(chan string, 1)
	s := serveFake(t, &fakeEngine{exec: func(_ context.Context, _ oci.Command, client pod.Client) (int32, error) {
		text := make([]byte, 2*len(content))
		n, err := io.ReadFull(client.Stdin, text)
		heard <- string(text[:n])
		return 0, err
	}})
	for _, size := range []int{1, 2, 3, 5, 4097, largestPart + 1, 2*largestPart + 3} {
		address, err := s.Exec(t.Context(), &cri.ExecRequest{Cmd: []string{"x"}, Stdin: true, Stdout: true})
		if err != nil {
			t.Fatal(err)
		}
		c := openWebSocket(t, address, "unknown, base64.channel.k8s.io, v5.channel.k8s.io")
		frames := webFrame(first, 1, []byte("0"))
		for part := range slices.Chunk([]byte(base64.StdEncoding.EncodeToString([]byte(content))), size) {
			frames = append(frames, webFrame(next, uint64(len(part)), part)...)
			frames = append(frames, webFrame(ping, 2, []byte("hi"))...)
		}
		frames = append(frames, webFrame(last, 0, nil)...)
		frames = append(frames, webFrame(first|last, 1+4, []byte("0"+base64.StdEncoding.EncodeToString([]byte("end"))))...)
		go io.Copy(io.Discard, c)
		if _, err := c.Write(append(frames, webFrame(0x88, 0, nil)...)); err != nil {
			t.Fatal(err)
		}
		within(t, "what was sent in fragments", func() {
			if got := <-heard; got != content+"end" {
				t.Errorf("fragments of %d bytes: %d bytes of %d arrived, or others", size, len(got), len(content)+3)
			}
		})
		c.Close()
	}
}

// A client learns why its WebSocket is refused, and not that it lacks a permission.
func TestUnknownWebSocketProtocolsAreNamed_containerd_11136(t *testing.T) {
	t.Parallel()
	s := serveFake(t, &fakeEngine{})
	exec, err := s.Exec(t.Context(), &cri.ExecRequest{Cmd: []string{"x"}, Stdout: true})
	if err != nil {
		t.Fatal(err)
	}
	forward := func() string {
		address, err := s.PortForward(t.Context(), &cri.PortForwardRequest{PodSandboxId: "x", Port: []int32{80}})
		if err != nil {
			t.Fatal(err)
		}
		return address
	}
	for _, test := range []struct{ address, offer, known string }{
		{exec, "v5.channels.k8s.io, v9", "v5.channel.k8s.io"},
		{forward(), "v5.channel.k8s.io", "v4.channel.k8s.io"},
		{forward(), "SPDY/3.1+v9.k8s.io", "SPDY/3.1+" + forwardProtocol},
	} {
		r := webSocketRequest(t, test.address)
		r.Header.Set("Sec-WebSocket-Protocol", test.offer)
		answer, err := http.DefaultTransport.RoundTrip(r)
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(answer.Body)
		answer.Body.Close()
		words := strings.Split(test.offer, ", ")[0]
		if answer.StatusCode != http.StatusBadRequest || !strings.Contains(string(text), words) || !strings.Contains(string(text), test.known) {
			t.Errorf("%s: %s, %q", test.offer, answer.Status, text)
		}
	}
}

// What the library is to refuse, it gets as it is.
func TestFrameGuardLeavesOthersAlone(t *testing.T) {
	t.Parallel()
	for what, in := range map[string][]byte{
		"without mask":   append([]byte{0x82, 126, 0xff, 0xff}, make([]byte, 1<<16-1)...),
		"half a header":  {0x82, 0xff, 0, 0},
		"without length": {0x82},
		"without key":    {0x82, 0x81, 1, 2},
	} {
		out, _ := io.ReadAll(&frameGuard{r: bytes.NewReader(in)})
		if !bytes.HasPrefix(in, out) || len(in) > 100 && len(out) != len(in) {
			t.Errorf("%s: %d bytes of %d came through, or others", what, len(out), len(in))
		}
	}
}

// What the library would take for data whatever its size, and control frames that are
// larger than these may be, do not reach it.
func TestFrameGuardRefusesOtherFrames(t *testing.T) {
	t.Parallel()
	for first := range 256 {
		data, control := first&0x0f == 1 || first&0x0f == 2, slices.Contains([]int{8, 9, 10}, first&0x0f)
		for _, size := range []uint64{1, 125, 126, 1 << 17} {
			in := webFrame(byte(first), size, make([]byte, size))
			out, err := io.ReadAll(&frameGuard{r: bytes.NewReader(in)})
			if passes := data || control && size <= 125; passes != (err == nil) || !passes && len(out) > 0 {
				t.Errorf("a frame that begins with %#x, of %d bytes: %d bytes came through, %v", first, size, len(out), err)
			}
		}
	}
}

func FuzzFrameGuard(f *testing.F) {
	f.Add(webFrame(0x82, 5, []byte("12345")))
	f.Add(webFrame(0x82, 1<<62, []byte("the beginning")))
	f.Fuzz(func(t *testing.T, text []byte) {
		for _, base64 := range []bool{false, true} {
			n, err := io.Copy(io.Discard, io.LimitReader(&frameGuard{r: bytes.NewReader(text), base64: base64}, 1<<20))
			if parts := int64(len(text))/largestPart + 1; n > int64(len(text))*8/7+9*parts { // a fragment of one byte becomes eight
				t.Errorf("%d bytes made of %d (base64: %t, %v)", n, len(text), base64, err)
			}
		}
	})
}

// openWebSocket is a connection on which frames are exchanged from now on.
func openWebSocket(t *testing.T, address, protocol string) net.Conn {
	t.Helper()
	u, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("tcp", u.Host)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nOrigin: http://x\r\n"+
		"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Protocol: %s\r\n\r\n", u.Path, protocol)
	answer := ""
	for one := make([]byte, 1); !strings.HasSuffix(answer, "\r\n\r\n"); answer += string(one) {
		if _, err := io.ReadFull(c, one); err != nil {
			t.Fatalf("%v after %q", err, answer)
		}
	}
	if !strings.HasPrefix(answer, "HTTP/1.1 101 ") {
		t.Fatalf("answer %q", answer)
	}
	return c
}

// A large frame is not taken into memory: its beginning is there before its end is.
func TestLargeFramesArePassedOn(t *testing.T) {
	const announced, sent = 30 << 20, 4 * largestPart
	content := strings.Repeat("abcdefgh", sent/8)
	for _, protocol := range []string{"v4.channel.k8s.io", "v5.channel.k8s.io", "v4.base64.channel.k8s.io"} {
		heard := make(chan string, 1)
		s := serveFake(t, &fakeEngine{exec: func(_ context.Context, _ oci.Command, client pod.Client) (int32, error) {
			text := make([]byte, sent)
			_, err := io.ReadFull(client.Stdin, text)
			heard <- string(text)
			return 0, err
		}})
		address, err := s.Exec(t.Context(), &cri.ExecRequest{Cmd: []string{"x"}, Stdin: true, Stdout: true})
		if err != nil {
			t.Fatal(err)
		}
		c := openWebSocket(t, address, protocol)
		payload := append([]byte{0}, content...)
		if strings.Contains(protocol, "base64") {
			payload = append([]byte("0"), base64.StdEncoding.EncodeToString([]byte(content+content[:largestPart]+"x"))...)
		}
		if _, err := c.Write(webFrame(0x82, announced, payload)); err != nil {
			t.Fatal(err)
		}
		within(t, "the beginning of a frame", func() {
			if got := <-heard; got != content {
				t.Errorf("%s: %d bytes arrived, or others", protocol, len(got))
			}
		})
		c.Close()
	}
}

// Connections into pods are counted over all sessions, and given back.
func TestForwardsAreBoundedInSum(t *testing.T) {
	s := serveFake(t, &fakeEngine{forward: upper})
	others, own := party{"others", "y"}, party{target: "x"}
	s.forwards.places.count(others, maxForwardsInSum-1)
	forward := func(ports ...int32) string {
		address, err := s.PortForward(t.Context(), &cri.PortForwardRequest{PodSandboxId: "x", Port: ports})
		if err != nil {
			t.Fatal(err)
		}
		return address
	}
	conn := speakSPDY(t, forward(), forwardProtocol)
	half := func(id string) error {
		return openStream(t, conn, http.Header{"Streamtype": {"data"}, "Port": {"80"}, "Requestid": {id}}).WaitTimeout(patience)
	}
	if err := half("1"); err != nil {
		t.Error(err)
	}
	answer, err := http.DefaultTransport.RoundTrip(webSocketRequest(t, forward(80, 81)))
	if err != nil || answer.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("two connections where one is left: %v, %v", answer, err)
	} else {
		answer.Body.Close()
	}
	if err := half("2"); err == nil {
		t.Error("one too many is accepted")
	}
	conn.Close()
	wait.For(t, "the connections of the session to be given back", func() bool { return s.forwards.take(own, 1) })
	if refused := s.Counts().Refused[refusedForward]; refused < 2 {
		t.Errorf("%d refusals are counted", refused)
	}
}

func webSocketRequest(t *testing.T, address string) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, address, nil)
	if err != nil {
		t.Fatal(err)
	}
	for key, value := range map[string]string{
		"Connection": "Upgrade", "Upgrade": "websocket", "Origin": "http://x", "Sec-WebSocket-Version": "13",
		"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Protocol": "v4.channel.k8s.io",
	} {
		r.Header.Set(key, value)
	}
	return r
}

// Half of a connection keeps nothing of what its headers held.
func TestHalfConnectionsKeepNoHeaders(t *testing.T) {
	f := &forwarder{session: &session{server: &Server{forwards: &forwards{places: newShares(1)}}, conn: &conn{}}, pairs: map[string]*pair{}}
	ours, theirs := net.Pipe()
	server, err := spdystream.NewConnection(ours, true)
	if err != nil {
		t.Fatal(err)
	}
	taken := make(chan *spdystream.Stream)
	go server.Serve(func(s *spdystream.Stream) {
		if !f.take(s) {
			t.Error("half a connection is refused")
		}
		taken <- s
	})
	client, err := spdystream.NewConnection(theirs, false)
	if err != nil {
		t.Fatal(err)
	}
	go client.Serve(spdystream.NoOpStreamHandler)
	openStream(t, client, http.Header{"Streamtype": {"data"}, "Port": {"80"}, "Requestid": {"1"}, "Other": {strings.Repeat("x", largestField)}})
	if left := (<-taken).Headers(); len(left) != 0 {
		t.Errorf("%d headers are kept", len(left))
	}
	f.pairs["1"].late.Stop()
	client.Close()
	server.Close()
}
