package integration

import (
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/gorilla/websocket"
	"google.golang.org/grpc/codes"
	utilexec "k8s.io/client-go/util/exec"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/streaming/pkg/httpstream"

	"github.com/crius-run/crius/test/images/facts"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// spdy and websocket are clients in the network of the node's server. Clients
// newer than these versions are translated by the kubelet.
func (w *world) spdy() kubelet.Streams { return kubelet.Streams{Within: w.Do} }

func (w *world) websocket() kubelet.Streams {
	return kubelet.Streams{Within: w.Do, WebSocket: true, Protocols: []string{"v5.channel.k8s.io", "v4.channel.k8s.io"}}
}

// eachTransport runs a test over SPDY and over WebSocket, each with another
// runtime, because transport and runtime are independent.
func (w *world) eachTransport(t *testing.T, test func(t *testing.T, s kubelet.Streams, handler string)) {
	t.Helper()
	t.Run("SPDY", func(t *testing.T) { test(t, w.spdy(), handlers[0]) })
	t.Run("WebSocket", func(t *testing.T) { test(t, w.websocket(), handlers[1]) })
}

type execChange = func(*cri.ExecRequest)

// withTerminal and withInput change a request for Exec.
func withTerminal(r *cri.ExecRequest) { r.Tty, r.Stdin, r.Stderr = true, true, false }
func withInput(r *cri.ExecRequest)    { r.Stdin = true }

// execRequest requests a probe with both output streams.
func (c *container) execRequest(line string, change ...execChange) *cri.ExecRequest {
	r := &cri.ExecRequest{ContainerId: c.id, Cmd: append([]string{"/probe"}, steps(line)...), Stdout: true, Stderr: true}
	for _, f := range change {
		f(r)
	}
	return r
}

func (w *world) execURL(t *testing.T, r *cri.ExecRequest) string {
	t.Helper()
	resp, err := w.Runtime().Exec(t.Context(), r)
	if err != nil {
		t.Fatalf("Exec: %v", err)
	}
	return resp.Url
}

// session opens an exec session, which ends with the test.
func (c *container) session(t *testing.T, s kubelet.Streams, line string, change ...execChange) *kubelet.Session {
	t.Helper()
	return c.sessionOf(t, s, kubelet.Wants{}, line, change...)
}

func (c *container) sessionOf(t *testing.T, s kubelet.Streams, w kubelet.Wants, line string, change ...execChange) *kubelet.Session {
	t.Helper()
	r := c.execRequest(line, change...)
	w.Stdin, w.Stdout, w.Stderr, w.TTY = r.Stdin, r.Stdout, r.Stderr, r.Tty
	out := s.Open(t.Context(), c.pod.w.execURL(t, r), w)
	t.Cleanup(out.Leave)
	return out
}

// shows waits for text on a session's standard output.
func shows(t *testing.T, s *kubelet.Session, text string) {
	t.Helper()
	over := false
	found := wait.Until(t.Context(), func() bool {
		if strings.Contains(s.Stdout.String(), text) {
			return true
		}
		select {
		case <-s.Done():
			over = true
		default:
		}
		return over
	})
	if !found || !strings.Contains(s.Stdout.String(), text) {
		why := "the session goes on"
		if over {
			why = fmt.Sprintf("the session ended: %v", s.Wait(0))
		}
		t.Fatalf("the session never showed %q, but %q and on stderr %q; %s", text, s.Stdout.Tail(300), s.Stderr.Tail(300), why)
	}
}

// typed sends text.
func typed(t *testing.T, s *kubelet.Session, text string) {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- s.Type(text) }()
	if err := scene.Receive(t, fmt.Sprintf("%q to be taken from standard input", text), done); err != nil {
		t.Fatalf("typing %q: %v; the session: %v", text, err, s.Wait(0))
	}
}

