package integration

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	spdyframes "github.com/moby/spdystream/spdy"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/testkit/inventory"
	"github.com/crius-run/crius/internal/testkit/kubelet"
	"github.com/crius-run/crius/internal/testkit/node"
)

// creation is how long a server may wait for the streams of a client that has
// upgraded its connection and gone.
const creation = 30*time.Second + patience

// rude are clients that break off, talk nonsense or do nothing, each with the
// URL of a session of any kind. They return once they have gone.
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
		_ = err // an answer or none, as the server likes
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

// crowd lets n clients act, twenty at a time, and fails with the first error.
func crowd(t *testing.T, n int, act func(i int) error) {
	t.Helper()
	var group sync.WaitGroup
	var next, failed atomic.Int64
	for range 20 {
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

// leavesNothing runs a crowd of n clients against a node of its own. After it
// the server, the container's monitor and the node are as they were.
func leavesNothing(t *testing.T, n int, line string, visit func(c *container, i int) error) {
	t.Helper()
	w := private(t, node.Options{})
	c := w.run(t, "crun").start(t, line, stdin, func(c *cri.ContainerConfig) { c.LogPath = "" })
	few := func() { t.Helper(); crowd(t, 40, func(i int) error { return visit(c, i) }) }
	processes := 1 + strings.Count(line, "fork 1")
	quiet := func() {
		t.Helper()
		if !eventually(func() bool { return len(w.processesOf(t, c.id)) == processes }) {
			t.Errorf("processes of sessions are left: %v", c.facts(t).Processes)
		}
	}
	quiet()
	things := mustInventory(t, w)
	few()
	quiet()
	w.still(t)
	stacks := w.goroutines(t)
	few()
	quiet()
	before, monitor := w.still(t), monitorLoad(t, c)
	working := w.metric(t, "go_goroutines")

	began := time.Now()
	crowd(t, n, func(i int) error { return visit(c, i) })
	t.Logf("%d sessions took %v", n, time.Since(began))
	quiet()
	var now inventory.Load
	// Go keeps the threads that as many runtimes at once have needed.
	settled := waits(creation, func() bool {
		now = w.load(t)
		return now.Total() <= before.Total()+2 && now.Threads <= before.Threads+30
	})
	if !settled {
		t.Errorf("file descriptors went from %d to %d, threads from %d to %d\nbefore: %v\n after: %v",
			before.Total(), now.Total(), before.Threads, now.Threads, before.FDs, now.FDs)
	}
	const margin = 128 << 10 // KiB, for a server with the race detector
	if now.RSSKiB > before.RSSKiB+margin {
		t.Errorf("resident memory went from %d to %d KiB", before.RSSKiB, now.RSSKiB)
	}
	t.Logf("resident memory went from %d to %d KiB", before.RSSKiB, now.RSSKiB)
	var after inventory.Load
	if !eventually(func() bool { after = monitorLoad(t, c); return after.Total() <= monitor.Total() }) {
		t.Errorf("the monitor's file descriptors went from %v to %v", monitor.FDs, after.FDs)
	}
	if after.RSSKiB > monitor.RSSKiB+8<<10 {
		t.Errorf("the monitor's resident memory went from %d to %d KiB", monitor.RSSKiB, after.RSSKiB)
	}
	eventually(func() bool { return w.metric(t, "go_goroutines") <= working+2 }) // those that end have ended
	for kind, n := range w.goroutines(t) {
		if n > stacks[kind]+2 {
			t.Errorf("%d goroutines, before %d, made at %s", n, stacks[kind], kind)
		}
	}
	equal(t, "state of the container", c.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
	if err := w.Clean(t.Context(), things, patience); err != nil {
		t.Error(err)
	}
}

// still waits until the server holds no connection of a session any more, as
// far as its number of descriptors tells: it no longer falls.
func (w *world) still(t *testing.T) inventory.Load {
	t.Helper()
	last, since := w.load(t), time.Now()
	waits(creation, func() bool {
		now := w.load(t)
		if now.Total() < last.Total() || now.Threads < last.Threads {
			since = time.Now()
		}
		last = now
		return time.Since(since) > 500*time.Millisecond
	})
	return last
}

func waits(patience time.Duration, yes func() bool) bool {
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		if yes() {
			return true
		}
	}
	return yes()
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

// rudely picks one of the rude clients by number.
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

// execAddress and attachAddress are for clients that run beside the test.
func (c *container) execAddress(ctx context.Context, line string, change ...execChange) (string, error) {
	resp, err := c.pod.w.Runtime().Exec(ctx, c.execRequest(line, change...))
	return resp.GetUrl(), err
}

func (c *container) attachAddress(ctx context.Context, change ...attachChange) (string, error) {
	resp, err := c.pod.w.Runtime().Attach(ctx, c.attachRequest(change...))
	return resp.GetUrl(), err
}

// ended checks the end of a polite session.
func ended(s *kubelet.Session, want string) error {
	if err := s.Wait(patience); err != nil {
		return err
	}
	if got := s.Stdout.String(); got != want {
		return fmt.Errorf("stdout is %.100q, want %.100q", got, want)
	}
	return nil
}

// Polite clients, clients that leave in the middle, that never read, that talk
// nonsense: nothing remains of any of them.
func TestExecSessionsDoNotLeak_k8s_126608(t *testing.T) {
	t.Parallel()
	everything := kubelet.Wants{Stdin: true, Stdout: true, Stderr: true}
	leavesNothing(t, 1000, "sleep", func(c *container, i int) error {
		ctx, w := t.Context(), c.pod.w
		s := []kubelet.Streams{w.spdy(), w.websocket()}[i/8%2]
		switch i % 8 {
		case 0: // polite
			address, err := c.execAddress(ctx, "line ; echo out", withInput)
			if err != nil {
				return err
			}
			e := s.Open(ctx, address, everything)
			defer e.Leave()
			go e.Type("in\n")
			return ended(e, "got \"in\"\nout\n")
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
		default:
			address, err := c.execAddress(ctx, "cat", withInput)
			if err != nil {
				return err
			}
			return rudely(ctx, i/8*4+i%8, w.spdy(), address)
		}
	})
}

func TestAttachSessionsDoNotLeak_CVE_2025_64329(t *testing.T) {
	t.Parallel()
	everything := kubelet.Wants{Stdin: true, Stdout: true, Stderr: true}
	leavesNothing(t, 1000, "fork 1 lines 1000000000 20ms ; cat", func(c *container, i int) error {
		ctx, w := t.Context(), c.pod.w
		s := []kubelet.Streams{w.spdy(), w.websocket()}[i/8%2]
		address, err := c.attachAddress(ctx, attachInput)
		if err != nil {
			return err
		}
		switch i % 8 {
		case 0, 1: // polite
			e := s.Open(ctx, address, everything)
			defer e.Leave()
			word := fmt.Sprintf("word %d\n", i)
			go e.Type(word)
			if !eventually(func() bool { return strings.Contains(e.Stdout.String(), word) }) {
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
	})
}

func TestPortForwardSessionsDoNotLeak_k8s_57992(t *testing.T) {
	t.Parallel()
	leavesNothing(t, 1000, "tcp 127.0.0.1:7001 echo ; tcp 127.0.0.1:7006 flood ; tcp 127.0.0.1:7007 mute ; sleep", func(c *container, i int) error {
		ctx, w := t.Context(), c.pod.w
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
		case 0: // polite
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
		case 3: // sends much to nobody
			go func() { // the cut ends it
				defer tunnel.Line.Cut()
				tunnel.Line.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
				io.Copy(wire, noise(50_000_000))
			}()
			<-tunnel.Ended()
		case 4: // nobody listens
			if message, err := io.ReadAll(wire.Errors); err != nil || !strings.Contains(string(message), "7999") {
				return fmt.Errorf("the error stream says %q, %v", message, err)
			}
		}
		return nil
	})
}

// A terminal that changes its size ten thousand times, and terminals of
// commands that never begin.
func TestResizesDoNotLeak_CVE_2022_23471(t *testing.T) {
	t.Parallel()
	leavesNothing(t, 60, "sleep", func(c *container, i int) error {
		ctx, w := t.Context(), c.pod.w
		if i%30 == 0 {
			return c.resizeFlood(ctx)
		}
		address, err := c.execAddress(ctx, "", withTerminal, func(r *cri.ExecRequest) { r.Cmd = []string{"/no/such/program"} })
		if err != nil {
			return err
		}
		e := w.spdy().Open(ctx, address, kubelet.Wants{Stdin: true, Stdout: true, TTY: true, Size: kubelet.Size{Width: 90, Height: 40}})
		defer e.Leave()
		for i := range 5 {
			e.Resize(uint16(90+i), 40)
		}
		if err := e.Wait(patience); err == nil || !strings.Contains(err.Error(), "no/such/program") {
			return fmt.Errorf("a missing program: %v", err)
		}
		return nil
	})
}

// resizeFlood sends ten thousand sizes, of which the last must arrive.
func (c *container) resizeFlood(ctx context.Context) error {
	address, err := c.execAddress(ctx, "sizes", withTerminal)
	if err != nil {
		return err
	}
	streams, line, err := c.pod.w.openStreams(ctx, address, "stdin", "stdout", "resize")
	if err != nil {
		return err
	}
	defer line.Close()
	var shown kubelet.Output
	go io.Copy(&shown, streams["stdout"])
	for i := range 10_000 {
		if _, err := fmt.Fprintf(streams["resize"], `{"Width":%d,"Height":50}`+"\n", 10+i%400); err != nil {
			return fmt.Errorf("resize %d: %w", i, err)
		}
	}
	fmt.Fprintln(streams["resize"], `{"Width":0,"Height":-1}`, `{"Width":"wide"}`)
	if !eventually(func() bool { return strings.Contains(shown.Tail(40), "size 409x50") }) {
		return fmt.Errorf("the terminal shows %q, want the last size, 409x50", shown.Tail(100))
	}
	return nil
}

// A client whose input nobody takes is stopped, not stored.
func TestEndlessInputIsNotStored(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	c := w.run(t, "crun").start(t, "sleep", stdin)
	endsWith(t, c.session(t, w.spdy(), "exit 3"), 3)
	before, processes := w.load(t), len(w.processesOf(t, c.id))
	monitor := monitorLoad(t, c)
	var lines []*kubelet.Line
	for _, address := range []string{
		w.execURL(t, c.execRequest("sleep 4s", withInput)), w.attachURL(t, c.attachRequest(attachInput)),
		w.execURL(t, c.execRequest("sleep 4s", withInput)), w.attachURL(t, c.attachRequest(attachInput)),
	} {
		streams, line := w.streamsOf(t, address, "stdin", "stdout", "stderr")
		lines = append(lines, line)
		go io.Copy(streams["stdin"], noise(300<<20))
	}
	most, mostOfMonitor := before.RSSKiB, monitor.RSSKiB
	waits(2*time.Second, func() bool {
		most, mostOfMonitor = max(most, w.load(t).RSSKiB), max(mostOfMonitor, monitorLoad(t, c).RSSKiB)
		return false
	})
	if most > before.RSSKiB+200<<10 {
		t.Errorf("the server's resident memory went from %d to %d KiB", before.RSSKiB, most)
	}
	if mostOfMonitor > monitor.RSSKiB+16<<10 {
		t.Errorf("the monitor's resident memory went from %d to %d KiB", monitor.RSSKiB, mostOfMonitor)
	}
	endsWith(t, c.session(t, w.spdy(), "exit 3"), 3)
	for _, line := range lines {
		line.Cut()
	}
	var now inventory.Load
	if !eventually(func() bool { now = w.load(t); return now.Total() <= before.Total()+2 }) {
		t.Errorf("file descriptors went from %v to %v", before.FDs, now.FDs)
	}
	if !eventually(func() bool { return len(w.processesOf(t, c.id)) == processes }) {
		t.Errorf("processes of the sessions are left: %v", c.facts(t).Processes)
	}
}

// Frames that announce or unpack to more than any client needs.
func TestOversizeSPDYFrames_CVE_2026_35469(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	p := w.run(t, "crun")
	c := p.start(t, "sleep")
	endsWith(t, c.session(t, w.spdy(), "exit 3"), 3)
	before, pid := w.load(t).RSSKiB, w.PID()
	settings := []byte{0x80, 3, 0, 4, 0, 0, 0, 12, 0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0}
	largest := []byte{0x80, 3, 0, 1, 0, 0xff, 0xff, 0xff}
	most := before
	for name, send := range map[string]func(line *kubelet.Line) error{
		"settings without end": func(line *kubelet.Line) error { _, err := line.Write(settings); return err },
		"the largest control frame": func(line *kubelet.Line) error {
			line.Write(largest)
			_, err := io.Copy(line.TCPConn, noise(16<<20))
			return err
		},
		"headers that unpack to much": func(line *kubelet.Line) error {
			f, err := spdyframes.NewFramer(line.TCPConn, line.TCPConn)
			if err != nil {
				return err
			}
			return f.WriteFrame(&spdyframes.SynStreamFrame{StreamId: 1, Headers: http.Header{"Streamtype": {strings.Repeat("a", 128<<20)}}})
		},
		"many streams": func(line *kubelet.Line) error {
			f, err := spdyframes.NewFramer(line.TCPConn, line.TCPConn)
			for i := 0; i < 20_000 && err == nil; i++ {
				err = f.WriteFrame(&spdyframes.SynStreamFrame{StreamId: spdyframes.StreamId(2*i + 1), Headers: http.Header{"Streamtype": {"error"}, "Port": {"80"}}})
			}
			return err
		},
	} {
		for _, address := range []string{w.execURL(t, c.execRequest("cat", withInput)), p.forwardURL(t)} {
			line, err := w.spdy().Dial(t.Context(), address)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(line.Cut)
			if _, err := line.Upgrade(address, "SPDY/3.1", http.Header{"X-Stream-Protocol-Version": {"v4.channel.k8s.io", "portforward.k8s.io"}}); err != nil {
				t.Fatal(err)
			}
			line.SetDeadline(time.Now().Add(2 * time.Second))
			if err := send(line); err != nil {
				t.Logf("%s: the server took not all: %v", name, err)
			}
			most = max(most, w.load(t).RSSKiB)
		}
	}
	endsWith(t, c.session(t, w.spdy(), "exit 3"), 3)
	most = max(most, w.load(t).RSSKiB)
	equal(t, "process id of the server", w.PID(), pid)
	if most > before+400<<10 {
		t.Errorf("the server's resident memory went from %d to %d KiB", before, most)
	}
	t.Logf("resident memory went from %d to at most %d KiB", before, most)
}

// Clients that have connected and say nothing, or nothing whole, keep nobody
// else from being served.
func TestSlowClientsKeepNobodyWaiting(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	c := p.start(t, "tcp 127.0.0.1:7001 echo ; echo ready ; sleep")
	c.says(t, "ready")
	for i := range 100 {
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
