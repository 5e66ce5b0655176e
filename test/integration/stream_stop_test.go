package integration

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/streaming/pkg/httpstream"

	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// streamsOf opens an exec or attach session manually over SPDY: the error
// stream and those named.
func (w *world) streamsOf(t *testing.T, address string, kinds ...string) (map[string]httpstream.Stream, *kubelet.Line) {
	t.Helper()
	streams, line, err := w.openStreams(t.Context(), address, kinds...)
	if err != nil {
		t.Fatal(err)
	}
	return streams, line
}

func (w *world) openStreams(ctx context.Context, address string, kinds ...string) (map[string]httpstream.Stream, *kubelet.Line, error) {
	conn, line, err := w.spdy().SPDY(ctx, address, "v4.channel.k8s.io")
	if err != nil {
		return nil, nil, err
	}
	out := map[string]httpstream.Stream{}
	for _, kind := range append([]string{"error"}, kinds...) {
		if out[kind], err = conn.CreateStream(http.Header{"Streamtype": {kind}}); err != nil {
			line.Close()
			return nil, nil, err
		}
	}
	return out, line, nil
}

// deaf are sessions with a container and its pod whose clients have stopped
// reading while much is sent to them. The container must flood its output.
type deaf struct{ lines map[string]*kubelet.Line }

func (c *container) deaf(t *testing.T) deaf {
	t.Helper()
	w := c.pod.w
	out := deaf{map[string]*kubelet.Line{}}
	read := func(name string, line *kubelet.Line, r io.Reader) {
		t.Helper()
		t.Cleanup(line.Cut)
		if _, err := io.ReadFull(r, make([]byte, 1000)); err != nil {
			t.Fatalf("%s brings nothing: %v", name, err)
		}
		line.Freeze()
		out.lines[name] = line
	}
	for name, address := range map[string]string{
		"an exec":                 w.execURL(t, c.execRequest("flood")),
		"an exec that ignores":    w.execURL(t, c.execRequest("ignore TERM HUP PIPE ; flood")),
		"an exec with a terminal": w.execURL(t, c.execRequest("flood", withTerminal)),
		"an attach":               w.attachURL(t, c.attachRequest()),
	} {
		kinds := []string{"stdout", "stderr"}
		if name == "an exec with a terminal" {
			kinds = []string{"stdin", "stdout", "resize"}
		}
		streams, line := w.streamsOf(t, address, kinds...)
		read(name, line, streams["stdout"])
	}
	tunnel, err := w.spdy().Tunnel(t.Context(), c.pod.forwardURL(t))
	if err != nil {
		t.Fatal(err)
	}
	wire := connect(t, tunnel, 7006)
	read("a port-forward", tunnel.Line, wire)

	conn, line, err := w.websocket().RawWebSocket(t.Context(), w.execURL(t, c.execRequest("flood")), "v4.channel.k8s.io")
	if err != nil {
		t.Fatal(err)
	}
	_, r, err := conn.NextReader()
	for range 3 { // the first messages may be empty
		if err == nil {
			_, r, err = conn.NextReader()
		}
	}
	if err != nil {
		t.Fatalf("an exec over WebSocket brings nothing: %v", err)
	}
	_ = r
	t.Cleanup(line.Cut)
	line.Freeze()
	out.lines["an exec over WebSocket"] = line
	return out
}

// ended checks that the server has closed the connections, except those named.
func (d deaf) ended(t *testing.T, except ...string) {
	t.Helper()
	for name, line := range d.lines {
		if contains(except, name) {
			continue
		}
		ends(t, "the connection of "+name, line.TCPConn) // what the kernel has buffered comes first
	}
}

// A client that never reads cannot delay what ends its session: a stop gives up
// after half a minute, and a monitor that hangs in a session is ended before.
func TestStopWithUnreadExec_crio_6699(t *testing.T) {
	t.Parallel()
	w := shared(t)
	for name, stop := range map[string]func(t *testing.T, c *container){
		"StopContainer":    func(t *testing.T, c *container) { c.stop(t, 1) },
		"RemovePodSandbox": func(t *testing.T, c *container) { c.pod.remove(t) },
	} {
		t.Run(name, func(t *testing.T) {
			wait.Retry(t, func() error { // the server kills a monitor that does not respond for ten seconds
				c := w.run(t, "crun").start(t, "tcp 127.0.0.1:7006 flood ; flood 5ms", func(c *cri.ContainerConfig) { c.LogPath = "" })
				d := c.deaf(t)
				stop(t, c)
				if log := w.LogAbout(20, c.id); strings.Contains(log, "monitor") {
					return fmt.Errorf("%s with sessions that nobody reads:\n%s", name, log)
				}
				if left := w.processesOf(t, c.id); len(left) > 0 {
					t.Errorf("processes %v are left", left)
				}
				if name == "StopContainer" {
					d.ended(t, "a port-forward") // which belongs to the pod
				} else {
					d.ended(t)
				}
				return nil
			})
		})
	}
}

