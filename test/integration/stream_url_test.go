package integration

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"path"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// ask sends a request, optionally for another protocol, and returns the status
// code.
func (w *world) ask(t *testing.T, address, upgrade string) int {
	t.Helper()
	line, err := w.spdy().Dial(t.Context(), address)
	if err != nil {
		t.Fatal(err)
	}
	defer line.Close()
	line.SetDeadline(time.Now().Add(wait.Limit))
	resp, err := line.Upgrade(address, upgrade, http.Header{"X-Stream-Protocol-Version": {"v4.channel.k8s.io"}})
	if err != nil {
		t.Errorf("%.100s, upgrade to %q: no answer: %v", address, upgrade, err)
		return 0
	}
	return resp.StatusCode
}

// The URL gives access to the container: it must not be guessable (a token of
// at least 128 bits).
func TestStreamURLs(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	c := p.start(t, "sleep")
	token := regexp.MustCompile(`^[A-Za-z0-9_-]{22,}$`)
	seen := map[string]bool{}
	for range 5 {
		for method, address := range map[string]string{
			"exec":        w.execURL(t, c.execRequest("echo")),
			"attach":      w.attachURL(t, c.attachRequest()),
			"portforward": p.forwardURL(t),
		} {
			u, err := url.Parse(address)
			if err != nil {
				t.Fatal(err)
			}
			equal(t, "scheme", u.Scheme, "http")
			equal(t, "host", u.Hostname(), "127.0.0.1")
			equal(t, "method in the path", path.Base(path.Dir(u.Path)), method)
			if name := path.Base(u.Path); !token.MatchString(name) || seen[name] {
				t.Errorf("token %q of %s is short, odd or was there before: %v", name, address, seen[name])
			} else {
				seen[name] = true
			}
		}
	}
}

