package main

import (
	"bytes"
	"io"
	"net"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/crius-run/crius/test/kit/refusing"
	"github.com/crius-run/crius/test/kit/wait"
)

// echo listens on the loopback interface and answers when the client has sent everything.
func echo(t *testing.T, host string) (port string) {
	t.Helper()
	l := refusing.Listen(t, host)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			text, _ := io.ReadAll(conn)
			_, _ = conn.Write(append([]byte("got "), text...))
			_ = conn.Close()
		}
	}()
	return strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
}

// In a sandbox the program is the far end of a forwarded port: each direction can end by
// itself, and a failed connection is reported with its reason.
func TestForward(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "crius-conmon")
	if text, err := exec.Command("go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	forward := func(input string, args ...string) (stdout, stderr string, err error) {
		run := exec.CommandContext(t.Context(), program, append([]string{"forward"}, args...)...)
		run.WaitDelay = wait.Limit
		var out, words bytes.Buffer
		run.Stdin, run.Stdout, run.Stderr = strings.NewReader(input), &out, &words
		err = run.Run()
		return out.String(), words.String(), err
	}
	large := strings.Repeat("ping", 200_000)
	for _, host := range []string{"127.0.0.1", "::1"} {
		out, words, err := forward(large, echo(t, host))
		if err != nil || words != "." || out != "got "+large {
			t.Errorf("%s: %d bytes, %q, %v", host, len(out), words, err)
		}
	}
	port := strconv.Itoa(refusing.Port(t))
	if _, words, err := forward("", port); err == nil || !strings.Contains(words, "port "+port+": connection refused") {
		t.Errorf("a closed port: %q, %v", words, err)
	}
	for _, args := range [][]string{nil, {"0"}, {"65536"}, {"x"}, {"1", "2"}} {
		if _, words, err := forward("", args...); err == nil || !strings.Contains(words, "needs a port") {
			t.Errorf("%q: %q, %v", args, words, err)
		}
	}
}
