package runtimes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"k8s.io/client-go/util/exec"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

func TestExecSync(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		c := w.Pod(t, handler).Start(t, "sleep")
		r := c.ExecResult(t, "/probe", "echo", "out", ";", "echo", "-err", "err", ";", "exit", "6")
		if r.ExitCode != 6 || string(r.Stdout) != "out\n" || string(r.Stderr) != "err\n" {
			t.Errorf("code %d, %q, %q", r.ExitCode, r.Stdout, r.Stderr)
		}
		if out := c.Exec(t, "bytes 1000000"); len(out) != 1000000 {
			t.Errorf("%d bytes of output", len(out))
		}
		for _, program := range []string{"/no/such/program", "no-such-program"} {
			if missing := c.ExecResult(t, program); missing.ExitCode != 127 || !strings.Contains(string(missing.Stderr), program) {
				t.Errorf("a program that is not there: %v", missing)
			}
		}
	})
}

// Commands that end at once, many at a time, have their own exit codes: a
// runtime may not have noticed the start of one that has already ended.
func TestManyQuickCommands(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		c := w.Pod(t, handler).Start(t, "sleep")
		var all errgroup.Group
		all.SetLimit(8)
		for i := range 64 {
			all.Go(func() error {
				code := int32(i)
				r, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"/probe", "exit", strconv.Itoa(i)}})
				if err == nil && r.ExitCode != code {
					err = fmt.Errorf("the exit code is %d, want %d; standard error: %q", r.ExitCode, code, r.Stderr)
				}
				return err
			})
		}
		if err := all.Wait(); err != nil {
			t.Error(err)
		}
	})
}

// A command that takes too long is killed, with its children if the runtime lets
// crius reach these.
func TestExecTimeout(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		c := w.Pod(t, handler).Start(t, "sleep")
		command := []string{"/probe", "fork", "1", "sleep", ";", "sleep"}
		if !tools.KillsChildren(handler) {
			command = []string{"/probe", "sleep"}
		}
		_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.ID, Cmd: command, Timeout: 1})
		scene.WantCode(t, err, codes.DeadlineExceeded)
		alone(t, c)
	})
}

// alone waits until a container has no processes except its first one and the
// one that lists them.
func alone(t *testing.T, c *scene.Container) {
	t.Helper()
	var all map[int]string
	if !wait.Until(t.Context(), func() bool { all = c.Facts(t).Processes; return len(all) == 2 }) {
		t.Errorf("still there: %v", all)
	}
}

func session(t *testing.T, w *scene.World, r *cri.ExecRequest) *kubelet.Session {
	t.Helper()
	return sessionSized(t, w, r, kubelet.Size{})
}

func sessionSized(t *testing.T, w *scene.World, r *cri.ExecRequest, size kubelet.Size) *kubelet.Session {
	t.Helper()
	resp, err := w.Runtime().Exec(t.Context(), r)
	if err != nil {
		t.Fatalf("Exec: %v", err)
	}
	s := kubelet.Streams{Within: w.Do}.Open(t.Context(), resp.Url, kubelet.Wants{Stdin: r.Stdin, Stdout: r.Stdout, Stderr: r.Stderr, TTY: r.Tty, Size: size})
	t.Cleanup(s.Leave)
	return s
}

func shows(t *testing.T, s *kubelet.Session, text string) {
	t.Helper()
	if !wait.Until(t.Context(), func() bool { return strings.Contains(s.Stdout.String(), text) }) {
		t.Fatalf("the session never shows %q, but %q and %q; ended: %v", text, s.Stdout.String(), s.Stderr.String(), s.Wait(0))
	}
}

func endsWith(t *testing.T, s *kubelet.Session, code int) {
	t.Helper()
	err := s.Wait(wait.Limit)
	var failed exec.CodeExitError
	if errors.As(err, &failed); failed.Code != code || code == 0 && err != nil {
		t.Errorf("the session ended with %v, want code %d", err, code)
	}
}

