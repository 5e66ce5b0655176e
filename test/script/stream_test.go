package script

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// terminal is a pseudo-terminal with the operator's end of it.
type terminal struct {
	keyboard *os.File // the master: what is typed, and what is shown
	slave    *os.File

	mu    sync.Mutex
	shown bytes.Buffer
}

func openTerminal(t *testing.T, columns, rows uint16) *terminal {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { master.Close() })
	fd := int(master.Fd())
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatalf("unlock the terminal: %v", err)
	}
	n, err := unix.IoctlGetUint32(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatalf("number of the terminal: %v", err)
	}
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	out := &terminal{keyboard: master, slave: slave}
	out.resize(t, columns, rows)
	go func() {
		buf := make([]byte, 4096)
		for {
			n, err := master.Read(buf)
			out.mu.Lock()
			out.shown.Write(buf[:n])
			out.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return out
}

func (x *terminal) resize(t *testing.T, columns, rows uint16) {
	t.Helper()
	if err := unix.IoctlSetWinsize(int(x.keyboard.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: columns, Row: rows}); err != nil {
		t.Fatalf("resize the terminal: %v", err)
	}
}

func (x *terminal) text() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.shown.String()
}

func (x *terminal) shows(t *testing.T, words string) {
	t.Helper()
	if !wait.Until(t.Context(), func() bool { return strings.Contains(x.text(), words) }) {
		t.Fatalf("the terminal never shows %q, but:\n%s", words, x.text())
	}
}

func (x *terminal) types(t *testing.T, text string) {
	t.Helper()
	if _, err := io.WriteString(x.keyboard, text); err != nil {
		t.Fatal(err)
	}
}

// A call is a crictl process on the node, where its streams are served.
type call struct {
	cmd    *exec.Cmd
	out    bytes.Buffer
	errors bytes.Buffer
	done   chan error
}

// start runs a crictl command line, on a terminal or with input.
func (s *shell) start(t *testing.T, x *terminal, input io.Reader, line string) *call {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), wait.Limit)
	c := &call{cmd: exec.CommandContext(ctx, s.crictl, s.args(line)...), done: make(chan error, 1)}
	c.cmd.WaitDelay = time.Second
	if x != nil {
		c.cmd.Stdin, c.cmd.Stdout, c.cmd.Stderr = x.slave, x.slave, x.slave
		c.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	} else {
		c.cmd.Stdin, c.cmd.Stdout, c.cmd.Stderr = input, &c.out, &c.errors
	}
	if err := s.node.Do(c.cmd.Start); err != nil {
		cancel()
		t.Fatal(err)
	}
	go func() {
		c.done <- c.cmd.Wait()
		cancel()
	}()
	t.Cleanup(cancel)
	return c
}

// wait returns how the program ended.
func (c *call) wait(t *testing.T) error {
	t.Helper()
	return scene.Receive(t, fmt.Sprintf("crictl to end: %q", c.cmd.Args), c.done)
}

// end kills the program, whose connection the kernel then closes.
func (c *call) end(t *testing.T) {
	t.Helper()
	c.cmd.Process.Kill()
	c.wait(t)
}

func (s *shell) streamed(t *testing.T, handler string, container object) (pod, id string) {
	t.Helper()
	s.write(t, "streamed.json", container)
	s.run(t, "pull %s", container["image"].(object)["image"])
	pod = s.run(t, "runp -r %s @pod.json", handler)
	id = s.run(t, "create %s @streamed.json @pod.json", pod)
	s.run(t, "start %s", id)
	t.Cleanup(func() {
		s.try(t, "rmp -f "+pod)
	})
	return pod, id
}

func probeContainer(words string, more object) object {
	out := object{
		"metadata": object{"name": "streamed"},
		"image":    object{"image": "registry.test/probe:latest"},
		"args":     strings.Fields(words),
		"log_path": "streamed.log",
		"linux":    object{},
	}
	for k, v := range more {
		out[k] = v
	}
	return out
}

func TestCrictlStreams(t *testing.T) {
	s := open(t)
	s.files(t)
	for _, handler := range []string{"runc", "crun"} {
		t.Run(handler, func(t *testing.T) {
			pod, id := s.streamed(t, handler, probeContainer("serve 127.0.0.1:8080 from-the-pod", nil))
			for _, transport := range []string{"spdy", "websocket"} {
				t.Run("exec over "+transport, func(t *testing.T) { s.execs(t, id, transport) })
				t.Run("port-forward over "+transport, func(t *testing.T) { s.forwards(t, pod, transport) })
			}
			s.run(t, "rmp -f %s", pod)
			t.Run("attach", func(t *testing.T) { s.attaches(t, handler) })
			t.Run("attach with a terminal", func(t *testing.T) { s.attachesTerminal(t, handler) })
		})
	}
}

