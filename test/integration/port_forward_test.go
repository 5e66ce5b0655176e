package integration

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gorilla/websocket"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

func (p *pod) forwardURL(t *testing.T, ports ...int32) string {
	t.Helper()
	resp, err := p.w.Runtime().PortForward(t.Context(), &cri.PortForwardRequest{PodSandboxId: p.id, Port: ports})
	if err != nil {
		t.Fatalf("PortForward: %v", err)
	}
	return resp.Url
}

// tunnel opens a port-forward session, which is closed at the test's end.
func (p *pod) tunnel(t *testing.T) *kubelet.Tunnel {
	t.Helper()
	tunnel, err := p.w.spdy().Tunnel(t.Context(), p.forwardURL(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tunnel.Close() })
	return tunnel
}

func connect(t *testing.T, tunnel *kubelet.Tunnel, port int) *kubelet.Wire {
	t.Helper()
	wire, err := tunnel.Connect(port)
	if err != nil {
		t.Fatalf("connection to port %d: %v", port, err)
	}
	return wire
}

// all reads to the end.
func all(t *testing.T, what string, r io.Reader) string {
	t.Helper()
	type result struct {
		data []byte
		err  error
	}
	done := make(chan result, 1)
	go func() {
		data, err := io.ReadAll(r)
		done <- result{data, err}
	}()
	got := scene.Receive(t, what+" to end", done)
	if got.err != nil {
		t.Errorf("%s: %v after %d bytes", what, got.err, len(got.data))
	}
	return string(got.data)
}

// ends waits for the end of a stream, whatever it brings.
func ends(t *testing.T, what string, r io.Reader) {
	t.Helper()
	ended := make(chan struct{})
	go func() { io.Copy(io.Discard, r); close(ended) }()
	scene.Receive(t, what+" to end", ended)
}

// listeners are the servers in the pods of these tests.
const listeners = "tcp 127.0.0.1:7001 echo ; tcp [::1]:7002 echo ; tcp :7003 digest ; tcp 127.0.0.1:7004 noise 1000000 ; " +
	"tcp 127.0.0.1:7005 bye ; tcp 127.0.0.1:7006 flood ; tcp 127.0.0.1:7007 mute ; echo all-set ; sleep"

func (p *pod) listeners(t *testing.T) *container {
	t.Helper()
	c := p.start(t, listeners)
	c.says(t, "all-set")
	return c
}

func TestPortForward(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	c := p.listeners(t)
	tunnel := p.tunnel(t)
	for name, port := range map[string]int{"127.0.0.1": 7001, "::1": 7002} {
		wire := connect(t, tunnel, port)
		io.WriteString(wire, "hello over "+name)
		wire.Close()
		equal(t, "echo of "+name, all(t, "the answer of "+name, wire), "hello over "+name)
		equal(t, "error stream of "+name, all(t, "the error stream of "+name, wire.Errors), "")
	}
	t.Run("the client ends its half first", func(t *testing.T) {
		wire := connect(t, tunnel, 7003)
		if _, err := io.Copy(wire, noise(1_000_000)); err != nil {
			t.Fatal(err)
		}
		wire.Close()
		equal(t, "what the pod has read", all(t, "the answer", wire), noiseSum(1_000_000)+"\n")
	})
	t.Run("the server ends its half first", func(t *testing.T) {
		wire := connect(t, tunnel, 7005)
		equal(t, "what the pod said", all(t, "the answer", wire), "bye\n")
		if _, err := io.Copy(wire, noise(1_000_000)); err != nil {
			t.Errorf("sending after the server has ended its half: %v", err)
		}
		wire.Close()
		c.says(t, "after bye "+noiseSum(1_000_000)+" <nil>")
	})
	t.Run("much from the pod", func(t *testing.T) {
		wire := connect(t, tunnel, 7004)
		equal(t, "sum", sum(all(t, "the answer", wire)), noiseSum(1_000_000))
	})
	t.Run("much both ways", func(t *testing.T) {
		wire := connect(t, tunnel, 7001)
		go func() {
			io.Copy(wire, noise(1_000_000))
			wire.Close()
		}()
		equal(t, "sum of the echo", sum(all(t, "the echo", wire)), noiseSum(1_000_000))
	})
}

func TestPortForwardIntoAHostNetworkPod(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun", kubelet.HostNetwork)
	port := 17001 + slices.Index(handlers, "crun")
	c := p.start(t, fmt.Sprintf("tcp 127.0.0.1:%d echo ; echo all-set ; sleep", port), hostNetworkContainer)
	c.says(t, "all-set")
	wire := connect(t, p.tunnel(t), port)
	io.WriteString(wire, "hello")
	wire.Close()
	equal(t, "echo", all(t, "the echo", wire), "hello")
}

func TestPortForwardOfAPodWithoutContainers(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "runc")
	wire := connect(t, p.tunnel(t), 7999)
	if e := all(t, "the error stream", wire.Errors); !strings.Contains(e, "7999") {
		t.Errorf("the error is %q", e)
	}
}