func TestExec(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		c := w.Pod(t, handler).Start(t, "sleep")
		s := session(t, w, &cri.ExecRequest{ContainerId: c.ID, Cmd: []string{"/probe", "digest", ";", "exit", "4"}, Stdin: true, Stdout: true, Stderr: true})
		if err := s.Send(strings.NewReader(strings.Repeat("x", 1<<20))); err != nil {
			t.Error(err)
		}
		s.EndInput()
		shows(t, s, "1048576")
		endsWith(t, s, 4)
	})
}

// A command whose client has left continues until it writes something, which nobody can read. That the server was
// killed makes no difference.
func TestCommandsWhoseClientsLeave(t *testing.T) {
	eachPrivate(t, func(t *testing.T, w *scene.World, handler string) {
		c := w.Pod(t, handler).Start(t, "sleep")
		for _, leave := range []func(*kubelet.Session){(*kubelet.Session).Leave, crash(t, w)} {
			s := session(t, w, &cri.ExecRequest{ContainerId: c.ID, Cmd: []string{"/probe", "echo", "ready", ";", "await", "/late", ";", "flood"}, Stdout: true, Stderr: true})
			shows(t, s, "ready")
			leave(s)
			c.Exec(t, "echo still here")
			if all := c.Facts(t).Processes; len(all) != 3 {
				t.Errorf("a command that is silent does not continue: %v", all)
			}
			c.Exec(t, "write /late x")
			alone(t, c)
			c.Exec(t, "remove /late")
		}
	})
}

// Over a shim, one that does not end on SIGHUP goes on, and its output goes nowhere.
func TestCommandsThatOutliveTheirClients(t *testing.T) {
	eachPrivateOf(t, shims(), func(t *testing.T, w *scene.World, handler string) {
		c := w.Pod(t, handler).Start(t, "sleep")
		for _, terminal := range []bool{false, true} {
			for _, leave := range []func(*kubelet.Session){(*kubelet.Session).Leave, crash(t, w)} {
				s := session(t, w, &cri.ExecRequest{ContainerId: c.ID, Cmd: []string{"/probe", "ignore", "SIGHUP", ";", "echo", "ready", ";", "await", "/late", ";", "noise", "300000", ";", "write", "/done", "x"},
					Stdout: true, Stderr: !terminal, Tty: terminal})
				shows(t, s, "ready")
				leave(s)
				c.Exec(t, "write /late x")
				alone(t, c)
				c.Exec(t, "remove /late ; remove /done")
			}
		}
	})
}

// crash kills the server of a session, and starts the next one.
func crash(t *testing.T, w *scene.World) func(*kubelet.Session) {
	return func(*kubelet.Session) {
		if err := w.Crash(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// What a command answers to its input is shown, although the input has ended before
// (kata-containers#13640, kata-containers#9071): Kata's shim in Go ends both at once.
func TestExecShowsTheAnswerToTheInput(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		c := w.Pod(t, handler).Start(t, "sleep")
		ask := func() error {
			s := session(t, w, &cri.ExecRequest{ContainerId: c.ID, Cmd: []string{"/probe", "line", ";", "lines", "10", "100ms", ";", "exit", "4"}, Stdin: true, Stdout: true, Stderr: true})
			if err := s.Type("word\n"); err != nil {
				return err
			}
			s.EndInput()
			endsWith(t, s, 4)
			if out := s.Stdout.String(); !strings.HasPrefix(out, `got "word"`) || !strings.HasSuffix(out, "line 10\n") {
				return fmt.Errorf("the session shows %q", out)
			}
			return nil
		}
		if handler == kata || handler == kata1 { // if the machine pauses for two seconds, the command seems to have no more to say
			wait.Retry(t, ask)
		} else if err := ask(); err != nil {
			t.Error(err)
		}
	})
}

// What processes that a command has started write after its end is shown.
func TestExecShowsWhatDescendantsWrite(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		c := w.Pod(t, handler).Start(t, "sleep")
		s := session(t, w, &cri.ExecRequest{ContainerId: c.ID, Cmd: []string{"/probe", "echo", "first", ";", "orphan", "lines", "10", "300ms", ";", "exit", "4"}, Stdout: true, Stderr: true})
		endsWith(t, s, 4)
		if out := s.Stdout.String(); !strings.HasPrefix(out, "first\n") || !strings.HasSuffix(out, "line 10\n") {
			t.Errorf("output ends with %q", s.Stdout.Tail(50))
		}
	})
}

