package integration

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

type attachChange = func(*cri.AttachRequest)

func attachInput(r *cri.AttachRequest) { r.Stdin = true }

// attachRequest requests the container's streams: both outputs, or its
// terminal.
func (c *container) attachRequest(change ...attachChange) *cri.AttachRequest {
	r := &cri.AttachRequest{ContainerId: c.id, Stdout: true, Stderr: !c.config.Tty, Tty: c.config.Tty}
	for _, f := range change {
		f(r)
	}
	return r
}

func (w *world) attachURL(t *testing.T, r *cri.AttachRequest) string {
	t.Helper()
	resp, err := w.Runtime().Attach(t.Context(), r)
	if err != nil {
		t.Fatalf("Attach: %v", err)
	}
	return resp.Url
}

// attach opens a session, which ends with the test.
func (c *container) attach(t *testing.T, s kubelet.Streams, change ...attachChange) *kubelet.Session {
	t.Helper()
	return c.attachSized(t, s, kubelet.Size{}, change...)
}

func (c *container) attachSized(t *testing.T, s kubelet.Streams, size kubelet.Size, change ...attachChange) *kubelet.Session {
	t.Helper()
	r := c.attachRequest(change...)
	out := s.Open(t.Context(), c.pod.w.attachURL(t, r), kubelet.Wants{
		Stdin: r.Stdin, Stdout: r.Stdout, Stderr: r.Stderr, TTY: r.Tty, Size: size,
	})
	t.Cleanup(out.Leave)
	return out
}

// stdin gives a container an input that stays open, once one that ends with the
// first session; terminal gives it a terminal, too.
func stdin(c *cri.ContainerConfig)    { c.Stdin = true }
func once(c *cri.ContainerConfig)     { c.Stdin, c.StdinOnce = true, true }
func terminal(c *cri.ContainerConfig) { c.Stdin, c.Tty = true, true }

// meet types lines into a session until each of the others shows one: then all
// are attached. The container must be a cat.
func meet(t *testing.T, typing *kubelet.Session, others ...*kubelet.Session) {
	t.Helper()
	for i, s := range append(others, typing) {
		word := fmt.Sprintf("are-you-there-%d\n", i)
		if !wait.Until(t.Context(), func() bool { typed(t, typing, word); return strings.Contains(s.Stdout.String(), word) }) {
			t.Fatalf("session %d shows nothing of what the container writes, but %q; ended: %v", i, s.Stdout.String(), s.Wait(0))
		}
	}
}

func TestAttachedSessionsSeeTheSame(t *testing.T) {
	t.Parallel()
	w := shared(t)
	c := w.run(t, "crun").start(t, "echo before ; cat", stdin)
	c.says(t, "before")
	typing := c.attach(t, w.spdy(), attachInput)
	others := []*kubelet.Session{c.attach(t, w.spdy()), c.attach(t, w.websocket()), c.attach(t, w.websocket())}
	meet(t, typing, others...)
	for i := range 100 {
		typed(t, typing, fmt.Sprintf("line %d\n", i))
	}
	var want strings.Builder
	for i := range 100 {
		fmt.Fprintf(&want, "line %d\n", i)
	}
	for _, s := range append(others, typing) {
		shows(t, s, "line 99\n")
		if !strings.HasSuffix(s.Stdout.String(), want.String()) {
			t.Errorf("a session shows %q", s.Stdout.Tail(2000))
		}
		if strings.Contains(s.Stdout.String(), "before") {
			t.Error("a session shows output from before it was attached")
		}
	}
	c.says(t, want.String()) // the log has it nevertheless
}