func TestAStreamURLServesOnceAndItsOwnPurpose(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	c := p.start(t, "sleep")
	address := w.execURL(t, c.execRequest("echo first"))
	s := w.spdy().Open(t.Context(), address, kubelet.Wants{Stdout: true, Stderr: true})
	endsWith(t, s, 0)
	equal(t, "stdout", s.Stdout.String(), "first\n")
	equal(t, "status of the second use", w.ask(t, address, "SPDY/3.1"), http.StatusNotFound)

	// Two clients at the same moment: one is served.
	address = w.execURL(t, c.execRequest("echo first"))
	all := []*kubelet.Session{}
	for range 8 {
		all = append(all, w.spdy().Open(t.Context(), address, kubelet.Wants{Stdout: true, Stderr: true}))
	}
	served := 0
	for _, s := range all {
		if s.Wait(wait.Limit) == nil {
			served++
		}
	}
	equal(t, "number of clients served", served, 1)

	urls := map[string]string{
		"exec":        w.execURL(t, c.execRequest("echo")),
		"attach":      w.attachURL(t, c.attachRequest()),
		"portforward": p.forwardURL(t),
	}
	for method, address := range urls {
		for other := range urls {
			if other != method {
				wrong := strings.Replace(address, "/"+method+"/", "/"+other+"/", 1)
				equal(t, "status of a token of "+method+" at "+other, w.ask(t, wrong, "SPDY/3.1"), http.StatusNotFound)
			}
		}
	}
	u, err := url.Parse(p.forwardURL(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, odd := range []string{
		"/", "/exec", "/exec/", "/exec/AAAAAAAAAAAAAAAAAAAAAA", "/exec/%2e%2e/%2e%2e/etc/passwd", "/exec/" + strings.Repeat("A", 5000),
		"/cri/exec/x", "/debug/pprof/", "/metrics", "/exec/a/b", "/exec/%00",
	} {
		got := w.ask(t, "http://"+u.Host+odd, "SPDY/3.1")
		if got < 300 || got > 499 {
			t.Errorf("%.60s answers %d", odd, got)
		}
	}
	for _, upgrade := range []string{"", "h2c", "SPDY/9"} {
		if got := w.ask(t, w.execURL(t, c.execRequest("echo")), upgrade); got < 400 || got > 499 {
			t.Errorf("a request with upgrade %q gets status %d, want 4xx", upgrade, got)
		}
	}
}

func TestStreamsAreServedOnLoopbackOnly(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	u, err := url.Parse(p.forwardURL(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, host := range []string{w.bridgeAddress(t), "::1"} {
		ctx, cancel := context.WithTimeout(t.Context(), wait.Limit)
		defer cancel()
		if conn, err := w.Dial(ctx, "tcp", net.JoinHostPort(host, u.Port())); err == nil {
			conn.Close()
			t.Errorf("the streaming server answers on %s", host)
		}
	}
}

// mute opens a session whose client sends nothing by itself, unlike kubectl,
// which does so every five seconds, and reports when it has ended.
func (w *world) mute(t *testing.T, address string, kinds ...string) (ended <-chan struct{}) {
	t.Helper()
	streams, line := w.streamsOf(t, address, kinds...)
	t.Cleanup(line.Cut)
	over := make(chan struct{})
	go func() {
		defer close(over)
		io.Copy(io.Discard, streams["stdout"])
	}()
	return over
}

// Silence ends sessions of every kind, and the processes in them.
func TestStreamAddressAndIdleTimeAreConfigurable(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: "[api]\nstream_address = \"127.0.0.3:23456\"\nstream_idle_timeout = \"20s\"\n"})
	p := w.run(t, "crun")
	c := p.start(t, "cat", stdin)
	address := w.execURL(t, c.execRequest("exit 3"))
	if !strings.HasPrefix(address, "http://127.0.0.3:23456/") {
		t.Errorf("the URL is %s", address)
	}
	s := w.spdy().Open(t.Context(), address, kubelet.Wants{Stdout: true, Stderr: true})
	endsWith(t, s, 3)

	before := len(w.processesOf(t, c.id))
	idle := map[string]<-chan struct{}{
		"an idle exec":                 w.mute(t, w.execURL(t, c.execRequest("cat", withInput)), "stdin", "stdout", "stderr"),
		"an idle exec with a terminal": w.mute(t, w.execURL(t, c.execRequest("cat", withTerminal)), "stdin", "stdout", "resize"),
		"an idle attach":               w.mute(t, w.attachURL(t, c.attachRequest(attachInput)), "stdin", "stdout", "stderr"),
	}
	tunnel := p.tunnel(t)
	for name, ended := range idle {
		scene.Receive(t, name+" to end", ended)
	}
	scene.Receive(t, "an idle port-forward to end", tunnel.Ended())
	c.only(t, before)
	equal(t, "state of the container", c.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
}

// Sessions are bounded for each container and for the node, and a session that
// ends makes room.
func TestSessionsAreBounded(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: "[api]\nstream_max_sessions = 4\nstream_max_sessions_per_container = 3\n"})
	p := w.run(t, "crun")
	c, other := p.start(t, "sleep"), p.start(t, "sleep")
	var lines []*kubelet.Line
	open := func(c *container) {
		t.Helper()
		_, line := w.streamsOf(t, w.execURL(t, c.execRequest("cat", withInput)), "stdin", "stdout", "stderr")
		lines = append(lines, line)
	}
	for range 3 {
		open(c)
	}
	_, err := w.Runtime().Exec(t.Context(), c.execRequest("echo"))
	wantCode(t, err, codes.ResourceExhausted, c.id)
	wantCode(t, err, codes.ResourceExhausted, "stream_max_sessions_per_container")
	open(other)
	_, err = w.Runtime().Attach(t.Context(), other.attachRequest())
	wantCode(t, err, codes.ResourceExhausted, "on this node")
	lines[0].Cut()
	var address string
	wait.For(t, "the end of a session to make room", func() bool {
		address, err = c.execAddress(t.Context(), "exit 3")
		return err == nil
	})
	endsWith(t, w.spdy().Open(t.Context(), address, kubelet.Wants{Stdout: true, Stderr: true}), 3)
	for _, line := range lines {
		line.Cut()
	}
}

// A pod may have the port on which sessions are served as a host port, and then all connections to it go to the pod.
func TestSessionsLeaveThePortOfAPod_kubernetes_85418_containerd_7097(t *testing.T) {
	t.Parallel()
	for name, conf := range map[string]string{"forwarded by a plugin": "", "forwarded by crius": portless} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := private(t, node.Options{})
			if conf != "" {
				must(t, w.Write("cni/net.d/10-p.conflist", conf))
				must(t, w.settle(t.Context(), handlers...))
			}
			c := w.run(t, "crun", ports(tcp(8080, 80))).start(t, "sleep") // the kernel tracks connections by now
			before := w.execURL(t, c.execRequest("cat", withInput))
			running := w.spdy().Open(t.Context(), before, everything)
			must(t, running.Type("before\n"))
			wait.For(t, "the answer of the session", func() bool { return running.Stdout.String() == "before\n" })
			p := w.run(t, "runc", ports(tcp(portOf(t, before), 80)))
			p.start(t, "serve :80 pod")
			after := w.execURL(t, c.execRequest("echo served"))
			if portOf(t, after) == portOf(t, before) {
				t.Fatalf("sessions are still served at %s", after)
			}
			s := w.spdy().Open(t.Context(), after, kubelet.Wants{Stdout: true, Stderr: true})
			endsWith(t, s, 0)
			equal(t, "stdout", s.Stdout.String(), "served\n")
			equal(t, "the pod's answer", w.get(t, fmt.Sprintf("127.0.0.1:%d", portOf(t, before)), "/"), "pod\n")
			equal(t, "port of the next session", portOf(t, w.execURL(t, c.execRequest("echo"))), portOf(t, after))
			must(t, running.Type("after\n"))
			running.EndInput()
			endsWith(t, running, 0)
			equal(t, "the session from before", running.Stdout.String(), "before\nafter\n")
		})
	}
}

func TestConfiguredPortOfSessionsIsAPodsPort_kubernetes_85418(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: "[api]\nstream_address = \"127.0.0.1:23456\"\n"})
	c := w.run(t, "crun").start(t, "sleep")
	elsewhere := tcp(23456, 80)
	elsewhere.HostIp = "127.0.0.9"
	w.run(t, "crun", ports(elsewhere, &cri.PortMapping{Protocol: cri.Protocol_UDP, HostPort: 23456, ContainerPort: 80}))
	equal(t, "port", portOf(t, w.execURL(t, c.execRequest("echo"))), 23456)
	p := w.run(t, "crun", ports(tcp(23456, 80)))
	_, err := w.Runtime().Exec(t.Context(), c.execRequest("echo"))
	wantCode(t, err, codes.FailedPrecondition, "api.stream_address", p.id)
	p.stop(t)
	equal(t, "port", portOf(t, w.execURL(t, c.execRequest("echo"))), 23456)
}

func portOf(t *testing.T, address string) int32 {
	t.Helper()
	u, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	port, err := strconv.ParseUint(u.Port(), 10, 16)
	if err != nil {
		t.Fatal(err)
	}
	return int32(port)
}