// The size that a client sends first is there before the command looks at its terminal.
func TestExecStartsWithTheSizeOfTheTerminal_kubernetes_47990(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		c := w.Pod(t, handler).Start(t, "sleep")
		size := kubelet.Size{Width: 133, Height: 41}
		if handler == ofRunsc { // which sets it later, so that the command is told
			s := sessionSized(t, w, &cri.ExecRequest{ContainerId: c.ID, Cmd: []string{"/probe", "sizes"}, Stdin: true, Stdout: true, Tty: true}, size)
			shows(t, s, "size 133x41")
			return
		}
		for range 5 {
			wait.Retry(t, func() error { // the server waits for half a second, and crun sets the size while the command already starts
				s := sessionSized(t, w, &cri.ExecRequest{ContainerId: c.ID, Cmd: []string{"/probe", "tty"}, Stdin: true, Stdout: true, Tty: true}, size)
				endsWith(t, s, 0)
				if got := s.Stdout.String(); got != "41 133\r\n" {
					return fmt.Errorf("rows and columns are %q", got)
				}
				return nil
			})
		}
	})
}

func TestExecTerminal(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		c := w.Pod(t, handler).Start(t, "trap SIGWINCH ; exit 9") // by which Apache's server, for one, is stopped
		c.Says(t, "ready")
		s := session(t, w, &cri.ExecRequest{ContainerId: c.ID, Cmd: []string{"/probe", "line", ";", "exit", "5"}, Stdin: true, Stdout: true, Tty: true})
		if err := s.Type("word\n"); err != nil {
			t.Error(err)
		}
		shows(t, s, `got "word"`)
		endsWith(t, s, 5)
		s = session(t, w, &cri.ExecRequest{ContainerId: c.ID, Cmd: []string{"/probe", "sizes"}, Stdin: true, Stdout: true, Tty: true})
		s.Resize(90, 33)
		shows(t, s, "90x33")
		s.Resize(70, 20)
		shows(t, s, "70x20")
		scene.Equal(t, "another command", c.Exec(t, "echo here"), "here\n")
		scene.Equal(t, "state of the container, which is not on that terminal", c.Status(t).State, cri.ContainerState_CONTAINER_RUNNING)
	})
}

func attach(t *testing.T, c *scene.Container) *kubelet.Session {
	t.Helper()
	w := c.Pod.World
	r := &cri.AttachRequest{ContainerId: c.ID, Stdin: true, Stdout: true, Stderr: !c.Config.Tty, Tty: c.Config.Tty}
	resp, err := w.Runtime().Attach(t.Context(), r)
	if err != nil {
		t.Fatalf("Attach: %v", err)
	}
	s := kubelet.Streams{Within: w.Do}.Open(t.Context(), resp.Url, kubelet.Wants{Stdin: true, Stdout: true, Stderr: r.Stderr, TTY: r.Tty})
	t.Cleanup(s.Leave)
	return s
}

// meet types a word until it comes back: then the session is established.
func meet(t *testing.T, s *kubelet.Session) {
	t.Helper()
	if !wait.Until(t.Context(), func() bool { _ = s.Type("hi\n"); return strings.Contains(s.Stdout.String(), "hi") }) {
		t.Fatalf("nothing comes back but %q; ended: %v", s.Stdout.String(), s.Wait(0))
	}
}

func TestAttach(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		c := w.Pod(t, handler).Start(t, "until bye ; exit 3", func(c *cri.ContainerConfig) { c.Stdin = true })
		s := attach(t, c)
		meet(t, s)
		if err := s.Type("bye\n"); err != nil {
			t.Error(err)
		}
		scene.Equal(t, "exit code", c.Wait(t).ExitCode, int32(3))
		endsWith(t, s, 0)
		if !strings.Contains(c.Output(t), "hi\n") {
			t.Errorf("the log has %q", c.Output(t))
		}
	})
}

