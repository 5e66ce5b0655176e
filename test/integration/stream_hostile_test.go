package integration

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

// rude are clients that break off, send garbage or do nothing, each with the
// URL of a session of any kind. They return once they have disconnected.
var rude = map[string]func(ctx context.Context, s kubelet.Streams, address string) error{
	"never finishes its header": func(ctx context.Context, s kubelet.Streams, address string) error {
		line, err := s.Dial(ctx, address)
		if err != nil {
			return err
		}
		defer line.Close()
		for _, b := range []byte("GET /exec/x HTTP/1.1\r\nHost: a\r\nUpgra") {
			if _, err := line.Write([]byte{b}); err != nil {
				return err
			}
		}
		return nil
	},
	"opens no streams": func(ctx context.Context, s kubelet.Streams, address string) error {
		_, line, err := s.SPDY(ctx, address, "v4.channel.k8s.io", "portforward.k8s.io")
		if err != nil {
			return err
		}
		return line.Close()
	},
	"opens no streams and cuts": func(ctx context.Context, s kubelet.Streams, address string) error {
		_, line, err := s.SPDY(ctx, address, "v4.channel.k8s.io", "portforward.k8s.io")
		if err != nil {
			return err
		}
		line.Cut()
		return nil
	},
	"opens an odd stream": func(ctx context.Context, s kubelet.Streams, address string) error {
		conn, line, err := s.SPDY(ctx, address, "v4.channel.k8s.io", "portforward.k8s.io")
		if err != nil {
			return err
		}
		defer line.Cut()
		go conn.CreateStream(http.Header{"Streamtype": {"nonsense"}, "Port": {"-1"}})
		_, err = conn.CreateStream(http.Header{"Streamtype": {"error"}, "Port": {"70000"}})
		_ = err // the server may or may not answer
		return nil
	},
	"speaks nonsense instead of SPDY": func(ctx context.Context, s kubelet.Streams, address string) error {
		line, err := s.Dial(ctx, address)
		if err != nil {
			return err
		}
		defer line.Close()
		header := http.Header{"X-Stream-Protocol-Version": {"v4.channel.k8s.io", "portforward.k8s.io"}}
		if _, err := line.Upgrade(address, "SPDY/3.1", header); err != nil {
			return err
		}
		io.Copy(line.TCPConn, noise(100_000))
		return nil
	},
	"speaks nonsense instead of WebSocket": func(ctx context.Context, s kubelet.Streams, address string) error {
		_, line, err := s.RawWebSocket(ctx, address, "v4.channel.k8s.io")
		if err != nil {
			return err
		}
		defer line.Close()
		io.Copy(line.TCPConn, noise(100_000))
		return nil
	},
	"announces a huge WebSocket message": func(ctx context.Context, s kubelet.Streams, address string) error {
		_, line, err := s.RawWebSocket(ctx, address, "v4.channel.k8s.io")
		if err != nil {
			return err
		}
		defer line.Close()
		line.Write(binary.BigEndian.AppendUint64([]byte{0x82, 0xff}, 1<<62)) // binary, masked
		io.Copy(line.TCPConn, noise(10_000))
		return nil
	},
	"writes to every channel of a WebSocket": func(ctx context.Context, s kubelet.Streams, address string) error {
		conn, line, err := s.RawWebSocket(ctx, address, "v4.channel.k8s.io")
		if err != nil {
			return err
		}
		defer line.Close()
		conn.WriteMessage(2, nil)
		for channel := range 256 {
			conn.WriteMessage(2, []byte{byte(channel), '{', 0xff})
		}
		return nil
	},
	"ends its half at once": func(ctx context.Context, s kubelet.Streams, address string) error {
		_, line, err := s.SPDY(ctx, address, "v4.channel.k8s.io", "portforward.k8s.io")
		if err != nil {
			return err
		}
		defer line.Close()
		line.CloseWrite()
		return nil
	},
}

