package stream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/moby/spdystream"
	"k8s.io/apimachinery/pkg/util/httpstream"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/pod"
	"github.com/crius-run/crius/oci"
)

// patience is how long something may take that is promised to happen soon.
const patience = 20 * time.Second

// speakSPDY is a client that opens what streams it likes.
func speakSPDY(t *testing.T, address, protocol string) (*spdystream.Connection, *net.TCPConn) {
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
	fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: %s\r\n\r\n", u.Path, protocol)
	answer := make([]byte, 0, 4096)
	for !bytes.HasSuffix(answer, []byte("\r\n\r\n")) {
		n, err := c.Read(answer[len(answer) : len(answer)+1])
		if err != nil {
			t.Fatalf("%v after %q", err, answer)
		}
		answer = answer[:len(answer)+n]
	}
	if !bytes.HasPrefix(answer, []byte("HTTP/1.1 101 ")) {
		t.Fatalf("answer %q", answer)
	}
	conn, err := spdystream.NewConnection(c, false)
	if err != nil {
		t.Fatal(err)
	}
	go conn.Serve(spdystream.NoOpStreamHandler)
	return conn, c.(*net.TCPConn)
}

func openStream(t *testing.T, conn *spdystream.Connection, header http.Header) *spdystream.Stream {
	t.Helper()
	s, err := conn.CreateStream(header, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// within fails the test if f takes longer than is promised.
func within(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatalf("%s takes more than %v", what, patience)
	}
}

// k8s.io/cri-streaming waits for ever with a stream that it did not expect.
func TestStreamsThatNobodyExpects(t *testing.T) {
	s := serveFake(t, &fakeEngine{exec: echo})
	for range 20 {
		address, err := s.Exec(&cri.ExecRequest{Cmd: []string{"true"}, Stdout: true})
		if err != nil {
			t.Fatal(err)
		}
		conn, line := speakSPDY(t, address, "v4.channel.k8s.io")
		for _, kind := range []string{"error", "stdout", "stdin", "stdout", "error", ""} {
			if s, err := conn.CreateStream(http.Header{"Streamtype": {kind}}, nil, false); err == nil {
				go io.Copy(io.Discard, s)
			}
		}
		line.Close()
	}
}

// cri-o#6699, containerd#7832: a client that does not read is noticed when it
// goes, although nobody reads from it either.
func TestClientThatVanishes(t *testing.T) {
	var ended sync.WaitGroup
	s := serveFake(t, &fakeEngine{exec: func(ctx context.Context, _ oci.Command, client pod.Client) (int32, error) {
		defer ended.Done()
		for { // and never reads its input
			if _, err := client.Stdout.Write(make([]byte, 32<<10)); err != nil {
				return 0, err
			}
		}
	}})
	for name, vanish := range map[string]func(*net.TCPConn){
		"closes":        func(c *net.TCPConn) { c.Close() },
		"resets":        func(c *net.TCPConn) { c.SetLinger(0); c.Close() },
		"ends its half": func(c *net.TCPConn) { c.CloseWrite() },
	} {
		ended.Add(1)
		address, err := s.Exec(&cri.ExecRequest{Cmd: []string{"true"}, Stdin: true, Stdout: true})
		if err != nil {
			t.Fatal(err)
		}
		conn, line := speakSPDY(t, address, "v4.channel.k8s.io")
		openStream(t, conn, http.Header{"Streamtype": {"error"}})
		openStream(t, conn, http.Header{"Streamtype": {"stdout"}}) // not read: the connection fills
		stdin := openStream(t, conn, http.Header{"Streamtype": {"stdin"}})
		if err := stdin.Wait(); err != nil {
			t.Fatal(err)
		}
		// The end of a half comes after what is on its way, and cannot come if
		// nobody takes that.
		if name != "ends its half" {
			line.SetWriteDeadline(time.Now().Add(time.Second))
			for err == nil {
				_, err = stdin.Write(make([]byte, 32<<10))
			}
		}
		vanish(line)
		within(t, "a client that "+name, ended.Wait)
	}
}

// All that a command has said reaches a client that has much to say itself: the
// connection must not be reset on what nobody wants to read.
func TestLastWordsReachATalkativeClient(t *testing.T) {
	s := serveFake(t, &fakeEngine{exec: func(_ context.Context, _ oci.Command, client pod.Client) (int32, error) {
		_, err := client.Stdout.Write([]byte("enough"))
		return 7, err
	}})
	for name, executor := range executors {
		for range 20 {
			address, err := s.Exec(&cri.ExecRequest{Cmd: []string{"head"}, Stdin: true, Stdout: true})
			if err != nil {
				t.Fatal(err)
			}
			u, _ := url.Parse(address)
			e, err := executor(u)
			if err != nil {
				t.Fatal(err)
			}
			var stdout bytes.Buffer
			err = e.StreamWithContext(t.Context(), streamOptions(strings.NewReader(strings.Repeat("x", 1<<20)), &stdout))
			if stdout.String() != "enough" || err == nil || !strings.Contains(err.Error(), "exit code 7") {
				t.Fatalf("%s: %q, %v", name, stdout.String(), err)
			}
		}
	}
}

// A server that stops does not wait for clients.
func TestCloseEndsSessions(t *testing.T) {
	running := make(chan struct{})
	engine := &fakeEngine{exec: func(ctx context.Context, _ oci.Command, client pod.Client) (int32, error) {
		close(running)
		<-ctx.Done()
		return 0, context.Cause(ctx)
	}}
	s, err := New(Config{Address: "127.0.0.1:0"}, engine)
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve() }()
	address, err := s.Attach(&cri.AttachRequest{Stdout: true})
	if err != nil {
		t.Fatal(err)
	}
	conn, _ := speakSPDY(t, address, "v4.channel.k8s.io")
	openStream(t, conn, http.Header{"Streamtype": {"error"}})
	openStream(t, conn, http.Header{"Streamtype": {"stdout"}})
	within(t, "the start", func() { <-running })
	within(t, "Close", func() {
		if err := errors.Join(s.Close(), <-served); err != nil {
			t.Error(err)
		}
	})
}