// All of a client's input arrives, although the answers come faster than they are shown.
func TestAttachTakesAllOfTheInput(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		const size = wire.MostBehind + 4<<20
		text := strings.Repeat("0123456789abcde\n", size/16)
		c := w.Pod(t, handler).Start(t, "cat", func(c *cri.ContainerConfig) { c.Stdin, c.StdinOnce = true, true })
		s := attach(t, c)
		if err := s.Send(strings.NewReader(text)); err != nil {
			t.Fatalf("%v; the session ended with %v", err, s.Wait(0))
		}
		s.EndInput()
		endsWith(t, s, 0)
		scene.Equal(t, "exit code", c.Wait(t).ExitCode, int32(0))
		if out := s.Stdout.String(); out != text {
			t.Errorf("%d bytes are shown", len(out))
		}
		if out := c.Output(t); out != text {
			t.Errorf("the log has %d bytes", len(out))
		}
	})
}

func TestAttachTerminal(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		c := w.Pod(t, handler).Start(t, "until bye ; sizes", func(c *cri.ContainerConfig) { c.Stdin, c.Tty = true, true })
		s := attach(t, c)
		meet(t, s)
		if err := s.Type("bye\n"); err != nil {
			t.Error(err)
		}
		shows(t, s, "size ") // the container sees later sizes as changes
		for _, size := range []string{"91x34", "70x20"} {
			var width, height uint16
			if _, err := fmt.Sscanf(size, "%dx%d", &width, &height); err != nil {
				t.Fatal(err)
			}
			s.Resize(width, height)
			shows(t, s, size)
			c.Says(t, size)
		}
	})
}

func TestPortForward(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler)
		c := p.Start(t, "tcp 127.0.0.1:7001 echo ; tcp :7002 digest ; tcp :7003 reset ; tcp :7004 refuse ; echo all-set ; sleep")
		c.Says(t, "all-set")
		resp, err := w.Runtime().PortForward(t.Context(), &cri.PortForwardRequest{PodSandboxId: p.ID})
		if err != nil {
			t.Fatal(err)
		}
		tunnel, err := kubelet.Streams{Within: w.Do}.Tunnel(t.Context(), resp.Url)
		if err != nil {
			t.Fatal(err)
		}
		defer tunnel.Close()
		ports := []int{7001, 7001}
		if handler == kataCLI { // which does not connect to the guest's loopback
			ports = nil
		}
		if handler != gvisor && handler != ofRunsc { // for which the end of the sending direction is the end of both
			ports = append(ports, 7002)
		}
		for _, port := range ports {
			wire, err := tunnel.Connect(port)
			if err != nil {
				t.Fatal(err)
			}
			sent := strings.Repeat("ping", 50_000)
			go func() {
				_, _ = io.WriteString(wire, sent)
				_ = wire.Close()
			}()
			got := all(t, wire)
			if port == 7001 && got != sent || port == 7002 && !strings.Contains(got, "200000") {
				t.Errorf("port %d answers with %d bytes: %.40q", port, len(got), got)
			}
			tunnel.Forget(wire)
		}
		for _, port := range []int{7003, 7004} { // an end, and no failure
			wire, err := tunnel.Connect(port)
			if err != nil {
				t.Fatal(err)
			}
			go func() { _, _ = io.WriteString(wire, strings.Repeat("ping", 50_000)); _ = wire.Close() }()
			if got := all(t, wire); port == 7004 && got != "too much\n" {
				t.Errorf("port %d answers with %q", port, got)
			}
			scene.Equal(t, "error stream", all(t, wire.Errors), "")
			tunnel.Forget(wire)
		}
		refused, err := tunnel.Connect(7009)
		if err != nil {
			t.Fatal(err)
		}
		if words := all(t, refused.Errors); !strings.Contains(words, "7009") {
			t.Errorf("a port on which nobody listens: %q", words)
		}
	})
}