func TestManyConnectionsOverOnePortForward(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	p.listeners(t)
	tunnel := p.tunnel(t)
	var group sync.WaitGroup
	for i := range 20 {
		group.Go(func() {
			wire, err := tunnel.Connect([]int{7001, 7002, 7003}[i%3])
			if err != nil {
				t.Errorf("connection %d: %v", i, err)
				return
			}
			defer tunnel.Forget(wire)
			mine := strings.Repeat(fmt.Sprintf("%03d.", i), 20_000)
			go func() {
				io.WriteString(wire, mine)
				wire.Close()
			}()
			want := mine
			if i%3 == 2 {
				want = sum(mine) + "\n"
			}
			if got, err := io.ReadAll(wire); err != nil || string(got) != want {
				t.Errorf("connection %d brought %d bytes that begin with %.20q, %v", i, len(got), got, err)
			}
		})
	}
	group.Wait()
}

// The error says what is wrong, and the session continues.
func TestPortForwardWithNobodyListening(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	p.listeners(t)
	tunnel := p.tunnel(t)
	for range 3 {
		wire := connect(t, tunnel, 7999)
		message := all(t, "the error stream", wire.Errors)
		if !strings.Contains(message, "7999") || !strings.Contains(message, "TCP") && !strings.Contains(message, "tcp") {
			t.Errorf("the error is %q, want one that names TCP port 7999", message)
		}
		ends(t, "the data stream of a refused connection", wire)
		tunnel.Forget(wire)
	}
	wire := connect(t, tunnel, 7001)
	io.WriteString(wire, "still here")
	wire.Close()
	equal(t, "echo after refused connections", all(t, "the echo", wire), "still here")
}

// kubectl port-forward itself, and many short connections through it.
func TestPortForwardOfKubectl(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	p.start(t, "serve 127.0.0.1:8080 through-the-tunnel")
	p.finish(t, "get http://127.0.0.1:8080/") // it is listening: kubectl gives up at the first refusal
	port, _, err := w.spdy().Forward(t.Context(), p.forwardURL(t), 8080)
	if err != nil {
		t.Fatal(err)
	}
	for range 5 {
		equal(t, "answer", w.get(t, fmt.Sprintf("127.0.0.1:%d", port), "/"), "through-the-tunnel\n")
	}
}

// The forward of kubectl outlives connections that either side resets, and a server that
// is started again.
func TestPortForwardOfKubectlOutlivesItsConnections_kubernetes_111825(t *testing.T) {
	t.Parallel()
	w := shared(t)
	w.eachTransport(t, func(t *testing.T, s kubelet.Streams, handler string) {
		p := w.run(t, handler)
		server := func() *container {
			c := p.start(t, "tcp 127.0.0.1:7001 reset ; tcp 127.0.0.1:7002 refuse ; tcp [::1]:7003 flood ; serve 127.0.0.1:8080 through-the-tunnel")
			p.finish(t, "get http://127.0.0.1:8080/")
			return c
		}
		c := server()
		var urls []string
		var ends []<-chan error
		for _, port := range []int{7001, 7002, 7003, 8080} {
			local, ended, err := s.Forward(t.Context(), p.forwardURL(t), port)
			if err != nil {
				t.Fatal(err)
			}
			urls, ends = append(urls, fmt.Sprintf("127.0.0.1:%d", local)), append(ends, ended)
		}
		works := func() { t.Helper(); equal(t, "answer", w.get(t, urls[3], "/"), "through-the-tunnel\n") }
		works()
		for _, address := range urls[:3] {
			for range 5 {
				must(t, w.Do(func() error {
					conn, err := net.Dial("tcp", address)
					if err != nil {
						return err
					}
					defer conn.Close()
					_ = conn.SetDeadline(time.Now().Add(wait.Limit))
					go func() { _, _ = conn.Write(make([]byte, 1<<20)) }()
					if address == urls[2] { // the server never ends
						_, _ = io.ReadFull(conn, make([]byte, 1<<20))
						return conn.(*net.TCPConn).SetLinger(0)
					}
					_, _ = io.Copy(io.Discard, conn)
					return nil
				}))
			}
		}
		c.stop(t, 0)
		must(t, w.Do(func() error {
			conn, err := net.Dial("tcp", urls[3])
			if err == nil {
				_, _ = io.Copy(io.Discard, conn)
				err = conn.Close()
			}
			return err
		}))
		server()
		works()
		for i, ended := range ends {
			select {
			case err := <-ended:
				t.Errorf("the forward to %s has ended: %v", urls[i], err)
			default:
			}
		}
	})
}

