package kubelet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	utilexec "k8s.io/client-go/util/exec"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	exec "k8s.io/utils/exec"

	"github.com/crius-run/crius/test/kit/wait"
)

// echoRuntime echoes its input: a runtime for testing the clients.
type echoRuntime struct{}

func (echoRuntime) ExecInContainer(_ context.Context, _, _, _ string, cmd []string, in io.Reader, out, errs io.WriteCloser, tty bool, sizes <-chan remotecommand.TerminalSize, _ time.Duration) error {
	if tty {
		size := <-sizes
		fmt.Fprintf(out, "%dx%d", size.Width, size.Height)
		return nil
	}
	fmt.Fprint(errs, strings.Join(cmd, " "))
	io.Copy(out, in)
	return exec.CodeExitError{Err: errors.New("failed"), Code: 7}
}

func (echoRuntime) PortForward(_ context.Context, _, _ string, port int32, s io.ReadWriteCloser) error {
	if port == 9 {
		return errors.New("nobody listens")
	}
	_, err := io.Copy(s, s)
	return err
}

// serve answers at /exec, at /terminal and at /forward, and nowhere else.
func (p echoRuntime) serve(t *testing.T) (address string) {
	t.Helper()
	run := func(o remotecommand.Options) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			remotecommand.ServeExec(w, r, p, "", "", "", []string{"a", "b"}, &o, time.Hour, time.Minute, remotecommand.SupportedStreamingProtocols)
		}
	}
	mux := http.NewServeMux()
	mux.Handle("/exec", run(remotecommand.Options{Stdin: true, Stdout: true, Stderr: true}))
	mux.Handle("/terminal", run(remotecommand.Options{Stdin: true, Stdout: true, TTY: true}))
	mux.HandleFunc("/forward", func(w http.ResponseWriter, r *http.Request) {
		portforward.ServePortForward(w, r, p, "", "", &portforward.V4Options{}, time.Hour, time.Minute, portforward.SupportedProtocols)
	})
	s := httptest.NewServer(mux)
	t.Cleanup(s.CloseClientConnections)
	return s.URL
}

func TestSessions(t *testing.T) {
	address := echoRuntime{}.serve(t)
	for name, s := range map[string]Streams{
		"SPDY":      {},
		"SPDY v4":   {Protocols: []string{"v4.channel.k8s.io"}},
		"WebSocket": {WebSocket: true, Protocols: []string{"v4.channel.k8s.io"}},
	} {
		t.Run(name, func(t *testing.T) {
			e := s.Open(t.Context(), address+"/exec", Wants{Stdin: true, Stdout: true, Stderr: true})
			if err := e.Type("hello"); err != nil {
				t.Fatal(err)
			}
			if s.WebSocket { // where the input cannot be ended
				for e.Stdout.String() != "hello" || e.Stderr.String() != "a b" {
					if err := e.Wait(10 * time.Millisecond); err != nil && !strings.Contains(err.Error(), "goes on") {
						t.Fatal(err)
					}
				}
				e.Leave()
				return
			}
			e.EndInput()
			var exit utilexec.CodeExitError
			if err := e.Wait(wait.Limit); !errors.As(err, &exit) || exit.Code != 7 {
				t.Errorf("ended with %v", err)
			}
			if e.Stdout.String() != "hello" || e.Stderr.String() != "a b" {
				t.Errorf("output is %q and %q", e.Stdout.String(), e.Stderr.String())
			}

			e = s.Open(t.Context(), address+"/terminal", Wants{Stdin: true, Stdout: true, TTY: true, Size: Size{Width: 90, Height: 30}})
			if err := e.Wait(wait.Limit); err != nil || e.Stdout.String() != "90x30" {
				t.Errorf("the terminal brought %q, %v", e.Stdout.String(), err)
			}
		})
	}
}

func TestAFrozenConnectionReadsNothing(t *testing.T) {
	_, line, err := Streams{}.SPDY(t.Context(), echoRuntime{}.serve(t)+"/exec", "v4.channel.k8s.io")
	if err != nil {
		t.Fatal(err)
	}
	line.Freeze()
	done := make(chan error, 1)
	go func() {
		_, err := line.Read(make([]byte, 1))
		done <- err
	}()
	select {
	case err := <-done:
		t.Errorf("a frozen line was read: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	line.Cut()
	if err := <-done; err == nil {
		t.Error("a frozen line brought something at its end")
	}
}

func TestTunnel(t *testing.T) {
	tunnel, err := Streams{}.Tunnel(t.Context(), echoRuntime{}.serve(t)+"/forward")
	if err != nil {
		t.Fatal(err)
	}
	defer tunnel.Close()
	wire, err := tunnel.Connect(80)
	if err != nil {
		t.Fatal(err)
	}
	io.WriteString(wire, "there and back")
	wire.Close()
	if got, err := io.ReadAll(wire); err != nil || string(got) != "there and back" {
		t.Errorf("the echo is %q, %v", got, err)
	}
	tunnel.Forget(wire)
	// The server may reset a stream before the client sees that it was created.
	wait.For(t, "a stream to a refused port", func() bool {
		wire, err = tunnel.Connect(9)
		return err == nil
	})
	if message, err := io.ReadAll(wire.Errors); err != nil || !strings.Contains(string(message), "nobody listens") {
		t.Errorf("the error stream says %q, %v", message, err)
	}
}

func TestUpgradesThatAreRefused(t *testing.T) {
	address := echoRuntime{}.serve(t)
	if _, _, err := (Streams{}).SPDY(t.Context(), address+"/exec", "v99"); err == nil || !strings.Contains(err.Error(), "v99") {
		t.Errorf("SPDY with an unknown version: %v", err)
	}
	if _, _, err := (Streams{}).RawWebSocket(t.Context(), address+"/gone", "v4.channel.k8s.io"); err == nil || !strings.Contains(err.Error(), "404") {
		t.Errorf("an unknown URL: %v", err)
	}
}