// The session of a client that reads ends with the container, too, with a
// message.
func TestStopEndsSessions(t *testing.T) {
	t.Parallel()
	w := shared(t)
	for name, stop := range map[string]func(*container){
		"StopContainer":  func(c *container) { c.stop(t, 0) },
		"StopPodSandbox": func(c *container) { c.pod.stop(t) },
	} {
		c := w.run(t, "crun").start(t, "cat", stdin)
		sessions := map[string]*kubelet.Session{
			"exec over SPDY":       c.session(t, w.spdy(), "echo here ; sleep", withInput),
			"exec over WebSocket":  c.session(t, w.websocket(), "echo here ; sleep", withInput),
			"exec with a terminal": c.session(t, w.spdy(), "echo here ; sleep", withTerminal),
		}
		for _, s := range sessions {
			shows(t, s, "here")
		}
		one, two := c.attach(t, w.spdy(), attachInput), c.attach(t, w.websocket(), attachInput)
		meet(t, one, two)
		sessions["attach over SPDY"], sessions["attach over WebSocket"] = one, two
		stop(c)
		for kind, s := range sessions {
			scene.Receive(t, kind+" to end with "+name, s.Done())
			if err := s.Wait(0); err == nil && strings.HasPrefix(kind, "exec") {
				t.Errorf("%s: %s ended as if its command had ended well", name, kind)
			}
		}
	}
}

// survivors are a container and a pod with a session of each kind, and what
// must be left of them once the server has ended.
type survivors struct {
	c        *container
	before   int
	sessions map[string]*kubelet.Session
	tunnel   *kubelet.Tunnel
}

func (w *world) survivors(t *testing.T, handler string) survivors {
	t.Helper()
	c := w.run(t, handler).start(t, "tcp 127.0.0.1:7001 echo ; echo all-set ; cat", stdin)
	c.says(t, "all-set")
	out := survivors{c: c, before: len(w.processesOf(t, c.id)), sessions: map[string]*kubelet.Session{
		"exec with input":      c.session(t, w.spdy(), "echo here ; cat", withInput),
		"exec of a writer":     c.session(t, w.spdy(), "echo here ; lines 1000000000 10ms"),
		"exec with a terminal": c.session(t, w.websocket(), "echo here ; sleep", withTerminal),
		"attach over SPDY":     c.attach(t, w.spdy(), attachInput),
	}}
	for name, s := range out.sessions {
		if strings.HasPrefix(name, "exec") {
			shows(t, s, "here")
		}
	}
	out.tunnel = c.pod.tunnel(t)
	wire := connect(t, out.tunnel, 7001)
	io.WriteString(wire, "hello")
	if _, err := io.ReadFull(wire, make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	return out
}

// check must be called once the server is up again.
func (s survivors) check(t *testing.T) {
	t.Helper()
	w := s.c.pod.w
	for name, session := range s.sessions {
		scene.Receive(t, name+" to end", session.Done()) // with an error or, over SPDY, without: client-go does not distinguish
	}
	scene.Receive(t, "the port-forward to end", s.tunnel.Ended())
	equal(t, "state of the container", s.c.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
	s.c.only(t, s.before)
	again, looking := s.c.attach(t, w.spdy(), attachInput), s.c.attach(t, w.websocket())
	meet(t, again, looking)
	endsWith(t, s.c.session(t, w.spdy(), "exit 4"), 4)
}

// Clients that listen to events have no session, and are notified.
func TestEndOfTheServerEndsSessionsAndSparesContainers(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	t.Run("SIGTERM", func(t *testing.T) {
		s, e := w.survivors(t, "runc"), w.listen(t)
		flooded := w.run(t, "crun").start(t, "tcp 127.0.0.1:7006 flood ; flood 5ms", func(c *cri.ContainerConfig) { c.LogPath = "" })
		flooded.deaf(t)
		if err := w.Stop(); err != nil { // as after its wait for sessions has ended
			t.Fatalf("SIGTERM: %v", err)
		}
		must(t, w.Start(t.Context()))
		s.check(t)
		equal(t, "state of the container whose clients do not read", flooded.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
		equal(t, "code of the stream of events", status.Code(<-e.done), codes.Unavailable)
	})
	t.Run("SIGKILL", func(t *testing.T) {
		s := w.survivors(t, "crun")
		must(t, w.Kill())
		s.c.only(t, s.before) // without the server with which the sessions' processes communicated
		must(t, w.Start(t.Context()))
		s.check(t)
	})
}