func TestAttachTellsStreamsApart(t *testing.T) {
	t.Parallel()
	w := shared(t)
	w.eachTransport(t, func(t *testing.T, s kubelet.Streams, _ string) {
		p := w.run(t, "crun")
		c := p.start(t, "line ; echo -err problem ; echo fine ; noise -err 300000 ; exit 4", stdin)
		both := c.attach(t, s, attachInput)
		typed(t, both, "go\n")
		if err := both.Wait(wait.Limit); err != nil {
			t.Errorf("the session of a container that exits ended with %v", err)
		}
		equal(t, "stdout", both.Stdout.String(), "got \"go\"\nfine\n")
		equal(t, "length of stderr", len(both.Stderr.String()), len("problem\n")+300000)
		equal(t, "exit code", c.wait(t).ExitCode, 4)

		c = p.start(t, "line ; echo -err problem ; echo fine", stdin)
		out := c.attach(t, s, attachInput, func(r *cri.AttachRequest) { r.Stderr = false })
		typed(t, out, "go\n")
		if err := out.Wait(wait.Limit); err != nil {
			t.Errorf("the session for stdout ended with %v", err)
		}
		equal(t, "stdout alone", out.Stdout.String(), "got \"go\"\nfine\n")

		c = p.start(t, "line ; echo -err problem ; echo fine", stdin)
		err := c.attach(t, s, attachInput, func(r *cri.AttachRequest) { r.Stdout = false })
		typed(t, err, "go\n")
		if err := err.Wait(wait.Limit); err != nil {
			t.Errorf("the session for stderr ended with %v", err)
		}
		equal(t, "stderr alone", err.Stderr.String(), "problem\n")
	})
}

// A session loses nothing of the last output.
func TestAttachEndsWithTheContainer(t *testing.T) {
	t.Parallel()
	w := shared(t)
	const size = 900_000 // no client is dropped that is at most this far behind
	w.eachTransport(t, func(t *testing.T, s kubelet.Streams, _ string) {
		c := w.run(t, "crun").start(t, fmt.Sprintf("line ; noise %d ; exit 4", size), stdin, func(c *cri.ContainerConfig) { c.LogPath = "" })
		e := c.attach(t, s, attachInput)
		typed(t, e, "go\n")
		if err := e.Wait(wait.Limit); err != nil {
			t.Errorf("the session ended with %v", err)
		}
		head := "got \"go\"\n"
		out := e.Stdout.String()
		if !strings.HasPrefix(out, head) {
			t.Fatalf("stdout begins with %.40q", out)
		}
		equal(t, "sum of the rest", sum(out[len(head):]), noiseSum(size))
		equal(t, "exit code", c.wait(t).ExitCode, 4)
	})
	c := w.run(t, "crun").start(t, "cat", stdin)
	e := c.attach(t, w.spdy(), attachInput)
	meet(t, e)
	c.stop(t, 0)
	if err := e.Wait(wait.Limit); err != nil {
		t.Errorf("the session of a container that was stopped ended with %v", err)
	}
}

func TestStdinOnceEndsWithTheFirstSession(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	t.Run("its input ends", func(t *testing.T) {
		c := p.start(t, "digest ; exit 3", once)
		e := c.attach(t, w.spdy(), attachInput)
		if err := e.Send(noise(1 << 20)); err != nil {
			t.Fatal(err)
		}
		e.EndInput()
		if err := e.Wait(wait.Limit); err != nil {
			t.Errorf("the session ended with %v", err)
		}
		equal(t, "what the container read", e.Stdout.String(), noiseSum(1<<20)+"\n")
		equal(t, "exit code", c.wait(t).ExitCode, 3)
	})
	w.eachTransport(t, func(t *testing.T, s kubelet.Streams, _ string) {
		c := p.start(t, "line ; line ; exit 3", once)
		e := c.attach(t, s, attachInput)
		typed(t, e, "hello\n")
		shows(t, e, `got "hello"`)
		e.Leave()
		equal(t, "exit code", c.wait(t).ExitCode, 3)
		equal(t, "what the container read", c.output(t), "got \"hello\"\nend of input\n")
	})
	t.Run("a session without input does not count", func(t *testing.T) {
		c := p.start(t, "line ; line ; exit 3", once)
		looking := c.attach(t, w.spdy())
		e := c.attach(t, w.spdy(), attachInput)
		typed(t, e, "one\n")
		shows(t, e, `got "one"`)
		looking.Leave()
		typed(t, e, "two\n")
		equal(t, "exit code", c.wait(t).ExitCode, 3)
		equal(t, "what the container read", c.output(t), "got \"one\"\ngot \"two\"\n")
	})
}