// crowd lets n clients act, a dozen at a time, and fails with the first errors.
func crowd(t *testing.T, n int, act func(i int) error) {
	t.Helper()
	var group sync.WaitGroup
	var next, failed atomic.Int64
	for range 12 {
		group.Go(func() {
			for i := int(next.Add(1)) - 1; i < n && failed.Load() < 3; i = int(next.Add(1)) - 1 {
				if err := act(i); err != nil {
					failed.Add(1)
					t.Errorf("client %d of %d: %v", i, n, err)
				}
			}
		})
	}
	group.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

// Well-behaved clients, clients that leave in the middle, that never read, that
// send garbage: nothing remains of any of them in the server, in the
// container's monitor and on the node. CVE-2025-64329: of attach;
// kubernetes#57992: of port-forward.
func TestSessionsDoNotLeak_k8s_126608_CVE_2022_23471_CVE_2025_64329(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	c := w.run(t, "crun").start(t, "tcp 127.0.0.1:7001 echo ; tcp 127.0.0.1:7006 flood ; tcp 127.0.0.1:7007 mute ; fork 1 lines 1000000000 20ms ; cat",
		stdin, func(c *cri.ContainerConfig) { c.LogPath = "" })
	visit := func(i int) error {
		return []func(*container, int) error{visitExec, visitAttach, visitForward}[i%3](c, i/3)
	}
	const few, many, processes = 24, 96, 2
	c.only(t, processes)
	wait.For(t, "the second process to execute its program", func() bool {
		return slices.ContainsFunc(w.processesOf(t, c.id), func(pid int) bool {
			line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
			return bytes.HasPrefix(line, []byte("/proc/self/exe\x00lines\x00"))
		})
	})
	things, sockets := mustInventory(t, w), w.load(t).FDs["socket"]
	// still waits until the server has no session connections any more. It keeps
	// those that open no stream for a while.
	still := func() inventory.Load {
		t.Helper()
		c.only(t, processes)
		wait.For(t, "the sessions' connections to be closed", func() bool { return w.load(t).FDs["socket"] <= sockets })
		return w.load(t)
	}
	crowd(t, few, visit)
	still()
	stacks := w.goroutines(t)
	sockets = w.load(t).FDs["socket"] // of another server
	crowd(t, few, visit)
	before, monitor, working := still(), monitorLoad(t, c), w.metric(t, "go_goroutines")

	wait.Retry(t, func() error { // a session's goroutines may take longer to end than its connections
		crowd(t, many, visit)
		still()
		var now, after inventory.Load
		if !wait.Until(t.Context(), func() bool { now = w.load(t); return now.Total() <= before.Total()+2 }) {
			t.Errorf("file descriptors went from %d to %d\nbefore: %v\n after: %v", before.Total(), now.Total(), before.FDs, now.FDs)
		}
		if !wait.Until(t.Context(), func() bool { after = monitorLoad(t, c); return after.Total() <= monitor.Total() }) {
			t.Errorf("the monitor's file descriptors went from %v to %v", monitor.FDs, after.FDs)
		}
		wait.Until(t.Context(), func() bool { return w.metric(t, "go_goroutines") <= working+2 }) // those that end have ended
		var errs []error
		for kind, n := range w.goroutines(t) { // it restarts the server
			if n > stacks[kind]+2 {
				errs = append(errs, fmt.Errorf("%d goroutines, before %d, made at %s", n, stacks[kind], kind))
			}
		}
		sockets = w.load(t).FDs["socket"]
		return errors.Join(errs...)
	})
	equal(t, "state of the container", c.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
	w.Restored(t, things)
}

func monitorLoad(t *testing.T, c *container) inventory.Load {
	t.Helper()
	pids := c.pod.w.monitors(t, c.id)
	if len(pids) != 1 {
		t.Fatalf("the container's monitors are %v, want one", pids)
	}
	l, err := inventory.Server(pids[0])
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// rudely runs one of the rude clients, chosen by number.
func rudely(ctx context.Context, i int, s kubelet.Streams, address string) error {
	names := slices.Sorted(func(yield func(string) bool) {
		for name := range rude {
			if !yield(name) {
				return
			}
		}
	})
	name := names[i%len(names)]
	if err := rude[name](ctx, s, address); err != nil {
		return fmt.Errorf("a client that %s: %w", name, err)
	}
	return nil
}

// execAddress and attachAddress are for clients that run concurrently with the
// test.
func (c *container) execAddress(ctx context.Context, line string, change ...execChange) (string, error) {
	resp, err := c.pod.w.Runtime().Exec(ctx, c.execRequest(line, change...))
	return resp.GetUrl(), err
}

func (c *container) attachAddress(ctx context.Context, change ...attachChange) (string, error) {
	resp, err := c.pod.w.Runtime().Attach(ctx, c.attachRequest(change...))
	return resp.GetUrl(), err
}

// everything requests all streams of a container without a terminal.
var everything = kubelet.Wants{Stdin: true, Stdout: true, Stderr: true}

// visitExec is one of eight kinds of client of an exec.
func visitExec(c *container, i int) error {
	ctx, w := context.Background(), c.pod.w
	s := []kubelet.Streams{w.spdy(), w.websocket()}[i/8%2]
	switch i % 8 {
	case 0: // well-behaved
		address, err := c.execAddress(ctx, "line ; echo out", withInput)
		if err != nil {
			return err
		}
		e := s.Open(ctx, address, everything)
		defer e.Leave()
		go e.Type("in\n")
		if err := e.Wait(wait.Limit); err != nil || e.Stdout.String() != "got \"in\"\nout\n" {
			return fmt.Errorf("stdout is %.100q, %v", e.Stdout.String(), err)
		}
		return nil
	case 1: // leaves in the middle of input
		address, err := c.execAddress(ctx, "cat", withInput)
		if err != nil {
			return err
		}
		e := s.Open(ctx, address, everything)
		e.Type("some")
		e.Leave()
		return nil
	case 2: // reads nothing and cuts
		address, err := c.execAddress(ctx, "flood")
		if err != nil {
			return err
		}
		streams, line, err := w.openStreams(ctx, address, "stdout", "stderr")
		if err != nil {
			return err
		}
		streams["stdout"].Read(make([]byte, 1))
		line.Freeze()
		line.Cut()
		return nil
	case 3: // leaves a terminal
		address, err := c.execAddress(ctx, "sleep", withTerminal)
		if err != nil {
			return err
		}
		e := s.Open(ctx, address, kubelet.Wants{Stdin: true, Stdout: true, TTY: true, Size: kubelet.Size{Width: 90, Height: 40}})
		e.Resize(91, 41)
		e.Type("x")
		e.Leave()
		return nil
	case 4: // CVE-2022-23471: the terminal of a command that never begins
		address, err := c.execAddress(ctx, "", withTerminal, func(r *cri.ExecRequest) { r.Cmd = []string{"/no/such/program"} })
		if err != nil {
			return err
		}
		e := s.Open(ctx, address, kubelet.Wants{Stdin: true, Stdout: true, TTY: true, Size: kubelet.Size{Width: 90, Height: 40}})
		defer e.Leave()
		for i := range 5 {
			e.Resize(uint16(90+i), 40)
		}
		if err := e.Wait(wait.Limit); err == nil || !strings.Contains(err.Error(), "no/such/program") {
			return fmt.Errorf("a missing program: %v", err)
		}
		return nil
	default:
		address, err := c.execAddress(ctx, "cat", withInput)
		if err != nil {
			return err
		}
		return rudely(ctx, i/8*3+i%8, w.spdy(), address)
	}
}

// visitAttach is one of eight kinds of client of an attach.
func visitAttach(c *container, i int) error {
	ctx, w := context.Background(), c.pod.w
	s := []kubelet.Streams{w.spdy(), w.websocket()}[i/8%2]
	address, err := c.attachAddress(ctx, attachInput)
	if err != nil {
		return err
	}
	switch i % 8 {
	case 0, 1: // well-behaved
		e := s.Open(ctx, address, everything)
		defer e.Leave()
		word := fmt.Sprintf("word %d\n", i)
		go e.Type(word)
		if !wait.Until(ctx, func() bool { return strings.Contains(e.Stdout.String(), word) }) {
			return fmt.Errorf("%q never came back, but %.200q", word, e.Stdout.String())
		}
		return nil
	case 2: // leaves at once
		e := s.Open(ctx, address, everything)
		e.Leave()
		return nil
	case 3: // reads nothing and cuts
		_, line, err := w.openStreams(ctx, address, "stdin", "stdout", "stderr")
		if err != nil {
			return err
		}
		line.Freeze()
		line.Cut()
		return nil
	default:
		return rudely(ctx, i/8*4+i%8, w.spdy(), address)
	}
}

// visitForward is one of eight kinds of client of a port-forward.
func visitForward(c *container, i int) error {
	ctx, w := context.Background(), c.pod.w
	resp, err := w.Runtime().PortForward(ctx, &cri.PortForwardRequest{PodSandboxId: c.pod.id, Port: []int32{7001}})
	if err != nil {
		return err
	}
	if i%8 > 4 {
		return rudely(ctx, i/8*3+i%8, w.spdy(), resp.Url)
	}
	tunnel, err := w.spdy().Tunnel(ctx, resp.Url)
	if err != nil {
		return err
	}
	defer tunnel.Close()
	wire, err := tunnel.Connect([]int{7001, 7001, 7006, 7007, 7999}[i%8])
	if err != nil {
		return err
	}
	switch i % 8 {
	case 0: // well-behaved
		io.WriteString(wire, "there and back")
		wire.Close()
		if got, err := io.ReadAll(wire); err != nil || string(got) != "there and back" {
			return fmt.Errorf("the echo is %q, %v", got, err)
		}
	case 1: // leaves in the middle
		io.WriteString(wire, "there")
		io.ReadFull(wire, make([]byte, 2))
	case 2: // reads nothing of much
		wire.Read(make([]byte, 1))
		tunnel.Line.Freeze()
		tunnel.Line.Cut()
	case 3: // sends much to a server that does not read, and cuts
		go func() { // the cut ends it
			defer tunnel.Line.Cut()
			tunnel.Line.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
			io.Copy(wire, noise(50_000_000))
		}()
		<-tunnel.Ended()
	case 4: // nothing listens
		if message, err := io.ReadAll(wire.Errors); err != nil || !strings.Contains(string(message), "7999") {
			return fmt.Errorf("the error stream says %q, %v", message, err)
		}
	}
	return nil
}

// Clients that have connected and send nothing, or only incomplete requests,
// keep no other client from being served.
func TestSlowClientsKeepNobodyWaiting(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	c := p.start(t, "tcp 127.0.0.1:7001 echo ; echo ready ; sleep")
	c.says(t, "ready")
	for i := range 21 {
		address := p.forwardURL(t)
		line, err := w.spdy().Dial(t.Context(), address)
		if err != nil {
			t.Fatal(err)
		}
		defer line.Close()
		switch i % 3 {
		case 0:
			io.WriteString(line, "G")
		case 1:
			io.WriteString(line, "GET /exec/x HTTP/1.1\r\nHost: a\r\nX-A: ")
		case 2:
			if _, err := line.Upgrade(address, "SPDY/3.1", http.Header{"X-Stream-Protocol-Version": {"portforward.k8s.io"}}); err != nil {
				t.Fatal(err)
			}
		}
	}
	// One after the other the slow ones would take ten seconds each.
	endsWith(t, c.session(t, w.spdy(), "exit 3"), 3)
	wire := connect(t, p.tunnel(t), 7001)
	io.WriteString(wire, "hello")
	wire.Close()
	equal(t, "echo", all(t, "the echo", wire), "hello")
}