// endsWith checks how a session ends: code 0 without an error, any other as
// kubectl reads it.
func endsWith(t *testing.T, s *kubelet.Session, code int) {
	t.Helper()
	err := s.Wait(wait.Limit)
	if code == 0 && err == nil {
		return
	}
	var exit utilexec.CodeExitError
	if !errors.As(err, &exit) || exit.Code != code {
		t.Errorf("the session ended with %v (%T), want exit code %d; stderr: %q", err, err, code, s.Stderr.Tail(300))
	}
}

// noise returns what the probe's verb noise prints, and sum what digest prints.
func noise(n int64) io.Reader { return io.LimitReader(rand.NewChaCha8([32]byte{}), n) }

func noiseSum(n int64) string {
	h := sha256.New()
	io.Copy(h, noise(n))
	return fmt.Sprintf("%d %x", n, h.Sum(nil))
}

func sum(text string) string { return fmt.Sprintf("%d %x", len(text), sha256.Sum256([]byte(text))) }

func TestExec(t *testing.T) {
	t.Parallel()
	w := shared(t)
	w.eachTransport(t, func(t *testing.T, s kubelet.Streams, handler string) {
		c := w.run(t, handler).start(t, "sleep", func(c *cri.ContainerConfig) {
			c.WorkingDir = "/tmp"
			c.Envs = []*cri.KeyValue{{Key: "SET", Value: []byte("here")}}
			c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: 1001}
		})
		e := c.session(t, s, "echo out ; echo -err err ; exit 7")
		endsWith(t, e, 7)
		equal(t, "stdout", e.Stdout.String(), "out\n")
		equal(t, "stderr", e.Stderr.String(), "err\n")
		endsWith(t, c.session(t, s, "exit 0"), 0)
		endsWith(t, c.session(t, s, "exit 255"), 255)
		endsWith(t, c.session(t, s, "suicide KILL"), 137)
		for name, terminal := range map[string]execChange{"pipes": withInput, "terminal": withTerminal} {
			e := c.session(t, s, "facts", terminal)
			endsWith(t, e, 0)
			f, err := facts.Parse([]byte(e.Stdout.String()))
			if err != nil {
				t.Fatalf("%s: %v: %q", name, err, e.Stdout.String())
			}
			equal(t, name+": working directory", f.Cwd, "/tmp")
			equal(t, name+": uid", f.UID, 1001)
			equal(t, name+": number of descriptors beyond the standard ones", leakedFDs(f.FDs), 0)
			if v, _ := f.Getenv("SET"); v != "here" {
				t.Errorf("%s: environment %v lacks the container's", name, f.Env)
			}
		}
	})
}

func TestExecOfOneStreamOnly(t *testing.T) {
	t.Parallel()
	w := shared(t)
	c := w.run(t, "crun").start(t, "sleep")
	w.eachTransport(t, func(t *testing.T, s kubelet.Streams, _ string) {
		out := c.session(t, s, "echo out ; echo -err err ; exit 2", func(r *cri.ExecRequest) { r.Stderr = false })
		endsWith(t, out, 2)
		equal(t, "stdout alone", out.Stdout.String(), "out\n")
		err := c.session(t, s, "echo out ; echo -err err ; exit 3", func(r *cri.ExecRequest) { r.Stdout = false })
		endsWith(t, err, 3)
		equal(t, "stderr alone", err.Stderr.String(), "err\n")
	})
	file := "/tmp/from-input"
	in := c.session(t, w.spdy(), "digest ; write "+file+" seen", func(r *cri.ExecRequest) { r.Stdin, r.Stdout, r.Stderr = true, false, false })
	typed(t, in, "only input")
	in.EndInput()
	endsWith(t, in, 0)
	equal(t, "what the process wrote", c.exec(t, "cat "+file), "seen")
}

