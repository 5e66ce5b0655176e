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
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/moby/spdystream"
	frames "github.com/moby/spdystream/spdy"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/streaming/pkg/httpstream"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/stdio"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/test/kit/wait"
)

// patience is how long something may take that is promised to happen soon.
const patience = wait.Limit

// upgrade is a connection on which SPDY is spoken from now on.
func upgrade(t *testing.T, address, protocol string) *net.TCPConn {
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
	return c.(*net.TCPConn)
}

// deaf is a client that sends what it likes and never reads.
type deaf struct {
	*net.TCPConn
	framer *frames.Framer
	last   frames.StreamId
}

func newDeaf(t *testing.T, address string) *deaf {
	t.Helper()
	c := upgrade(t, address, "v4.channel.k8s.io")
	f, err := frames.NewFramer(c, c)
	if err != nil {
		t.Fatal(err)
	}
	return &deaf{TCPConn: c, framer: f}
}

// open opens streams, of which the last one is where data goes.
func (d *deaf) open(kinds ...string) {
	for _, kind := range kinds {
		d.last = (d.last + 1) | 1 // odd, as a client's are
		_ = d.framer.WriteFrame(&frames.SynStreamFrame{StreamId: d.last, Headers: http.Header{"Streamtype": {kind}}})
	}
}

func (d *deaf) send(n int) error {
	return d.framer.WriteFrame(&frames.DataFrame{StreamId: d.last, Data: make([]byte, n)})
}

// speakSPDY is a client that opens what streams it likes and must read them.
func speakSPDY(t *testing.T, address, protocol string) *spdystream.Connection {
	t.Helper()
	conn, err := spdystream.NewConnection(upgrade(t, address, protocol), false)
	if err != nil {
		t.Fatal(err)
	}
	go conn.Serve(spdystream.NoOpStreamHandler)
	return conn
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
		address, err := s.Exec(t.Context(), &cri.ExecRequest{Cmd: []string{"true"}, Stdout: true})
		if err != nil {
			t.Fatal(err)
		}
		client := newDeaf(t, address)
		client.open("error", "stdout", "stdin", "stdout", "error", "")
		client.Close()
	}
}

// cri-o#6699, containerd#7832: a client that does not read is noticed when it
// goes, although nobody reads from it either.
func TestClientThatVanishes(t *testing.T) {
	started, ended := make(chan struct{}), make(chan struct{})
	s := serveFake(t, &fakeEngine{exec: func(ctx context.Context, _ oci.Command, client pod.Client) (int32, error) {
		started <- struct{}{}
		defer func() { ended <- struct{}{} }()
		<-ctx.Done() // neither reads nor writes: only the connection itself can tell
		return 0, context.Cause(ctx)
	}})
	for name, vanish := range map[string]func(*net.TCPConn){
		"closes":        func(c *net.TCPConn) { c.Close() },
		"resets":        func(c *net.TCPConn) { c.SetLinger(0); c.Close() },
		"ends its half": func(c *net.TCPConn) { c.CloseWrite() },
	} {
		address, err := s.Exec(t.Context(), &cri.ExecRequest{Cmd: []string{"true"}, Stdin: true, Stdout: true})
		if err != nil {
			t.Fatal(err)
		}
		client := newDeaf(t, address)
		client.open("error", "stdout", "stdin")
		within(t, "the start", func() { <-started })
		// An orderly end comes after what is on its way, and cannot come if nobody
		// takes that.
		if name == "resets" {
			client.SetWriteDeadline(time.Now().Add(time.Second))
			for err == nil {
				err = client.send(32 << 10)
			}
		}
		vanish(client.TCPConn)
		within(t, "a client that "+name, func() { <-ended })
	}
}

