package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sys/unix"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/klog/v2"
	"k8s.io/streaming/pkg/httpstream"

	"github.com/crius-run/crius/internal/fault"
	podsession "github.com/crius-run/crius/pod/session"
	"github.com/crius-run/crius/test/kit/wait"
)

// dialers are those of kubectl: since 1.31 over WebSocket, before over SPDY.
var dialers = map[string]func(*url.URL) (httpstream.Dialer, error){
	"SPDY": func(u *url.URL) (httpstream.Dialer, error) {
		transport, upgrader, err := spdy.RoundTripperFor(&rest.Config{})
		if err != nil {
			return nil, err
		}
		return spdy.NewDialerForStreaming(upgrader, &http.Client{Transport: transport}, http.MethodPost, u), nil
	},
	"WebSocket": func(u *url.URL) (httpstream.Dialer, error) {
		return portforward.NewSPDYOverWebsocketDialerForStreaming(u, &rest.Config{})
	},
}

// kubectl is kubectl port-forward.
type kubectl struct {
	local []portforward.ForwardedPort
	ended chan error
}

func forwardPorts(t *testing.T, s *Server, transport string, ports ...int) *kubectl {
	t.Helper()
	address, err := s.PortForward(t.Context(), &cri.PortForwardRequest{PodSandboxId: "x"})
	if err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	dialer, err := dialers[transport](u)
	if err != nil {
		t.Fatal(err)
	}
	var pairs []string
	for _, port := range ports {
		pairs = append(pairs, fmt.Sprintf("0:%d", port))
	}
	ctx, leave := context.WithCancel(klog.NewContext(t.Context(), logr.Discard()))
	ready := make(chan struct{})
	f, err := portforward.NewOnAddressesForStreamingWithContext(ctx, dialer, []string{"127.0.0.1"}, pairs, ready, io.Discard, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	k := &kubectl{ended: make(chan error, 1)}
	left := make(chan struct{})
	go func() {
		defer close(left)
		k.ended <- f.ForwardPorts()
	}()
	t.Cleanup(func() { leave(); <-left })
	select {
	case <-ready:
	case err := <-k.ended:
		t.Fatal(err)
	}
	if k.local, err = f.GetPorts(); err != nil {
		t.Fatal(err)
	}
	return k
}

func (k *kubectl) dial(t *testing.T, i int) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", k.local[i].Local))
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(wait.Limit))
	t.Cleanup(func() { c.Close() })
	return c.(*net.TCPConn)
}

// works makes a connection to an echo.
func (k *kubectl) works(t *testing.T, i int) {
	t.Helper()
	c := k.dial(t, i)
	_, _ = io.WriteString(c, "hello")
	_ = c.CloseWrite()
	got, err := io.ReadAll(c)
	if string(got) != "hello" {
		t.Fatalf("another connection: %q, %v", got, err)
	}
	select {
	case err := <-k.ended:
		t.Fatalf("the forward has ended: %v", err)
	default:
	}
}

// listen serves connections until the test's end, and returns the port.
func listen(t *testing.T, address string, serve func(*net.TCPConn)) int {
	t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	var work sync.WaitGroup
	t.Cleanup(func() { l.Close(); work.Wait() })
	work.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			work.Go(func() { serve(c.(*net.TCPConn)); c.Close() })
		}
	})
	return l.Addr().(*net.TCPAddr).Port
}

func echoes(c *net.TCPConn) { _, _ = io.Copy(c, c); _ = c.CloseWrite() }

// intoThisPod is an engine whose pod is the node.
func intoThisPod(ctx context.Context, port uint16, stream io.ReadWriteCloser) error {
	var conn net.Conn
	err := fault.Unavailable
	for _, ip := range []string{"127.0.0.1", "::1"} {
		conn, err = new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(ip, fmt.Sprint(port)))
		if err == nil || errors.Is(err, unix.ECONNRESET) {
			break
		}
	}
	if err != nil {
		return err
	}
	defer conn.Close()
	return podsession.Forward(ctx, conn.(*net.TCPConn), stream)
}