func TestExecOutputIsCompleteAndInOrder(t *testing.T) {
	t.Parallel()
	w := shared(t)
	const much, less = 1 << 20, 1 << 19
	c := w.run(t, "crun").start(t, "sleep")
	w.eachTransport(t, func(t *testing.T, s kubelet.Streams, _ string) {
		e := c.session(t, s, fmt.Sprintf("noise %d ; noise -err %d ; exit 3", much, less))
		endsWith(t, e, 3)
		equal(t, "sum of stdout", sum(e.Stdout.String()), noiseSum(much))
		equal(t, "sum of stderr", sum(e.Stderr.String()), noiseSum(less))

		e = c.session(t, s, "bytes 300000 79", withTerminal)
		endsWith(t, e, 0)
		checkNumbered(t, strings.ReplaceAll(e.Stdout.String(), "\r", ""), 300000)
	})
	// Nothing of a short output may be lost, however soon its process ends.
	for i := range 10 {
		e := c.session(t, w.spdy(), fmt.Sprintf("echo %d ; exit %d", i, i))
		endsWith(t, e, i)
		equal(t, "stdout", e.Stdout.String(), fmt.Sprintln(i))
	}
}

func TestExecInput(t *testing.T) {
	t.Parallel()
	w := shared(t)
	const size = 1 << 20
	c := w.run(t, "crun").start(t, "sleep")
	t.Run("its end reaches the process", func(t *testing.T) {
		e := c.session(t, w.spdy(), "digest ; echo after ; exit 4", withInput)
		if err := e.Send(noise(size)); err != nil {
			t.Fatal(err)
		}
		e.EndInput()
		endsWith(t, e, 4)
		equal(t, "stdout", e.Stdout.String(), noiseSum(size)+"\nafter\n")
	})
	t.Run("both ways at once", func(t *testing.T) {
		e := c.session(t, w.spdy(), "cat", withInput)
		if err := e.Send(noise(size)); err != nil {
			t.Fatal(err)
		}
		e.EndInput()
		endsWith(t, e, 0)
		equal(t, "sum of what came back", sum(e.Stdout.String()), noiseSum(size))
	})
	t.Run("a message of many frames", func(t *testing.T) {
		conn, _, err := kubelet.Streams{Within: w.Do}.RawWebSocket(t.Context(), w.execURL(t, c.execRequest("line ; exit 5", withInput)), "v4.channel.k8s.io")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		text := strings.Repeat("0123456789", 2000) // its client makes frames of 4 KiB
		if err := conn.WriteMessage(websocket.BinaryMessage, []byte("\x00"+text+"\n")); err != nil {
			t.Fatal(err)
		}
		equal(t, "stdout", readChannels(t, conn, false)[1], fmt.Sprintf("got %q\n", text))
	})
	t.Run("none means none", func(t *testing.T) {
		e := c.session(t, w.spdy(), "digest")
		endsWith(t, e, 0)
		equal(t, "input of an exec without stdin", e.Stdout.String(), sum("")+"\n")
	})
	t.Run("unread at the end", func(t *testing.T) {
		e := c.session(t, w.spdy(), "line ; exit 6", withInput)
		typed(t, e, "first\n")
		go e.Send(noise(size))
		endsWith(t, e, 6)
	})
	w.eachTransport(t, func(t *testing.T, s kubelet.Streams, _ string) {
		e := c.session(t, s, "line ; line ; exit 5", withInput)
		typed(t, e, "one\n")
		shows(t, e, `got "one"`)
		typed(t, e, "two\n")
		endsWith(t, e, 5)
		equal(t, "stdout", e.Stdout.String(), "got \"one\"\ngot \"two\"\n")
	})
}