func (s *shell) execs(t *testing.T, id, transport string) {
	c := s.start(t, nil, nil, fmt.Sprintf("exec -r %s %s /probe echo out ; echo -err err", transport, id))
	if err := c.wait(t); err != nil || c.out.String() != "out\n" || c.errors.String() != "err\n" {
		t.Errorf("exec: %v, stdout %q, stderr %q", err, c.out.String(), c.errors.String())
	}
	c = s.start(t, nil, nil, fmt.Sprintf("exec -r %s %s /probe exit 7", transport, id))
	var exit *exec.ExitError
	if err := c.wait(t); !errors.As(err, &exit) || !strings.Contains(c.errors.String(), "7") {
		t.Errorf("exec of a command that fails: %v, stderr %q", err, c.errors.String())
	}
	c = s.start(t, nil, strings.NewReader("piped in\n"), fmt.Sprintf("exec -i -r %s %s /probe cat", transport, id))
	if err := c.wait(t); err != nil || c.out.String() != "piped in\n" {
		t.Errorf("exec -i: %v, stdout %q, stderr %q", err, c.out.String(), c.errors.String())
	}

	x := openTerminal(t, 101, 41)
	c = s.start(t, x, nil, fmt.Sprintf("exec -i -t -r %s %s /probe sizes", transport, id))
	x.shows(t, "size 101x41")
	s.resizes(t, x, c, id, 77, 33)
	x.types(t, "\x03")
	if err := c.wait(t); err == nil {
		t.Errorf("exec -it after ^C ended well:\n%s", x.text())
	}
	x.shows(t, "130")
	x = openTerminal(t, 80, 25)
	c = s.start(t, x, nil, fmt.Sprintf("exec -i -t -r %s %s /probe line ; echo bye", transport, id))
	x.types(t, "typed\r")
	x.shows(t, `got "typed"`)
	if err := c.wait(t); err != nil {
		t.Errorf("exec -it: %v\n%s", err, x.text())
	}
}

func (s *shell) forwards(t *testing.T, pod, transport string) {
	c := s.start(t, nil, nil, fmt.Sprintf("port-forward -r %s %s 18080:8080", transport, pod))
	defer c.end(t)
	ctx, cancel := context.WithTimeout(t.Context(), wait.Limit)
	defer cancel()
	go func() { // stop waiting when the program has ended
		select {
		case err := <-c.done:
			c.done <- err
			cancel()
		case <-ctx.Done():
		}
	}()
	for range 3 {
		body, err := s.node.Get(ctx, "127.0.0.1:18080", "/")
		if err != nil || body != "from-the-pod\n" {
			t.Fatalf("through the tunnel came %q, %v; crictl says %q", body, err, c.errors.String())
		}
	}
}

func (s *shell) attaches(t *testing.T, handler string) {
	pod, id := s.streamed(t, handler, probeContainer("cat", object{"stdin": true}))
	defer s.run(t, "rmp -f %s", pod)
	in, typing, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	defer typing.Close()
	c := s.start(t, nil, in, "attach -i "+id)
	io.WriteString(typing, "first\n")
	s.willSee(t, "logs "+id, "first")
	c.end(t)
	s.sees(t, "ps", id[:13], "Running")
}

func (s *shell) attachesTerminal(t *testing.T, handler string) {
	pod, id := s.streamed(t, handler, probeContainer("sizes", object{"stdin": true, "tty": true}))
	defer s.run(t, "rmp -f %s", pod)
	x := openTerminal(t, 90, 30)
	c := s.start(t, x, nil, "attach -i -t "+id)
	s.willSee(t, "logs "+id, "size 90x30")
	s.resizes(t, x, c, id, 60, 20)
	c.end(t)
	s.sees(t, "ps", id[:13], "Running")

	x = openTerminal(t, 90, 30)
	c = s.start(t, x, nil, "attach -i -t "+id)
	s.resizes(t, x, c, id, 61, 20)
	x.types(t, "\x03")
	if err := c.wait(t); err != nil {
		t.Errorf("attach to a container that ends: %v\n%s", err, x.text())
	}
	s.willSee(t, "inspect "+id, `"exitCode": 130`)
}

// resizes changes the terminal's size until crictl, which sees a signal only
// once it listens for them and may drop one, has passed it to the container.
func (s *shell) resizes(t *testing.T, x *terminal, c *call, id string, columns, rows uint16) {
	t.Helper()
	x.resize(t, columns, rows)
	size := fmt.Sprintf("size %dx%d", columns, rows)
	if !wait.Until(t.Context(), func() bool {
		c.cmd.Process.Signal(syscall.SIGWINCH)
		return strings.Contains(x.text(), size)
	}) {
		t.Fatalf("the terminal never shows %q, but:\n%s\nand the log:\n%s", size, x.text(), s.run(t, "logs %s", id))
	}
}