// A forward outlives its connections, however they end: kubectl takes any text on the
// error stream of one for the end of all.
func TestForwardOutlivesItsConnections_kubernetes_111825_kubernetes_74551(t *testing.T) {
	const answer = "HTTP/1.1 413 Content Too Large\r\nConnection: close\r\n\r\n"
	ends := map[string]struct {
		server func(*net.TCPConn)
		client func(*testing.T, *net.TCPConn)
	}{
		"reset": {func(c *net.TCPConn) {
			_, _ = c.Read(make([]byte, 1))
			_ = c.SetLinger(0)
		}, func(_ *testing.T, c *net.TCPConn) {
			_, _ = io.WriteString(c, "query")
			_, _ = io.Copy(io.Discard, c)
		}},
		"reset at once": {func(c *net.TCPConn) { _ = c.SetLinger(0) }, func(_ *testing.T, c *net.TCPConn) {
			_, _ = io.Copy(io.Discard, c)
		}},
		"closed with unread data": {func(c *net.TCPConn) { _, _ = c.Read(make([]byte, 1)) }, func(_ *testing.T, c *net.TCPConn) {
			_, _ = io.WriteString(c, "a query of which one byte is read")
			_, _ = io.Copy(io.Discard, c)
		}},
		"early answer": {func(c *net.TCPConn) {
			_, _ = c.Read(make([]byte, 1))
			_, _ = io.WriteString(c, answer)
		}, func(t *testing.T, c *net.TCPConn) {
			go func() { _, _ = c.Write(make([]byte, 4<<20)) }()
			got := make([]byte, len(answer))
			if n, err := io.ReadFull(c, got); string(got[:n]) != answer {
				t.Errorf("the client reads %q, %v", got[:n], err)
			}
		}},
		"client resets": {func(c *net.TCPConn) { _, _ = io.Copy(c, endless{}) }, func(_ *testing.T, c *net.TCPConn) {
			_, _ = io.ReadFull(c, make([]byte, 100_000))
			_ = c.SetLinger(0)
			_ = c.Close()
		}},
		"client resets a silent one": {func(c *net.TCPConn) { _, _ = io.Copy(io.Discard, c) }, func(_ *testing.T, c *net.TCPConn) {
			_, _ = io.WriteString(c, "query")
			_ = c.SetLinger(0)
			_ = c.Close()
		}},
	}
	for transport := range dialers {
		s := serveUncounted(t, Config{}, &fakeEngine{forward: intoThisPod})
		good, six := listen(t, "127.0.0.1:0", echoes), listen(t, fmt.Sprintf("[::1]:%d", closedPort(t)), echoes)
		for name, end := range ends {
			t.Run(transport+"/"+name, func(t *testing.T) {
				k := forwardPorts(t, s, transport, good, listen(t, "127.0.0.1:0", end.server), six)
				k.works(t, 0)
				var group sync.WaitGroup
				for range 20 {
					c := k.dial(t, 1)
					group.Go(func() { end.client(t, c); c.Close() })
				}
				group.Wait()
				k.works(t, 0)
				k.works(t, 2)
			})
		}
		wait.For(t, "the connections to end", func() bool { return forwardsOf(s) == 0 })
	}
}