func TestExecWithATerminal(t *testing.T) {
	t.Parallel()
	w := shared(t)
	w.eachTransport(t, func(t *testing.T, s kubelet.Streams, handler string) {
		c := w.run(t, handler).start(t, "sleep")
		e := c.sessionOf(t, s, kubelet.Wants{Size: kubelet.Size{Width: 101, Height: 41}}, "sizes", withTerminal)
		shows(t, e, "size 101x41\r\n")
		e.Resize(77, 33)
		shows(t, e, "size 77x33\r\n")
		e.Resize(500, 200)
		shows(t, e, "size 500x200\r\n")
		typed(t, e, "\x03") // ^C interrupts the foreground process
		endsWith(t, e, 130)

		e = c.session(t, s, "line ; echo -err to-the-terminal ; exit 5", withTerminal)
		typed(t, e, "typed\r")
		endsWith(t, e, 5)
		for _, want := range []string{"typed\r\n", "got \"typed\"\r\n", "to-the-terminal\r\n"} {
			if !strings.Contains(e.Stdout.String(), want) {
				t.Errorf("the terminal shows %q without %q", e.Stdout.String(), want)
			}
		}
		e = c.session(t, s, "cat ; exit 6", withTerminal)
		typed(t, e, "\x04") // ^D is a terminal's end of input
		endsWith(t, e, 6)
	})
}

// Each version of the protocol reports the end in its own way; all of them
// carry the output.
func TestExecSpeaksEveryVersionOfSPDY(t *testing.T) {
	t.Parallel()
	w := shared(t)
	c := w.run(t, "crun").start(t, "sleep")
	for _, offer := range [][]string{
		{"v5.channel.k8s.io", "v4.channel.k8s.io", "v3.channel.k8s.io", "v2.channel.k8s.io", "channel.k8s.io"},
		{"v4.channel.k8s.io"}, {"v3.channel.k8s.io"}, {"v2.channel.k8s.io"}, {"channel.k8s.io"},
	} {
		t.Run(offer[0], func(t *testing.T) {
			s := w.spdy()
			s.Protocols = offer
			e := c.session(t, s, "echo out ; echo -err err", withInput)
			if err := e.Wait(wait.Limit); err != nil {
				t.Errorf("a success is reported as %v", err)
			}
			equal(t, "stdout", e.Stdout.String(), "out\n")
			equal(t, "stderr", e.Stderr.String(), "err\n")

			e = c.session(t, s, "exit 9", withInput)
			if len(offer) > 1 || offer[0] == "v4.channel.k8s.io" {
				endsWith(t, e, 9)
			} else if offer[0] == "channel.k8s.io" {
				// Its client does not wait for the error (kubernetes#13394).
				if err := e.Wait(wait.Limit); err != nil && !strings.Contains(err.Error(), "9") {
					t.Errorf("exit code 9 is reported as %v", err)
				}
			} else if err := e.Wait(wait.Limit); err == nil || !strings.Contains(err.Error(), "9") {
				t.Errorf("exit code 9 is reported as %v", err)
			}
		})
	}
	s := w.spdy()
	s.Protocols = []string{"v99.channel.k8s.io"}
	if err := c.session(t, s, "echo").Wait(wait.Limit); err == nil || !strings.Contains(err.Error(), "v99") {
		t.Errorf("an unknown version: %v, want an error that names it", err)
	}
}

