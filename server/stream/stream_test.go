package stream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"os"
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