func TestAddresses(t *testing.T) {
	t.Parallel()
	for _, address := range []string{"", "127.0.0.1", ":0", "0.0.0.0:0", "[::]:0", "127.0.0.1:port:0"} {
		if s, err := New(Config{Address: address}, &fakeEngine{}); !errors.Is(err, fault.Invalid) {
			t.Errorf("%q: %v, %v", address, s, err)
		}
	}
	for _, cfg := range []Config{
		{Address: "127.0.0.1:0", TLSCertFile: "/no/such"},
		{Address: "127.0.0.1:0", TLSClientCAFile: "/no/such"},
		{Address: "127.0.0.1:0", TLSCertFile: "/no/such", TLSKeyFile: "/no/such"},
	} {
		if s, err := New(cfg, &fakeEngine{}); err == nil {
			t.Errorf("%+v: %v", cfg, s)
		}
	}
}

// upper is a service inside a pod: it sends back what it gets, larger, and ends
// when its client does.
func upper(_ context.Context, port uint16, stream io.ReadWriteCloser) error {
	if port != 80 {
		return fmt.Errorf("nobody listens on port %d", port)
	}
	text, err := io.ReadAll(stream)
	if err == nil {
		_, err = stream.Write(bytes.ToUpper(text))
	}
	return errors.Join(err, stream.Close())
}

