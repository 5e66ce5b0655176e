package stream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	utilexec "k8s.io/client-go/util/exec"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/server/trail"
	"github.com/crius-run/crius/test/kit/wait"
)

func TestMain(m *testing.M) {
	LogTo(slog.New(slog.DiscardHandler))
	os.Exit(m.Run())
}

// fakeEngine has containers in which every command is a function.
type fakeEngine struct {
	exec    func(ctx context.Context, cmd oci.Command, client pod.Client) (int32, error)
	forward func(ctx context.Context, port uint16, stream io.ReadWriteCloser) error
}

func (f *fakeEngine) Exec(ctx context.Context, _ string, cmd oci.Command, client pod.Client) (int32, error) {
	return f.exec(ctx, cmd, client)
}

func (f *fakeEngine) Attach(ctx context.Context, _ string, client pod.Client) error {
	_, err := f.exec(ctx, oci.Command{}, client)
	return err
}

func (f *fakeEngine) PortForward(ctx context.Context, _ string, port uint16, stream io.ReadWriteCloser) error {
	return f.forward(ctx, port, stream)
}

// echo is a command that says what it hears, and a little more.
func echo(_ context.Context, cmd oci.Command, client pod.Client) (int32, error) {
	if client.Stderr != nil {
		fmt.Fprint(client.Stderr, "warning\n")
	}
	if client.Stdin != nil && client.Stdout != nil {
		if _, err := io.Copy(client.Stdout, client.Stdin); err != nil {
			return 0, err
		}
	}
	switch cmd.Args[0] {
	case "seven":
		return 7, nil
	case "error":
		return 0, errors.New("no such command")
	}
	return 0, nil
}

// serveFake is a server that leaves no goroutine behind.
func serveFake(t *testing.T, engine *fakeEngine) *Server {
	t.Helper()
	return serveWith(t, Config{}, engine)
}

// serveWith is one with certificates.
func serveWith(t *testing.T, cfg Config, engine *fakeEngine) *Server {
	t.Helper()
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		if !wait.Until(context.Background(), func() bool { return runtime.NumGoroutine() <= before }) {
			stacks := make([]byte, 1<<20)
			t.Fatalf("%d goroutines, before %d\n%s", runtime.NumGoroutine(), before, stacks[:runtime.Stack(stacks, true)])
		}
	})
	return serveUncounted(t, cfg, engine)
}

// serveUncounted is one whose clients may leave goroutines behind, as client-go's
// port-forward does where a stream cannot be opened.
func serveUncounted(t *testing.T, cfg Config, engine *fakeEngine) *Server {
	t.Helper()
	cfg.Address, cfg.IdleTimeout = "127.0.0.1:0", time.Minute
	s, err := New(cfg, engine)
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve() }()
	t.Cleanup(func() {
		if err := errors.Join(s.Close(context.Background()), <-served); err != nil {
			t.Error(err)
		}
	})
	return s
}

// executors are the clients that kubectl and crictl are made of.
var executors = map[string]func(*url.URL) (remotecommand.Executor, error){
	"SPDY": func(u *url.URL) (remotecommand.Executor, error) {
		return remotecommand.NewSPDYExecutor(&rest.Config{}, http.MethodPost, u)
	},
	"WebSocket": func(u *url.URL) (remotecommand.Executor, error) {
		return remotecommand.NewWebSocketExecutor(&rest.Config{}, http.MethodGet, u.String())
	},
}

func streamOptions(stdin io.Reader, stdout io.Writer) remotecommand.StreamOptions {
	return remotecommand.StreamOptions{Stdin: stdin, Stdout: stdout}
}