func forwardsOf(s *Server) int {
	s.forwards.mu.Lock()
	defer s.forwards.mu.Unlock()
	return s.forwards.places.sum
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

// closedPort returns a port of 127.0.0.1 that refuses connections until the test ends.
func closedPort(t *testing.T) int {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	bound, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	return bound.(*unix.SockaddrInet4).Port
}

// A port that resets the first connection of all before it stands is not a wrong port.
func TestForwardOutlivesAnEarlyReset(t *testing.T) {
	for transport := range dialers {
		t.Run(transport, func(t *testing.T) {
			var stood atomic.Bool
			s := serveUncounted(t, Config{}, &fakeEngine{forward: func(ctx context.Context, port uint16, stream io.ReadWriteCloser) error {
				if !stood.Swap(true) {
					return fmt.Errorf("connect to TCP port %d: %w", port, unix.ECONNRESET)
				}
				return intoThisPod(ctx, port, stream)
			}})
			k := forwardPorts(t, s, transport, listen(t, "127.0.0.1:0", echoes))
			_, _ = io.Copy(io.Discard, k.dial(t, 0))
			k.works(t, 0)
		})
	}
}

// A server that restarts refuses connections for a while. The first refusal of all is
// told, which ends the forward: nobody may ever listen there.
func TestForwardOutlivesARestartOfTheServer(t *testing.T) {
	for transport := range dialers {
		t.Run(transport, func(t *testing.T) {
			var down atomic.Bool
			s := serveUncounted(t, Config{}, &fakeEngine{forward: func(ctx context.Context, port uint16, stream io.ReadWriteCloser) error {
				if down.Load() {
					return fmt.Errorf("nothing listens on TCP port %d: %w", port, fault.Unavailable)
				}
				return intoThisPod(ctx, port, stream)
			}})
			k := forwardPorts(t, s, transport, listen(t, "127.0.0.1:0", echoes))
			for range 3 {
				k.works(t, 0)
				down.Store(true)
				_, _ = io.Copy(io.Discard, k.dial(t, 0))
				down.Store(false)
			}
			k.works(t, 0)
		})
	}
}

// Hundreds of connections at once are served, each with its own bytes.
func TestForwardOfHundredsAtOnce(t *testing.T) {
	const connections = 150
	for transport := range dialers {
		t.Run(transport, func(t *testing.T) {
			s := serveUncounted(t, Config{}, &fakeEngine{forward: intoThisPod})
			k := forwardPorts(t, s, transport, listen(t, "127.0.0.1:0", echoes))
			var group sync.WaitGroup
			for i := range connections {
				c := k.dial(t, 0)
				group.Go(func() {
					text := strings.Repeat(fmt.Sprintf("%04d", i), 5000)
					go func() { _, _ = io.WriteString(c, text); _ = c.CloseWrite() }()
					if got, err := io.ReadAll(c); string(got) != text {
						t.Errorf("connection %d brings %d bytes, %v", i, len(got), err)
					}
					c.Close()
				})
			}
			group.Wait()
			k.works(t, 0)
		})
	}
}

// Only what concerns the forward as a whole ends it: a pod that has ended, or a first
// connection that cannot be made.
func TestForwardEndsWithItsPod(t *testing.T) {
	for transport := range dialers {
		t.Run(transport, func(t *testing.T) {
			ended := make(chan struct{})
			s := serveUncounted(t, Config{}, &fakeEngine{forward: func(ctx context.Context, port uint16, stream io.ReadWriteCloser) error {
				select {
				case <-ended:
					return fmt.Errorf("the pod is not ready: %w", fault.Precondition)
				default:
					return intoThisPod(ctx, port, stream)
				}
			}})
			lost := func(k *kubectl) {
				t.Helper()
				_, _ = io.Copy(io.Discard, k.dial(t, 0))
				if err := <-k.ended; !errors.Is(err, portforward.ErrLostConnectionToPod) {
					t.Errorf("ended with %v", err)
				}
			}
			lost(forwardPorts(t, s, transport, closedPort(t)))
			k := forwardPorts(t, s, transport, listen(t, "127.0.0.1:0", echoes))
			k.works(t, 0)
			close(ended)
			lost(k)
		})
	}
}

// A client that resets a connection frees the pod's end of it, although neither side of
// that has anything to say. (kubectl may end its half before, and says nothing then.)
func TestForwardResetByTheClientEndsInThePod(t *testing.T) {
	var open atomic.Int64
	s := serveFake(t, &fakeEngine{forward: func(ctx context.Context, port uint16, stream io.ReadWriteCloser) error {
		open.Add(1)
		defer open.Add(-1)
		return intoThisPod(ctx, port, stream)
	}})
	gone := make(chan struct{})
	port := fmt.Sprint(listen(t, "127.0.0.1:0", func(*net.TCPConn) { <-gone }))
	t.Cleanup(func() { close(gone) })
	address, err := s.PortForward(t.Context(), &cri.PortForwardRequest{PodSandboxId: "x"})
	if err != nil {
		t.Fatal(err)
	}
	conn := speakSPDY(t, address, forwardProtocol)
	failure := openStream(t, conn, http.Header{"Streamtype": {"error"}, "Port": {port}, "Requestid": {"1"}})
	data := openStream(t, conn, http.Header{"Streamtype": {"data"}, "Port": {port}, "Requestid": {"1"}})
	if err := errors.Join(failure.WaitTimeout(patience), data.WaitTimeout(patience)); err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(data, "query")
	wait.For(t, "the connection", func() bool { return open.Load() == 1 })
	_ = data.Reset()
	wait.For(t, "the connection to end", func() bool { return open.Load() == 0 })
	if text, err := io.ReadAll(failure); len(text) > 0 || err != nil {
		t.Errorf("the error stream has %q, %v", text, err)
	}
}