// kubectl's own port-forward, over SPDY and over SPDY inside a WebSocket.
func TestPortForwardWithRealClients(t *testing.T) {
	dialers := map[string]func(*url.URL) (httpstream.Dialer, error){
		"SPDY": func(u *url.URL) (httpstream.Dialer, error) {
			transport, upgrader, err := spdy.RoundTripperFor(&rest.Config{})
			return spdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, u), err
		},
		"WebSocket": func(u *url.URL) (httpstream.Dialer, error) {
			return portforward.NewSPDYOverWebsocketDialer(u, &rest.Config{})
		},
	}
	s := serveFake(t, &fakeEngine{forward: upper})
	for name, dialer := range dialers {
		t.Run(name, func(t *testing.T) {
			address, err := s.PortForward(&cri.PortForwardRequest{PodSandboxId: "x"})
			if err != nil {
				t.Fatal(err)
			}
			u, _ := url.Parse(address)
			d, err := dialer(u)
			if err != nil {
				t.Fatal(err)
			}
			conn, protocol, err := d.Dial("portforward.k8s.io")
			if err != nil || protocol != "portforward.k8s.io" {
				t.Fatalf("%q, %v", protocol, err)
			}
			defer conn.Close()
			var group sync.WaitGroup
			for i := range 20 {
				group.Go(func() { forwardOnce(t, conn, i) })
			}
			group.Wait()
		})
	}
}

// forwardOnce uses one connection of a session.
func forwardOnce(t *testing.T, conn httpstream.Connection, i int) {
	header := http.Header{}
	header.Set("port", []string{"80", "81"}[i%2])
	header.Set("requestID", fmt.Sprint(i))
	header.Set("streamType", "error")
	failure, err := conn.CreateStream(header)
	if err != nil {
		t.Error(err)
		return
	}
	failure.Close()
	header.Set("streamType", "data")
	data, err := conn.CreateStream(header)
	if err != nil {
		t.Error(err)
		return
	}
	fmt.Fprintf(data, "request %d", i)
	data.Close()
	said, _ := io.ReadAll(data)
	trouble, _ := io.ReadAll(failure)
	if i%2 == 0 {
		if want := fmt.Sprintf("REQUEST %d", i); string(said) != want || len(trouble) > 0 {
			t.Errorf("%q, error %q, want %q", said, trouble, want)
		}
	} else if !strings.Contains(string(trouble), "port 81") {
		t.Errorf("error %q, want one about port 81", trouble)
	}
}

// Halves of connections, connections to nowhere, doubles: none of it costs more
// than the session.
func TestPortForwardNonsense(t *testing.T) {
	s := serveFake(t, &fakeEngine{forward: upper})
	address, err := s.PortForward(&cri.PortForwardRequest{PodSandboxId: "x"})
	if err != nil {
		t.Fatal(err)
	}
	conn, _ := speakSPDY(t, address, forwardProtocol)
	half := func(kind, port, id string) *spdystream.Stream {
		return openStream(t, conn, http.Header{"Streamtype": {kind}, "Port": {port}, "Requestid": {id}})
	}
	for _, port := range []string{"", "0", "-1", "65536", "http"} {
		if err := half("data", port, "1").WaitTimeout(patience); err == nil {
			t.Errorf("port %q is accepted", port)
		}
	}
	if err := half("nonsense", "80", "1").WaitTimeout(patience); err == nil {
		t.Error("a stream for nothing is accepted")
	}
	if err := half("data", "80", "2").WaitTimeout(patience); err != nil {
		t.Errorf("half a connection: %v", err)
	}
	if err := half("data", "80", "2").WaitTimeout(patience); err == nil {
		t.Error("the same half is accepted twice")
	}
	old := openStream(t, conn, http.Header{"Streamtype": {"error"}, "Port": {"80"}}) // as before there were ids
	data := openStream(t, conn, http.Header{"Streamtype": {"data"}, "Port": {"80"}})
	if err := errors.Join(old.WaitTimeout(patience), data.WaitTimeout(patience)); err != nil {
		t.Fatal(err)
	}
	io.WriteString(data, "hello")
	data.Close()
	if said, err := io.ReadAll(data); string(said) != "HELLO" {
		t.Errorf("%q, %v", said, err)
	}
}
