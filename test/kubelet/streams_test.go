//go:build kubelet

package kubelet

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"

	utilexec "k8s.io/client-go/util/exec"

	kit "github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/wait"
)

// transports runs a test with the two transports that clients of the API server
// use.
func transports(t *testing.T, test func(t *testing.T, webSocket bool)) {
	for name, webSocket := range map[string]bool{"SPDY": false, "WebSocket": true} {
		t.Run(name, func(t *testing.T) { test(t, webSocket) })
	}
}

// url returns the address of a session, with its streams.
func (p *pod) url(verb, container string, w kit.Wants, command ...string) string {
	query := url.Values{"command": command}
	for name, wanted := range map[string]bool{"input": w.Stdin, "output": w.Stdout, "error": w.Stderr, "tty": w.TTY} {
		if wanted {
			query.Set(name, "1")
		}
	}
	return "https://" + address + p.path(verb, container, query)
}

func TestExec(t *testing.T) {
	each(t, func(t *testing.T, k *machine) {
		p := k.run(t, `
  containers: [{name: main, image: registry.test/probe}]
`)
		p.ready(t)
		transports(t, func(t *testing.T, webSocket bool) {
			wants := kit.Wants{Stdin: true, Stdout: true, Stderr: true}
			s := p.session(webSocket).Open(t.Context(), p.url("exec", "main", wants, "/probe", "until", "enough", ";", "echo", "-err", "aside", ";", "exit", "5"), wants)
			if err := s.Type("first\nenough\n"); err != nil {
				t.Fatal(err)
			}
			var exit utilexec.CodeExitError
			if err := s.Wait(wait.Limit); !errors.As(err, &exit) || exit.Code != 5 {
				t.Errorf("the command ended with %v, want code 5", err)
			}
			sameLines(t, "standard output", s.Stdout.String(), "first", "enough")
			sameLines(t, "standard error", s.Stderr.String(), "aside")

			wants = kit.Wants{Stdin: true, Stdout: true, TTY: true, Size: kit.Size{Width: 91, Height: 33}}
			s = p.session(webSocket).Open(t.Context(), p.url("exec", "main", wants, "/probe", "sizes"), wants)
			wait.For(t, "the terminal's size", func() bool { return strings.Contains(s.Stdout.String(), "size 91x33") })
			s.Resize(92, 34)
			wait.For(t, "the terminal's other size", func() bool { return strings.Contains(s.Stdout.String(), "size 92x34") })
			s.Leave()
		})
	})
}

func TestAttach(t *testing.T) {
	each(t, func(t *testing.T, k *machine) {
		transports(t, func(t *testing.T, webSocket bool) {
			p := k.run(t, `
  restartPolicy: Never
  containers: [{name: main, image: registry.test/probe, args: [until, enough, ;, echo, done], stdin: true, stdinOnce: true}]
`)
			p.ready(t)
			wants := kit.Wants{Stdin: true, Stdout: true, Stderr: true}
			s := p.session(webSocket).Open(t.Context(), p.url("attach", "main", wants), wants)
			if err := s.Type("first\nenough\n"); err != nil {
				t.Fatal(err)
			}
			if err := s.Wait(wait.Limit); err != nil {
				t.Errorf("the session ended with %v", err)
			}
			sameLines(t, "standard output", s.Stdout.String(), "first", "enough", "done")
			p.phase(t, "Succeeded")
		})
	})
}

// The client's end of input ends a session without stdinOnce, and not the
// container.
func TestAttachEndsWithItsInput(t *testing.T) {
	each(t, func(t *testing.T, k *machine) {
		transports(t, func(t *testing.T, webSocket bool) {
			p := k.run(t, `
  containers: [{name: main, image: registry.test/probe, args: [until, enough, ;, sleep], stdin: true}]
`)
			p.ready(t)
			wants := kit.Wants{Stdin: true, Stdout: true, Stderr: true}
			s := p.session(webSocket).Open(t.Context(), p.url("attach", "main", wants), wants)
			if err := s.Type("first\n"); err != nil {
				t.Fatal(err)
			}
			p.says(t, "main", "first")
			s.EndInput()
			if err := s.Wait(wait.Limit); err != nil {
				t.Errorf("the session ended with %v", err)
			}
			if c := p.status(t).of("main"); c.State.Running == nil || c.RestartCount != 0 {
				t.Errorf("the container is %+v", c)
			}
		})
	})
}

func TestPortForward(t *testing.T) {
	each(t, func(t *testing.T, k *machine) {
		p := k.run(t, `
  containers: [{name: main, image: registry.test/probe, args: [tcp, ":8081", digest, ;, serve, "127.0.0.1:8080", hello]}]
`)
		p.ready(t)
		tunnel := "https://" + address + p.path("portForward", "", nil)
		port, _, err := p.session(false).Forward(t.Context(), tunnel, 8080)
		if err != nil {
			t.Fatal(err)
		}
		body, err := k.Get(t.Context(), fmt.Sprintf("127.0.0.1:%d", port), "/")
		if err != nil || body != "hello\n" {
			t.Errorf("through the port: %q, %v", body, err)
		}
		if port, _, err = p.session(false).Forward(t.Context(), tunnel, 8081); err != nil {
			t.Fatal(err)
		}
		conn, err := k.Dial(t.Context(), "tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		const size = 3 << 20
		if _, err := conn.Write(bytes.Repeat([]byte{'x'}, size)); err != nil {
			t.Fatal(err)
		}
		if err := conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if answer, err := io.ReadAll(conn); err != nil || !strings.HasPrefix(string(answer), fmt.Sprint(size)) {
			t.Errorf("the pod has received %q, %v, want %d bytes", answer, err, size)
		}
	})
}

// A command that the kubelet cannot run yields an answer, not a session.
func TestExecOfAMissingProgram(t *testing.T) {
	each(t, func(t *testing.T, k *machine) {
		p := k.run(t, `
  containers: [{name: main, image: registry.test/probe}]
`)
		p.ready(t)
		wants := kit.Wants{Stdout: true, Stderr: true}
		s := p.session(true).Open(t.Context(), p.url("exec", "main", wants, "/there/is/none"), wants)
		if err := s.Wait(wait.Limit); err == nil || !strings.Contains(err.Error(), "/there/is/none") {
			t.Errorf("the session ended with %v", err)
		}
		_, err := k.ask(t.Context(), http.MethodPost, p.path("run", "main", url.Values{"cmd": {"/there/is/none"}}))
		if err == nil || !strings.Contains(err.Error(), "/there/is/none") {
			t.Errorf("run answers %v", err)
		}
	})
}