// Not parallel, as the others here: they count goroutines.
func TestExecWithRealClients(t *testing.T) {
	s := serveFake(t, &fakeEngine{exec: echo})
	for name, executor := range executors {
		for command, want := range map[string]string{"true": "", "seven": "exit code 7", "error": "no such command"} {
			t.Run(name+"/"+command, func(t *testing.T) {
				address, err := s.Exec(t.Context(), &cri.ExecRequest{ContainerId: "x", Cmd: []string{command}, Stdin: true, Stdout: true, Stderr: true})
				if err != nil {
					t.Fatal(err)
				}
				u, err := url.Parse(address)
				if err != nil {
					t.Fatal(err)
				}
				e, err := executor(u)
				if err != nil {
					t.Fatal(err)
				}
				said := strings.Repeat("all that is said", 100_000)
				var stdout, stderr bytes.Buffer
				err = e.StreamWithContext(t.Context(), remotecommand.StreamOptions{Stdin: strings.NewReader(said), Stdout: &stdout, Stderr: &stderr})
				switch {
				case want == "" && err != nil, want != "" && (err == nil || !strings.Contains(err.Error(), want)):
					t.Errorf("ended with %v, want %q", err, want)
				}
				var code utilexec.CodeExitError
				if command == "seven" && (!errors.As(err, &code) || code.Code != 7) {
					t.Errorf("%v is not exit code 7", err)
				}
				if stdout.String() != said {
					t.Errorf("stdout has %d bytes, want %d", stdout.Len(), len(said))
				}
				if stderr.String() != "warning\n" {
					t.Errorf("stderr %q", stderr.String())
				}
			})
		}
	}
}

// Clients see errors of commands and connections in the words of Config.Text.
func TestErrorsForClientsAreInWordsForPeople(t *testing.T) {
	text := func(err error) string { return "shop/web/nginx: " + err.Error() }
	for name, executor := range executors {
		t.Run(name, func(t *testing.T) {
			s := serveWith(t, Config{Text: text}, &fakeEngine{exec: echo})
			for command, want := range map[string]string{"error": "shop/web/nginx: no such command", "seven": "command terminated with exit code 7"} {
				address, err := s.Exec(t.Context(), &cri.ExecRequest{ContainerId: "x", Cmd: []string{command}, Stdout: true, Stderr: true})
				if err != nil {
					t.Fatal(err)
				}
				u, err := url.Parse(address)
				if err != nil {
					t.Fatal(err)
				}
				e, err := executor(u)
				if err != nil {
					t.Fatal(err)
				}
				err = e.StreamWithContext(t.Context(), remotecommand.StreamOptions{Stdout: io.Discard, Stderr: io.Discard})
				if err == nil || !strings.HasSuffix(err.Error(), want) {
					t.Errorf("%s ended with %v, want %q", command, err, want)
				}
			}
		})
	}
	t.Run("port-forward", func(t *testing.T) {
		s := serveWith(t, Config{Text: text}, &fakeEngine{forward: intoThisPod})
		address, err := s.PortForward(t.Context(), &cri.PortForwardRequest{PodSandboxId: "x"})
		if err != nil {
			t.Fatal(err)
		}
		conn := speakSPDY(t, address, forwardProtocol)
		headers := func(kind string) http.Header {
			return http.Header{"Streamtype": {kind}, "Port": {fmt.Sprint(closedPort(t))}, "Requestid": {"1"}}
		}
		failure, data := openStream(t, conn, headers("error")), openStream(t, conn, headers("data"))
		if err := errors.Join(failure.WaitTimeout(patience), data.WaitTimeout(patience)); err != nil {
			t.Fatal(err)
		}
		if said, err := io.ReadAll(failure); !strings.HasPrefix(string(said), "shop/web/nginx: error forwarding port") {
			t.Errorf("the client is told %q, %v", said, err)
		}
	})
}