// kubectl run -i --attach --leave-stdin-open, and kubectl attach -i to the
// result, end with their input. The container's answer comes first.
func TestAttachEndsWithTheClientsInput(t *testing.T) {
	t.Parallel()
	w := shared(t)
	big, err := io.ReadAll(noise(768 << 10)) // a client may be behind by 1 MiB on any machine
	must(t, err)
	w.eachTransport(t, func(t *testing.T, s kubelet.Streams, handler string) {
		p := w.run(t, handler)
		wait.Retry(t, func() error { // the server keeps a client for one second after its input
			c := p.start(t, "cat", stdin)
			for i, text := range []string{"abcd1234", string(big), "", "last\n"} {
				e := c.attach(t, s, attachInput)
				if err := e.Send(strings.NewReader(text)); err != nil {
					t.Fatal(err)
				}
				e.EndInput()
				if err := e.Wait(wait.Limit); err != nil {
					t.Fatalf("session %d ended with %v", i, err)
				}
				if shown := e.Stdout.String(); shown != text {
					return fmt.Errorf("session %d shows %d bytes with the sum %v, want %d with %v", i, len(shown), sum(shown), len(text), sum(text))
				}
			}
			equal(t, "state", c.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
			return nil
		})
	})
}

func TestAttachedTerminalEndsWithTheClientsInput(t *testing.T) {
	t.Parallel()
	w := shared(t)
	w.eachTransport(t, func(t *testing.T, s kubelet.Streams, handler string) {
		for name, change := range map[string]func(*cri.ContainerConfig){"kept open": func(*cri.ContainerConfig) {}, "once": once} {
			p := w.run(t, handler)
			wait.Retry(t, func() error { // see above
				c := p.start(t, "cat", terminal, change)
				for range 2 {
					e := c.attach(t, s, attachInput)
					typed(t, e, "hello\n")
					e.EndInput()
					if err := e.Wait(wait.Limit); err != nil {
						t.Fatalf("%s: the session ended with %v", name, err)
					}
					if shown := e.Stdout.String(); shown != "hello\r\nhello\r\n" {
						return fmt.Errorf("%s: echo and answer are %q", name, shown)
					}
				}
				equal(t, name+": state", c.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
				return nil
			})
		}
	})
}

// After the end of a client's input, neither a container that does not read it
// nor one that never stops writing keeps the client connected; but a container
// without an input does, and a client without an input stays, too.
func TestAttachedClientStaysOnlyWithoutInput(t *testing.T) {
	t.Parallel()
	w := shared(t)
	w.eachTransport(t, func(t *testing.T, s kubelet.Streams, handler string) {
		p := w.run(t, handler)
		for _, steps := range []string{"sleep", "lines 100000000 1ms"} {
			c := p.start(t, steps, stdin)
			watching := c.attach(t, s)
			e := c.attach(t, s, attachInput)
			typed(t, e, "unread\n")
			e.EndInput()
			if err := e.Wait(wait.Limit); err != nil {
				t.Errorf("%s: the session ended with %v", steps, err)
			}
			select {
			case <-watching.Done():
				t.Errorf("%s: the session without input has ended", steps)
			default:
			}
		}
		c := p.start(t, "lines 100000000 1ms")
		e := c.attach(t, s, attachInput)
		e.EndInput()
		shows(t, e, "line 4000\n") // more seconds than a client is kept otherwise
	})
}

func TestStdinStaysOpenOverSessions(t *testing.T) {
	t.Parallel()
	w := shared(t)
	c := w.run(t, "crun").start(t, "line ; line ; line ; line ; exit 3", stdin)
	var want strings.Builder
	for i, end := range []func(*kubelet.Session){(*kubelet.Session).EndInput, (*kubelet.Session).Leave, (*kubelet.Session).EndInput} {
		e := c.attach(t, w.spdy(), attachInput)
		typed(t, e, fmt.Sprintf("of %d\n", i))
		fmt.Fprintf(&want, "got \"of %d\"\n", i)
		shows(t, e, fmt.Sprintf(`got "of %d"`, i))
		end(e)
	}
	e := c.attach(t, w.websocket(), attachInput)
	typed(t, e, "last\n")
	equal(t, "exit code", c.wait(t).ExitCode, 3)
	equal(t, "what the container read", c.output(t), want.String()+"got \"last\"\n")
}

func TestAttachToATerminal(t *testing.T) {
	t.Parallel()
	w := shared(t)
	w.eachTransport(t, func(t *testing.T, s kubelet.Streams, handler string) {
		c := w.run(t, handler).start(t, "sizes", terminal)
		e := c.attachSized(t, s, kubelet.Size{Width: 101, Height: 41}, attachInput)
		c.says(t, "size 101x41")
		e.Resize(77, 33)
		c.says(t, "size 77x33")
		shows(t, e, "size 77x33\r\n")
		e.Leave()

		e = c.attach(t, s, attachInput)
		e.Resize(60, 20)
		shows(t, e, "size 60x20\r\n")
		typed(t, e, "\x03")
		if err := e.Wait(wait.Limit); err != nil {
			t.Errorf("the session of an interrupted container ended with %v", err)
		}
		equal(t, "exit code after ^C", c.wait(t).ExitCode, 130)
	})
}

func TestAttachWithInputToAContainerWithoutInput(t *testing.T) {
	t.Parallel()
	w := shared(t)
	c := w.run(t, "crun").start(t, "digest ; lines 100000000 1ms")
	w.eachTransport(t, func(t *testing.T, s kubelet.Streams, _ string) {
		e := c.attach(t, s, attachInput)
		shows(t, e, "line ")
		sent := make(chan error, 1)
		go func() { sent <- e.Send(noise(2 << 20)) }()
		if err := scene.Receive(t, "input that nobody reads to be taken", sent); err != nil {
			t.Errorf("input that is dropped: %v", err)
		}
		n := len(e.Stdout.String())
		wait.For(t, "output after the dropped input", func() bool { return len(e.Stdout.String()) > n })
	})
	c.says(t, sum("")+"\n")
}

// kubectl attach > file: a container that writes as fast as it can, and its client.
func TestAttachOfAFlood(t *testing.T) {
	t.Parallel()
	w := shared(t)
	const size = 32 << 20
	w.eachTransport(t, func(t *testing.T, s kubelet.Streams, handler string) {
		c := w.run(t, handler).start(t, fmt.Sprintf("line ; noise %d ; exit 3", size), stdin)
		e := c.attach(t, s, attachInput)
		typed(t, e, "go\n") // by which the client is known to be attached
		if err := e.Wait(wait.Limit); err != nil {
			t.Errorf("the session ended with %v", err)
		}
		equal(t, "sum of what is shown", sum(strings.TrimPrefix(e.Stdout.String(), "got \"go\"\n")), noiseSum(size))
		equal(t, "exit code", c.wait(t).ExitCode, 3)
	})
}

// A terminal that is paused (Ctrl-S), a laptop that sleeps: the container waits for its
// client, which then gets every byte.
func TestAttachedClientThatPausesGetsEverything(t *testing.T) {
	t.Parallel()
	w := shared(t)
	const lines = 700_000 // more than all buffers on the way hold
	for i, kind := range []struct {
		name   string
		change func(*cri.ContainerConfig)
		s      kubelet.Streams
		end    string
	}{{"terminal", terminal, w.websocket(), "\r\n"}, {"pipe", stdin, w.spdy(), "\n"}} {
		t.Run(kind.name, func(t *testing.T) {
			c := w.run(t, handlers[i]).start(t, fmt.Sprintf("line ; lines %d ; exit 3", lines), kind.change)
			resumed := make(chan struct{})
			r := c.attachRequest(attachInput)
			e := kind.s.Open(t.Context(), w.attachURL(t, r), kubelet.Wants{Stdin: true, Stdout: true, Stderr: r.Stderr, TTY: r.Tty, Paused: resumed})
			t.Cleanup(e.Leave)
			typed(t, e, "go\n")
			wait.For(t, "output that the client does not read", func() bool {
				info, err := os.Stat(c.logFile())
				return err == nil && info.Size() > 3<<20
			})
			close(resumed)
			if err := e.Wait(wait.Limit); err != nil {
				t.Errorf("the session ended with %v", err)
			}
			var want strings.Builder
			for n := range lines {
				fmt.Fprint(&want, "line ", n+1, kind.end)
			}
			_, got, _ := strings.Cut(e.Stdout.String(), `got "go"`+kind.end)
			equal(t, "sum of what is shown", sum(got), sum(want.String()))
			equal(t, "exit code", c.wait(t).ExitCode, 3)
		})
	}
}

// neverWaits has containers that wait for no client.
func neverWaits(t *testing.T) *world {
	t.Helper()
	return private(t, node.Options{Config: "[runtime]\ncontainer_attach_wait = \"0\"\n"})
}

// A client that reads nothing is dropped. The container continues to write and
// is logged, and other clients continue to read.
func TestAttachThatIsNotReadDoesNotStopTheLog(t *testing.T) {
	t.Parallel()
	w := neverWaits(t)
	const size = wire.MostBehind + 6<<20 // more than all buffers on the way hold
	c := w.run(t, "crun").start(t, "cat", stdin)
	streams, line := w.streamsOf(t, w.attachURL(t, c.attachRequest()), "stdout", "stderr")
	defer line.Cut()
	must(t, line.SetReadBuffer(64<<10))
	reading := c.attach(t, w.spdy(), attachInput)
	var seen atomic.Bool
	go func() {
		if n, _ := streams["stdout"].Read(make([]byte, 100)); n > 0 {
			line.Freeze()
			seen.Store(true)
		}
	}()
	wait.For(t, "the client that will freeze to see output", func() bool { typed(t, reading, "here\n"); return seen.Load() })
	typed(t, reading, "now\n")
	piece := strings.Repeat("0123456789abcde\n", 1<<14)
	var want strings.Builder
	for want.Len() < size {
		end := fmt.Sprintf("after %d bytes\n", want.Len())
		typed(t, reading, piece+end)
		want.WriteString(piece + end)
		if !wait.Until(t.Context(), func() bool { return reading.Stdout.Tail(len(end)) == end }) {
			t.Fatalf("the client that reads does not get to %q, but to %.100q", end, reading.Stdout.Tail(50))
		}
	}
	_, out, _ := strings.Cut(reading.Stdout.String(), "now\n")
	equal(t, "sum of what the other client has read", sum(out), sum(want.String()))
	_, logged, _ := strings.Cut(c.output(t), "now\n")
	equal(t, "sum of the log", sum(logged), sum(want.String()))

	must(t, line.SetReadDeadline(time.Now().Add(wait.Limit)))
	const why = "too slowly"
	for last := ""; ; { // skip the output that was on the way
		more := make([]byte, 64<<10)
		n, err := line.TCPConn.Read(more)
		if last += string(more[:n]); strings.Contains(last, why) {
			return
		}
		if err != nil {
			t.Fatalf("the client that does not read is not told why it was dropped, but: %v", err)
		}
		last = last[max(0, len(last)-len(why)):]
	}
}

// kubectl attach -i with a file: all of the input arrives, although the answers come
// faster than they can be shown, and the log and the client have all of them.
func TestAttachTakesAllOfTheInput(t *testing.T) {
	t.Parallel()
	w := shared(t)
	const size = wire.MostBehind + 4<<20
	text := strings.Repeat("0123456789abcde\n", size/16)
	for handler, s := range map[string]kubelet.Streams{"runc": w.spdy(), "crun": w.websocket()} {
		t.Run(handler, func(t *testing.T) {
			c := w.run(t, handler).start(t, "cat", once)
			e := c.attach(t, s, attachInput)
			if err := e.Send(strings.NewReader(text)); err != nil {
				t.Fatalf("%v; the session ended with %v", err, e.Wait(0))
			}
			e.EndInput()
			if err := e.Wait(wait.Limit); err != nil {
				t.Errorf("the session ended with %v", err)
			}
			equal(t, "exit code", c.wait(t).ExitCode, 0)
			equal(t, "sum of what is shown", sum(e.Stdout.String()), sum(text))
			equal(t, "sum of the log", sum(c.output(t)), sum(text))
		})
	}
}

// A client that reads nothing of a flood loses that, and none of its input.
func TestAttachThatIsNotReadTakesAllOfTheInput(t *testing.T) {
	t.Parallel()
	w := neverWaits(t)
	const size = 3 << 20
	for i, change := range []func(*cri.ContainerConfig){once, stdin} {
		c := w.run(t, handlers[i]).start(t, fmt.Sprintf("line ; noise %d ; await /tmp/go ; cat", wire.MostBehind+6<<20), change)
		r := c.attachRequest(attachInput)
		e := w.spdy().Open(t.Context(), w.attachURL(t, r), kubelet.Wants{Stdin: true, Stdout: true, Stderr: true, Unread: true})
		t.Cleanup(e.Leave)
		sent := make(chan error, 1)
		go func() {
			sent <- e.Send(strings.NewReader("go\n" + strings.Repeat("0123456789abcde\n", size/16)))
			e.EndInput()
		}()
		c.exec(t, "write /tmp/go now")
		must(t, scene.Receive(t, "the input to be taken", sent))
		end := strings.Repeat("0123456789abcde\n", size/16)
		wait.For(t, "all of the input in the log", func() bool { return strings.HasSuffix(c.output(t), end) })
		if i == 0 {
			equal(t, "exit code", c.wait(t).ExitCode, 0)
		}
	}
}

func TestAttachErrors(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	running, created, exited := p.start(t, "sleep"), p.create(t, "sleep"), p.start(t, "exit 0")
	exited.wait(t)
	for name, c := range map[string]struct {
		of     *container
		change attachChange
		code   codes.Code
		word   string
	}{
		"unknown":        {running, func(r *cri.AttachRequest) { r.ContainerId = "no-such-container" }, codes.NotFound, "no-such-container"},
		"no id":          {running, func(r *cri.AttachRequest) { r.ContainerId = "" }, codes.InvalidArgument, ""},
		"created":        {created, func(*cri.AttachRequest) {}, codes.FailedPrecondition, created.id[:12]},
		"exited":         {exited, func(*cri.AttachRequest) {}, codes.FailedPrecondition, exited.id[:12]},
		"tty and stderr": {running, func(r *cri.AttachRequest) { r.Tty = true }, codes.InvalidArgument, "stderr"},
		"no stream":      {running, func(r *cri.AttachRequest) { r.Stdout, r.Stderr = false, false }, codes.InvalidArgument, "std"},
	} {
		resp, err := w.Runtime().Attach(t.Context(), c.of.attachRequest(c.change))
		if err == nil {
			t.Errorf("%s: the URL is %s, want %v", name, resp.Url, c.code)
			continue
		}
		t.Run(name, func(t *testing.T) { wantCode(t, err, c.code, c.word) })
	}
}