func TestPortForwardOverWebSocket(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	p.listeners(t)
	for _, protocol := range []string{"v4.channel.k8s.io", "v4.base64.channel.k8s.io", ""} {
		t.Run("protocol "+protocol, func(t *testing.T) {
			var offer []string
			if protocol != "" {
				offer = []string{protocol}
			}
			conn, line, err := w.websocket().RawWebSocket(t.Context(), p.forwardURL(t, 7001, 7002, 7999)+"?port=7001&port=7002&port=7999", offer...)
			if err != nil {
				t.Fatal(err)
			}
			defer line.Close()
			ws := &channels{conn: conn, base: strings.Contains(protocol, "base64")}
			for i, port := range []uint16{7001, 7002, 7999} {
				for _, channel := range []byte{byte(2 * i), byte(2*i + 1)} {
					want := string(binary.LittleEndian.AppendUint16(nil, port))
					equal(t, fmt.Sprintf("first message of channel %d", channel), fmt.Sprintf("%q", ws.take(t, channel, 2)), fmt.Sprintf("%q", want))
				}
			}
			for _, channel := range []byte{0, 2} {
				for i := range 50 {
					ws.send(t, channel, fmt.Sprintf("message %02d on %d.", i, channel))
				}
				var want strings.Builder
				for i := range 50 {
					fmt.Fprintf(&want, "message %02d on %d.", i, channel)
				}
				equal(t, fmt.Sprintf("echo on channel %d", channel), ws.wait(t, channel, want.Len()), want.String())
			}
			if e := ws.wait(t, 5, len("7999")); !strings.Contains(e, "7999") {
				t.Errorf("the error channel of port 7999 says %q", e)
			}
		})
	}
}

// channels reads and writes the channels of a WebSocket.
type channels struct {
	conn *websocket.Conn
	base bool
	got  map[byte][]byte
}

func (c *channels) send(t *testing.T, channel byte, text string) {
	t.Helper()
	kind, frame := encodeChannel(c.base, channel, text)
	if err := c.conn.WriteMessage(kind, frame); err != nil {
		t.Fatalf("send on channel %d: %v", channel, err)
	}
}

// take reads exactly n bytes from a channel.
func (c *channels) take(t *testing.T, channel byte, n int) string {
	t.Helper()
	all := c.wait(t, channel, n)
	c.got[channel] = []byte(all[n:])
	return all[:n]
}

// wait reads everything that has come on a channel, at least n bytes.
func (c *channels) wait(t *testing.T, channel byte, n int) string {
	t.Helper()
	if c.got == nil {
		c.got = map[byte][]byte{}
	}
	c.conn.SetReadDeadline(time.Now().Add(wait.Limit))
	for len(c.got[channel]) < n {
		_, data, err := c.conn.ReadMessage()
		if err != nil {
			t.Fatalf("channel %d: %v; so far: %q", channel, err, c.got)
		}
		from, text, err := decodeChannel(c.base, data)
		if err != nil {
			t.Fatal(err)
		}
		c.got[from] = append(c.got[from], text...)
	}
	defer delete(c.got, channel)
	return string(c.got[channel])
}

func TestPortForwardEndsWithItsPod(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	p.listeners(t)
	tunnel := p.tunnel(t)
	wire := connect(t, tunnel, 7006)
	if _, err := io.ReadFull(wire, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	p.stop(t)
	ends(t, "a connection to a stopped pod", wire)
}

// A connection that the client abandons delays neither the others nor the
// session's end.
func TestPortForwardWhoseClientLeaves(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	c := p.start(t, "tcp 127.0.0.1:7005 bye ; tcp 127.0.0.1:7001 echo ; echo all-set ; sleep")
	c.says(t, "all-set")
	tunnel := p.tunnel(t)
	wire := connect(t, tunnel, 7005)
	equal(t, "what the pod said", all(t, "the answer", wire), "bye\n")
	io.WriteString(wire, "and then nothing")
	other := connect(t, tunnel, 7001)
	io.WriteString(other, "meanwhile")
	other.Close()
	equal(t, "echo beside an idle connection", all(t, "the echo", other), "meanwhile")
	tunnel.Close()
	c.says(t, "after bye "+sum("and then nothing"))
}

func TestPortForwardErrors(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p, stopped := w.run(t, "crun"), w.run(t, "crun")
	stopped.stop(t)
	for name, c := range map[string]struct {
		id   string
		port []int32
		code codes.Code
		word string
	}{
		"unknown":        {"no-such-pod", nil, codes.NotFound, "no-such-pod"},
		"no id":          {"", nil, codes.InvalidArgument, ""},
		"not ready":      {stopped.id, nil, codes.FailedPrecondition, stopped.id[:12]},
		"port 0":         {p.id, []int32{80, 0}, codes.InvalidArgument, "0"},
		"port too large": {p.id, []int32{65536}, codes.InvalidArgument, "65536"},
		"port negative":  {p.id, []int32{-1}, codes.InvalidArgument, "-1"},
	} {
		resp, err := w.Runtime().PortForward(t.Context(), &cri.PortForwardRequest{PodSandboxId: c.id, Port: c.port})
		if err == nil {
			t.Errorf("%s: the URL is %s, want %v", name, resp.Url, c.code)
			continue
		}
		t.Run(name, func(t *testing.T) { wantCode(t, err, c.code, c.word) })
	}
}