func TestExecSpeaksEveryVersionOfWebSocket(t *testing.T) {
	t.Parallel()
	w := shared(t)
	c := w.run(t, "crun").start(t, "sleep")
	for _, protocol := range []string{"v4.channel.k8s.io", "v4.base64.channel.k8s.io", "channel.k8s.io", "base64.channel.k8s.io", ""} {
		t.Run("protocol "+protocol, func(t *testing.T) {
			var offer []string
			if protocol != "" {
				offer = []string{protocol}
			}
			address := w.execURL(t, c.execRequest("line ; echo -err err ; exit 9", withInput))
			conn, _, err := kubelet.Streams{Within: w.Do}.RawWebSocket(t.Context(), address, offer...)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			equal(t, "protocol", conn.Subprotocol(), protocol)
			base := strings.Contains(protocol, "base64")
			kind, frame := encodeChannel(base, 0, "hello\n")
			if err := conn.WriteMessage(kind, frame); err != nil {
				t.Fatal(err)
			}
			channels := readChannels(t, conn, base)
			equal(t, "stdout", channels[1], "got \"hello\"\n")
			equal(t, "stderr", channels[2], "err\n")
			if !strings.Contains(channels[3], "9") {
				t.Errorf("the error channel says %q, want exit code 9", channels[3])
			}
			if strings.HasPrefix(protocol, "v4") && !strings.Contains(channels[3], `"NonZeroExitCode"`) {
				t.Errorf("the error channel says %q, want a status", channels[3])
			}
		})
	}
	// A client that speaks only the newest version is either served, or refused
	// so that it tries an older one, as kubectl does.
	s := w.websocket()
	s.Protocols = nil
	e := c.session(t, s, "digest ; exit 9", withInput)
	e.EndInput()
	if err := e.Wait(wait.Limit); !httpstream.IsUpgradeFailure(err) {
		endsWith(t, e, 9)
		equal(t, "stdout", e.Stdout.String(), sum("")+"\n")
	}
}

// readChannels collects a WebSocket's data on each channel until it ends.
func readChannels(t *testing.T, conn *websocket.Conn, base bool) map[byte]string {
	t.Helper()
	conn.SetReadDeadline(time.Now().Add(wait.Limit))
	out := map[byte]string{}
	for {
		_, data, err := conn.ReadMessage()
		if err != nil {
			var timeout interface{ Timeout() bool }
			if errors.As(err, &timeout) && timeout.Timeout() {
				t.Fatalf("waited %v for the session to end; so far: %q", wait.Limit, out)
			}
			return out
		}
		channel, text, err := decodeChannel(base, data)
		if err != nil {
			t.Fatal(err)
		}
		out[channel] += text
	}
}

// encodeChannel returns the message that carries text on a channel.
func encodeChannel(base bool, channel byte, text string) (kind int, frame []byte) {
	if base {
		return websocket.TextMessage, base64.StdEncoding.AppendEncode([]byte{'0' + channel}, []byte(text))
	}
	return websocket.BinaryMessage, append([]byte{channel}, text...)
}

func decodeChannel(base bool, frame []byte) (channel byte, text string, err error) {
	if len(frame) == 0 {
		return 0, "", errors.New("a message without a channel")
	}
	if !base {
		return frame[0], string(frame[1:]), nil
	}
	data, err := base64.StdEncoding.AppendDecode(nil, frame[1:])
	return frame[0] - '0', string(data), err
}

// A session lasts as long as some process that the command has started has its output
// open, and all that they write arrives.
func TestExecShowsWhatDescendantsWrite(t *testing.T) {
	t.Parallel()
	w := shared(t)
	w.eachTransport(t, func(t *testing.T, s kubelet.Streams, handler string) {
		c := w.run(t, handler).start(t, "sleep")
		var want strings.Builder
		want.WriteString("first\n")
		for i := range 10 {
			fmt.Fprintf(&want, "line %d\n", i+1)
		}
		for name, change := range map[string]execChange{"pipes": func(*cri.ExecRequest) {}, "with input": withInput} {
			e := c.session(t, s, "echo first ; orphan lines 10 300ms ; exit 2", change)
			endsWith(t, e, 2)
			equal(t, name+": output", e.Stdout.String(), want.String())
		}
		file := "/tmp/end"
		e := c.session(t, s, "echo -err first ; orphan await "+file+" ; exit 2")
		out := c.session(t, s, "orphan await "+file+" ; exit 3", func(r *cri.ExecRequest) { r.Stdout, r.Stderr = false, true })
		wait.For(t, "output of the command", func() bool { return e.Stderr.String() == "first\n" })
		c.only(t, 3) // both commands have ended
		for _, session := range []*kubelet.Session{e, out} {
			select {
			case <-session.Done():
				t.Errorf("the session has ended before the output: %v", session.Wait(0))
			default:
			}
		}
		c.exec(t, "write "+file+" now")
		endsWith(t, e, 2)
		endsWith(t, out, 3)
	})
}