// The server leaves one port after the other, and keeps none of them open. Not parallel, as the others here.
func TestPortsOfPodsAreLeft(t *testing.T) {
	var left []netip.AddrPort
	moves := 0
	forwarded := func(to netip.AddrPort) string {
		if moves == 0 {
			return ""
		}
		moves--
		left = append(left, to)
		return "p"
	}
	s := serveWith(t, Config{Forwarded: forwarded}, &fakeEngine{exec: echo})
	for moves = range 3 {
		address, err := s.Exec(t.Context(), &cri.ExecRequest{ContainerId: "x", Cmd: []string{"true"}, Stdout: true})
		if err != nil {
			t.Fatal(err)
		}
		u, err := url.Parse(address)
		if err != nil {
			t.Fatal(err)
		}
		e, err := executors["SPDY"](u)
		if err != nil {
			t.Fatal(err)
		}
		if err := e.StreamWithContext(t.Context(), streamOptions(nil, io.Discard)); err != nil {
			t.Errorf("after %d moves: %v", len(left), err)
		}
	}
	if len(left) != 3 {
		t.Errorf("moved %d times", len(left))
	}
	for _, former := range left {
		free := func() bool {
			l, err := net.Listen("tcp", former.String())
			return err == nil && l.Close() == nil
		}
		if !wait.Until(t.Context(), free) {
			t.Errorf("still listening at %s", former)
		}
	}
}

// running has every pod and container that is asked for.
type running struct{}

func (running) Container(id string) (*view.Container, error) {
	return &view.Container{ID: id, SandboxID: "p", Config: &cri.ContainerConfig{}}, nil
}

func (running) Sandbox(id string) (*view.Sandbox, error) {
	return &view.Sandbox{ID: id, Config: &cri.PodSandboxConfig{}}, nil
}

// A session leaves one record, with what has passed and how it ended, whatever its transport. Not
// parallel, as the others here.
func TestSessionsLeaveOneRecord(t *testing.T) {
	file := filepath.Join(t.TempDir(), "audit.log")
	records := trail.New(t.Context(), trail.Options{Level: trail.People, File: file}, running{})
	s := serveWith(t, Config{Trail: records}, &fakeEngine{exec: echo, forward: intoThisPod})
	for name, executor := range executors {
		for command, stdin := range map[string]string{"seven": "some words", "error": "other words"} {
			address, err := s.Exec(t.Context(), &cri.ExecRequest{ContainerId: name, Cmd: []string{command}, Stdin: true, Stdout: true, Stderr: true})
			if err != nil {
				t.Fatal(err)
			}
			u, err := url.Parse(address)
			if err != nil {
				t.Fatal(err)
			}
			e, err := executor(u)
			if err != nil {
				t.Fatal(err)
			}
			_ = e.StreamWithContext(t.Context(), remotecommand.StreamOptions{Stdin: strings.NewReader(stdin), Stdout: io.Discard, Stderr: io.Discard})
		}
	}
	port := listen(t, "127.0.0.1:0", echoes)
	for transport := range dialers {
		t.Run(transport, func(t *testing.T) {
			k := forwardPorts(t, s, transport, port)
			k.works(t, 0)
			k.works(t, 0)
		})
	}
	const all = 6
	var lines []string
	wait.For(t, "all records", func() bool {
		text, _ := os.ReadFile(file)
		lines = strings.SplitAfter(string(text), "\n")
		return len(lines) > all
	})
	if err := records.Close(t.Context()); err != nil || len(lines) != all+1 {
		t.Fatalf("%d records, %v", len(lines)-1, err)
	}
	count := func(parts ...string) (n int) {
		for _, line := range lines {
			has := true
			for _, part := range parts {
				has = has && strings.Contains(line, part)
			}
			if has {
				n++
			}
		}
		return n
	}
	for name := range executors {
		id := fmt.Sprintf(`"container_id":%q`, name)
		if n := count(`"verb":"exec"`, id, `"command":["seven"]`, `"bytes_in":10,"bytes_out":18`, `"exit_code":7`); n != 1 {
			t.Errorf("%d records of the command's end over %s", n, name)
		}
		if n := count(`"verb":"exec"`, id, `"command":["error"]`, `"bytes_in":11,"bytes_out":19`, `"error":"no such command"`); n != 1 {
			t.Errorf("%d records of the error over %s", n, name)
		}
	}
	if n := count(`"verb":"port-forward"`, `"pod_id":"x"`, fmt.Sprintf(`"ports":[%d]`, port), `"remote":"127.0.0.1:`, `"bytes_in":10,"bytes_out":10`, `"connections":2`); n != len(dialers) {
		t.Errorf("%d records of forwards", n)
	}
	if t.Failed() {
		t.Logf("%s", lines)
	}
}