// All that a command has said reaches a client that has much to say itself: the
// connection must not be reset on what nobody wants to read.
func TestOutputReachesAClientThatKeepsSending(t *testing.T) {
	s := serveFake(t, &fakeEngine{exec: func(_ context.Context, _ oci.Command, client pod.Client) (int32, error) {
		_, err := client.Stdout.Write([]byte("enough"))
		return 7, err
	}})
	for name, executor := range executors {
		for range 20 {
			address, err := s.Exec(t.Context(), &cri.ExecRequest{Cmd: []string{"head"}, Stdin: true, Stdout: true})
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

// A session whose client does not take the rest has its place until the connection is
// closed: else a client could hold any number of connections by sessions that end.
func TestPlaceIsKeptUntilTheConnectionIsClosed(t *testing.T) {
	started := make(chan struct{})
	s := serveFake(t, &fakeEngine{exec: func(_ context.Context, _ oci.Command, client pod.Client) (int32, error) {
		close(started)
		_, err := client.Stdout.Write(make([]byte, 512<<10))
		return 0, err
	}})
	s.tickets.open.most, s.hangups.stall = 1, time.Hour
	ask := func(ctx context.Context) (string, error) {
		return s.Exec(ctx, &cri.ExecRequest{Cmd: []string{"true"}, Stdout: true})
	}
	free := func() (address string) {
		t.Helper()
		wait.For(t, "a place", func() (ok bool) {
			var err error
			address, err = ask(t.Context())
			return err == nil
		})
		return address
	}
	address := free()
	answer, err := http.Get(address)
	if err != nil || answer.StatusCode != http.StatusBadRequest {
		t.Fatalf("without an upgrade: %v, %v", answer, err)
	}
	answer.Body.Close()
	client := newDeaf(t, free())
	client.SetReadBuffer(8 << 10)
	client.open("error", "stdout")
	within(t, "the start", func() { <-started })
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.sessions.Wait()
	}()
	within(t, "the end of the session", func() { readUntil(client, ended) })
	impatient, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := ask(impatient); !errors.Is(err, fault.Exhausted) {
		t.Errorf("while the connection lasts: %v", err)
	}
	client.Close()
	free()
}

// readUntil takes as little as it can for what is written to it to end.
func readUntil(client net.Conn, ended <-chan struct{}) {
	for {
		select {
		case <-ended:
			return
		default:
			_ = client.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
			_, _ = client.Read(make([]byte, 4<<10))
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
	address, err := s.Attach(t.Context(), &cri.AttachRequest{Stdout: true})
	if err != nil {
		t.Fatal(err)
	}
	newDeaf(t, address).open("error", "stdout")
	within(t, "the start", func() { <-running })
	within(t, "Close", func() {
		if err := errors.Join(s.Close(context.Background()), <-served); err != nil {
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
	s := serveFake(t, &fakeEngine{forward: upper})
	for name, dialer := range dialers {
		t.Run(name, func(t *testing.T) {
			address, err := s.PortForward(t.Context(), &cri.PortForwardRequest{PodSandboxId: "x"})
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
	trouble := make(chan string, 1)
	go func() { // beside the data: frames that are not read hold up others
		text, _ := io.ReadAll(failure)
		trouble <- string(text)
	}()
	header.Set("streamType", "data")
	data, err := conn.CreateStream(header)
	if err != nil {
		t.Error(err)
		return
	}
	fmt.Fprintf(data, "request %d", i)
	data.Close()
	said, _ := io.ReadAll(data)
	if text := <-trouble; i%2 == 0 {
		if want := fmt.Sprintf("REQUEST %d", i); string(said) != want || text != "" {
			t.Errorf("%q, error %q, want %q", said, text, want)
		}
	} else if !strings.Contains(text, "port 81") {
		t.Errorf("error %q, want one about port 81", text)
	}
}

// Halves of connections, connections to nowhere, doubles: none of it costs more
// than the session.
func TestPortForwardNonsense(t *testing.T) {
	s := serveFake(t, &fakeEngine{forward: upper})
	address, err := s.PortForward(t.Context(), &cri.PortForwardRequest{PodSandboxId: "x"})
	if err != nil {
		t.Fatal(err)
	}
	conn := speakSPDY(t, address, forwardProtocol)
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

// A resize that never ends is not kept. Not parallel: it measures.
func TestEndlessResize(t *testing.T) {
	v := &session{}
	endless := io.LimitReader(&endlessText{}, 64<<20)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for size := range v.sizes(endless) {
		t.Errorf("a size of %v", size)
	}
	v.work.Wait()
	runtime.ReadMemStats(&after)
	if grown := after.TotalAlloc - before.TotalAlloc; grown > 16<<20 {
		t.Errorf("%d bytes were allocated", grown)
	}
	sizes := v.sizes(strings.NewReader(`{"Width":1,"Height":2} {"Width":65535,"Height":65535}`))
	var last stdio.Size
	for size := range sizes {
		last = size
	}
	if want := (stdio.Size{Width: 65535, Height: 65535}); last != want {
		t.Errorf("%v, want %v", last, want)
	}
}

// endlessText is a string in JSON of which only the beginning comes.
type endlessText struct{ begun bool }

func (e *endlessText) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'x'
	}
	if !e.begun {
		p[0] = '"'
	}
	e.begun = true
	return len(p), nil
}

// A connection without a token is not kept, whatever it promises to send.
func TestBodyThatNeverComes(t *testing.T) {
	s := serveFake(t, &fakeEngine{})
	c, err := net.Dial("tcp", s.base.Host)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	io.WriteString(c, "POST /exec/x HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
	within(t, "the end", func() {
		if answer, _ := io.ReadAll(c); !bytes.Contains(answer, []byte(" 404 ")) {
			t.Errorf("%.200q", answer)
		}
	})
}

// Silence ends a session, pings and data do not let it end.
func TestIdleSession(t *testing.T) {
	for idle := 2 * time.Second; ; idle *= 4 { // a busy machine is silent, too, at times
		if err := idleSession(t, idle); err == nil {
			return
		} else if idle > 20*time.Second {
			t.Fatal(err)
		}
	}
}

func idleSession(t *testing.T, idle time.Duration) error {
	s := serveFake(t, &fakeEngine{exec: func(ctx context.Context, _ oci.Command, _ pod.Client) (int32, error) {
		<-ctx.Done()
		return 0, context.Cause(ctx)
	}})
	s.cfg.IdleTimeout = idle
	address, err := s.Exec(t.Context(), &cri.ExecRequest{Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	client := newDeaf(t, address)
	client.open("error", "stdin")
	for range 10 {
		time.Sleep(idle / 4)
		if err := client.send(1); err != nil {
			return fmt.Errorf("after %v: %w", time.Since(began), err)
		}
	}
	within(t, "the end", func() { io.Copy(io.Discard, client) })
	if took := time.Since(began); took < 3*idle {
		return fmt.Errorf("ended after %v, although it was not silent for %v", took, idle)
	}
	return nil
}