// A terminal ends with the command, whose session it is. So does a session that wants
// none of the output that a daemon keeps open; of any other its client can take leave.
func TestExecWhoseDescendantStays_containerd_7832(t *testing.T) {
	t.Parallel()
	w := shared(t)
	w.eachTransport(t, func(t *testing.T, s kubelet.Streams, handler string) {
		c := w.run(t, handler).start(t, "sleep")
		e := c.session(t, s, "echo first ; orphan sleep 1h ; echo last ; exit 2", withTerminal)
		endsWith(t, e, 2)
		equal(t, "output on the terminal", strings.ReplaceAll(e.Stdout.String(), "\r", ""), "first\nlast\n")

		e = c.session(t, s, "orphan sleep 1h ; exit 2", withInput, func(r *cri.ExecRequest) { r.Stdout, r.Stderr = false, false })
		endsWith(t, e, 2)

		p := w.run(t, handler)
		c = p.start(t, "sleep")
		e = c.session(t, s, "echo first ; orphan sleep 1h ; exit 2")
		shows(t, e, "first\n")
		e.Leave()
		e = c.session(t, s, "orphan sleep 1h ; echo last ; exit 2")
		shows(t, e, "last\n")
		c.only(t, 3) // the command has exited
		c.stop(t, 0) // and with the container all ends
		endsWith(t, e, 2)
	})
}

// The size that a client sends first is there before the command looks at its terminal.
func TestExecStartsWithTheSizeOfTheTerminal_kubernetes_47990(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, "sleep")
		for _, s := range []kubelet.Streams{w.spdy(), w.websocket()} {
			for range 5 {
				wait.Retry(t, func() error { // the server waits for half a second, and crun sets the size while the command already starts
					e := c.sessionOf(t, s, kubelet.Wants{Size: kubelet.Size{Width: 133, Height: 41}}, "tty", withTerminal)
					endsWith(t, e, 0)
					if got := e.Stdout.String(); got != "41 133\r\n" {
						return fmt.Errorf("rows and columns are %q", got)
					}
					return nil
				})
			}
		}
		e := c.sessionOf(t, w.spdy(), kubelet.Wants{Size: kubelet.Size{Width: 133, Height: 41}}, "cat /proc/self/stat", withTerminal)
		endsWith(t, e, 0)
		fields := strings.Fields(e.Stdout.String())
		equal(t, "scheduling policy, whatever that of the runtime", fields[len(fields)-12], "0") // the 41st of 52
		e = c.session(t, w.spdy(), "tty", withTerminal)                                          // a client that sends none is not waited for long
		endsWith(t, e, 0)
		equal(t, "rows and columns", e.Stdout.String(), "0 0\r\n")
	})
}

func TestExecOfAMissingProgram(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, "sleep")
		before := len(w.processesOf(t, c.id))
		for name, change := range map[string]execChange{"pipes": withInput, "terminal": withTerminal} {
			for _, program := range []string{"/no/such/program", "no-such-program"} {
				e := c.session(t, w.spdy(), "", change, func(r *cri.ExecRequest) { r.Cmd = []string{program} })
				if err := e.Wait(wait.Limit); err == nil || !strings.Contains(err.Error(), strings.TrimPrefix(program, "/")) {
					t.Errorf("%s: %s: %v, want an error that names it; stderr: %q", name, program, err, e.Stderr.String())
				}
			}
		}
		c.only(t, before)
	})
}