// all reads to the end, which must come.
func all(t *testing.T, r io.Reader) string {
	t.Helper()
	done := make(chan string, 1)
	go func() {
		text, _ := io.ReadAll(r)
		done <- string(text)
	}()
	return scene.Receive(t, "the stream to end", done)
}

// The pod's address, from the node and from the pod to the node.
func TestNetwork(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler)
		p.Start(t, "echo up ; serve :8080 hello").Says(t, "up")
		url := "http://" + p.Status(t).Network.Ip + ":8080/"
		client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, address string) (conn net.Conn, err error) {
			err = w.Do(func() error { conn, err = new(net.Dialer).DialContext(ctx, network, address); return err })
			return conn, err
		}}}
		got := ""
		wait.Until(t.Context(), func() bool {
			resp, err := client.Get(url)
			if err != nil {
				got = err.Error()
				return false
			}
			defer resp.Body.Close()
			text, _ := io.ReadAll(resp.Body)
			got = strings.TrimSpace(string(text))
			return got == "hello"
		})
		scene.Equal(t, "answer of the pod", got, "hello")
		scene.Equal(t, "answer to another pod", strings.TrimSpace(w.Pod(t, handler).Finish(t, "get "+url)), "hello")
	})
}

// Servers log to /dev/stdout and /dev/stderr, which are their standard streams by name.
func TestStandardStreamsOpenByName(t *testing.T) {
	const line = "write /dev/stdout named-out ; write /dev/stderr named-err ; open /dev/stdin r"
	each(t, func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler)
		for _, uid := range []int64{0, 1000} {
			user := func(c *cri.ContainerConfig) {
				c.Linux.SecurityContext.RunAsUser, c.Linux.SecurityContext.RunAsGroup = &cri.Int64Value{Value: uid}, &cri.Int64Value{Value: uid}
			}
			c := p.Start(t, line, user)
			scene.Equal(t, "exit code", c.Wait(t).ExitCode, 0)
			scene.Equal(t, "output", c.Output(t)+c.Errors(t), "named-outok\nnamed-err")
			r := p.Start(t, "sleep", user).ExecResult(t, append([]string{"/probe"}, scene.Steps(line)...)...)
			scene.Equal(t, "output of a command", fmt.Sprintf("%d %s%s", r.ExitCode, r.Stdout, r.Stderr), "0 named-outok\nnamed-err")
		}
	})
}

// Root in a container may change the owner and the mode of any file that it
// gets open, which must not be the node's /dev/null (podman#24894). Guests have
// their own kernels.
func TestStandardInputIsNotTheNodes(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		if sandboxed(handler) {
			return
		}
		var null unix.Stat_t
		if err := unix.Stat(os.DevNull, &null); err != nil {
			t.Fatal(err)
		}
		devices := w.Dir(t) // where runc does not set up /dev
		if err := unix.Mknod(devices+"/null", unix.S_IFCHR|0o666, int(null.Rdev)); err != nil {
			t.Fatal(err)
		}
		p := w.Pod(t, handler)
		for name, change := range map[string]scene.ContainerChange{
			"": func(*cri.ContainerConfig) {},
			" with a volume at /dev": func(c *cri.ContainerConfig) {
				c.Mounts = append(c.Mounts, &cri.Mount{HostPath: devices, ContainerPath: "/dev"})
			},
		} {
			c := p.Start(t, "inode /proc/self/fd/0 ; cat ; echo ended ; sleep", change)
			c.Says(t, "ended")
			for what, got := range map[string]string{"a container": c.Output(t), "a command in one": c.Exec(t, "inode /proc/self/fd/0 ; cat")} {
				if strings.HasPrefix(got, fmt.Sprintf("%d:%d\n", null.Dev, null.Ino)) {
					t.Errorf("standard input of %s%s is the node's /dev/null, %s", what, name, got)
				}
			}
		}
	})
}