func TestExecErrors(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	running, created, exited := p.start(t, "sleep"), p.create(t, "sleep"), p.start(t, "exit 0")
	exited.wait(t)
	removed := p.start(t, "exit 0")
	removed.wait(t)
	removed.remove(t)
	for name, c := range map[string]struct {
		of     *container
		change execChange
		code   codes.Code
		word   string
	}{
		"unknown":        {running, func(r *cri.ExecRequest) { r.ContainerId = "no-such-container" }, codes.NotFound, "no-such-container"},
		"no id":          {running, func(r *cri.ExecRequest) { r.ContainerId = "" }, codes.InvalidArgument, ""},
		"a pod":          {running, func(r *cri.ExecRequest) { r.ContainerId = p.id }, codes.NotFound, p.id[:12]},
		"removed":        {removed, func(*cri.ExecRequest) {}, codes.NotFound, removed.id[:12]},
		"created":        {created, func(*cri.ExecRequest) {}, codes.FailedPrecondition, created.id[:12]},
		"exited":         {exited, func(*cri.ExecRequest) {}, codes.FailedPrecondition, exited.id[:12]},
		"tty and stderr": {running, func(r *cri.ExecRequest) { r.Tty = true }, codes.InvalidArgument, "stderr"},
		"no stream":      {running, func(r *cri.ExecRequest) { r.Stdout, r.Stderr = false, false }, codes.InvalidArgument, "std"},
		"no command":     {running, func(r *cri.ExecRequest) { r.Cmd = nil }, codes.InvalidArgument, "cmd"},
	} {
		resp, err := w.Runtime().Exec(t.Context(), c.of.execRequest("echo", c.change))
		if err == nil {
			t.Errorf("%s: the URL is %s, want %v", name, resp.Url, c.code)
			continue
		}
		t.Run(name, func(t *testing.T) { wantCode(t, err, c.code, c.word) })
	}
}

// The container may end between the call for the URL and its use.
func TestExecOfAContainerThatHasEndedSince(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	for name, end := range map[string]func(*container){
		"stopped": func(c *container) { c.stop(t, 0) },
		"removed": func(c *container) { c.stop(t, 0); c.remove(t) },
	} {
		c := p.start(t, "sleep")
		r := c.execRequest("echo out", withInput)
		address := w.execURL(t, r)
		end(c)
		e := w.spdy().Open(t.Context(), address, kubelet.Wants{Stdin: true, Stdout: true, Stderr: true})
		if err := e.Wait(wait.Limit); err == nil || e.Stdout.String() != "" {
			t.Errorf("%s: the session ended with %v and output %q", name, err, e.Stdout.String())
		}
	}
}

// When a client leaves, its command ends if it has no stream left to read or
// write.
func TestAnExecWhoseClientLeaves(t *testing.T) {
	t.Parallel()
	w := shared(t)
	c := w.run(t, "crun").start(t, "sleep")
	before := len(w.processesOf(t, c.id))
	w.eachTransport(t, func(t *testing.T, s kubelet.Streams, _ string) {
		for _, change := range []execChange{withInput, withTerminal} {
			for _, line := range []string{"line ; echo ready ; cat", "line ; echo ready ; flood"} {
				e := c.session(t, s, line, change)
				typed(t, e, "go\n")
				shows(t, e, "ready")
				e.Leave()
				c.only(t, before)
			}
		}
	})
	equal(t, "state of the container", c.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
}

func TestManyExecSessionsAtOnce(t *testing.T) {
	t.Parallel()
	w := shared(t)
	c := w.run(t, "crun").start(t, "sleep")
	var all []*kubelet.Session
	for i := range 10 {
		all = append(all, c.session(t, []kubelet.Streams{w.spdy(), w.websocket()}[i%2], fmt.Sprintf("line ; exit %d", i), withInput))
	}
	for i, e := range all {
		typed(t, e, fmt.Sprintf("to %d\n", i))
	}
	for i, e := range all {
		endsWith(t, e, i)
		equal(t, "stdout", e.Stdout.String(), fmt.Sprintf("got \"to %d\"\n", i))
	}
}
