package conmon_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/fault"
)

var everything = conmon.Streams{Stdin: true, Stdout: true, Stderr: true}

func (c *container) attach(wanted conmon.Streams) *conmon.Attachment {
	c.Helper()
	a, err := conmon.Attach(limit(c.TB, time.Minute), c.Dir, wanted)
	if err != nil {
		c.Fatal(err)
	}
	c.Cleanup(a.Close)
	return a
}

// expect reads exactly text.
func expect(t *testing.T, f *os.File, text string) {
	t.Helper()
	got := make([]byte, len(text))
	_ = f.SetReadDeadline(time.Now().Add(time.Minute))
	n, err := io.ReadFull(f, got)
	if string(got) != text {
		t.Fatalf("%s: %q (%v), want %q", f.Name(), got[:n], err, text)
	}
}

func typeIn(t *testing.T, f *os.File, text string) {
	t.Helper()
	if f == nil {
		t.Fatal("there is no standard input")
	}
	if _, err := f.WriteString(text); err != nil {
		t.Fatal(err)
	}
}

// All who are attached see all output; input outlives who gave it; the output
// ends with the container.
func TestAttach(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		c := newContainer(t, runtime, "copy")
		c.Stdin = true
		client := c.run()
		a, b := c.attach(everything), c.attach(everything)
		typeIn(t, a.Stdin, "one\n")
		expect(t, a.Stdout, "one\n")
		expect(t, b.Stdout, "one\n")
		a.Close()
		typeIn(t, b.Stdin, "two\n")
		expect(t, b.Stdout, "two\n")
		late := c.attach(conmon.Streams{Stdout: true})
		if late.Stdin != nil || late.Stderr != nil {
			t.Error("streams that were not asked for")
		}
		b.CloseStdin()
		expect(t, late.Stdout, "end of input\n")
		if rest, err := io.ReadAll(late.Stdout); len(rest) > 0 || err != nil {
			t.Errorf("after the end: %q, %v", rest, err)
		}
		if e := exit(t, client); e.Code != 0 {
			t.Errorf("exit %+v", e)
		}
		if stdout, _ := c.log(); stdout != "one\ntwo\nend of input\n" {
			t.Errorf("log %q", stdout)
		}
		if _, err := conmon.Attach(limit(t, time.Minute), c.Dir, everything); !errors.Is(err, fault.Precondition) {
			t.Errorf("attach to the dead: %v", err)
		}
	})
}

func TestAttachStreamsApart(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		const lines, every = 50_000, 3
		c := newContainer(t, runtime, "number", fmt.Sprint(lines), fmt.Sprint(every))
		client := c.launch()
		a := c.attach(everything)
		if a.Stdin != nil {
			t.Error("input for a container that has none")
		}
		c.start()
		var stderr []byte
		done := make(chan error, 1)
		go func() {
			var err error
			stderr, err = io.ReadAll(a.Stderr)
			done <- err
		}()
		stdout, err := io.ReadAll(a.Stdout)
		if err := errors.Join(err, <-done); err != nil {
			t.Fatal(err)
		}
		wantOut, wantErr := numbered(lines, every)
		same(t, "stdout", string(stdout), wantOut)
		same(t, "stderr", string(stderr), wantErr)
		exit(t, client)
		logOut, logErr := c.log()
		same(t, "stdout in the log", logOut, wantOut)
		same(t, "stderr in the log", logErr, wantErr)
	})
}

// The first to leave takes the input along, however it leaves.
func TestAttachStdinOnce(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		c := newContainer(t, runtime, "copy")
		c.Stdin, c.StdinOnce = true, true
		client := c.run()
		c.attach(conmon.Streams{Stdout: true}).Close() // without input: does not count
		a := c.attach(everything)
		typeIn(t, a.Stdin, "only\n")
		expect(t, a.Stdout, "only\n")
		a.Close()
		exit(t, client)
		if stdout, _ := c.log(); stdout != "only\nend of input\n" {
			t.Errorf("log %q", stdout)
		}
	})
}

func TestAttachTerminal(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		c := newContainer(t, runtime, "copy")
		c.Terminal, c.Stdin, c.StdinOnce = true, true, true
		client := c.run()
		a, b := c.attach(everything), c.attach(everything)
		typeIn(t, a.Stdin, "echo\r")
		for _, x := range []*conmon.Attachment{a, b} {
			expect(t, x.Stdout, "echo\r\necho\r\n")
			if rest, err := io.ReadAll(x.Stderr); len(rest) > 0 || err != nil {
				t.Errorf("standard error of a terminal: %q, %v", rest, err)
			}
		}
		a.Close() // and the terminal stays
		typeIn(t, b.Stdin, "again\r")
		expect(t, b.Stdout, "again\r\nagain\r\n")
		typeIn(t, b.Stdin, "\x04") // end of file, as a terminal knows it
		exit(t, client)
	})
}

// Who does not read is dropped; meanwhile the container waits, and loses nothing.
func TestAttachLaggard(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		const lines = 100_000
		c := newContainer(t, runtime, "number", fmt.Sprint(lines), "0")
		client := c.launch()
		lazy, busy := c.attach(conmon.Streams{Stdout: true}), c.attach(conmon.Streams{Stdout: true})
		read := make(chan string, 1)
		go func() {
			all, _ := io.ReadAll(busy.Stdout)
			read <- string(all)
		}()
		c.start()
		began := time.Now()
		if e := exit(t, client); e.Code != 0 {
			t.Errorf("exit %+v", e)
		}
		if took := time.Since(began); took < time.Second {
			t.Errorf("nobody waited for the laggard: %v", took)
		}
		want, _ := numbered(lines, 0)
		same(t, "what the other reads", <-read, want)
		stdout, _ := c.log()
		same(t, "log", stdout, want)
		got, _ := io.ReadAll(lazy.Stdout)
		if len(got) == 0 || !strings.HasPrefix(want, string(got)) {
			t.Errorf("the laggard has %d bytes that are not the first of the output", len(got))
		}
	})
}

// A client that leaves with its pipes full leaves nothing behind.
func TestAttachAndVanish(t *testing.T) {
	t.Parallel()
	c := newContainer(t, "crun", "tick", "0")
	client := c.run()
	monitor := c.processes().Monitor.PID
	before := len(openFiles(t, monitor))
	for range 200 {
		a := c.attach(everything)
		_, _ = a.Stdout.Read(make([]byte, 100))
		a.Close()
	}
	eventually(t, "no more descriptors than before", func() bool { return len(openFiles(t, monitor)) <= before })
	if err := client.ReopenLog(limit(t, time.Minute)); err != nil {
		t.Error(err)
	}
}

func openFiles(t *testing.T, pid int) []os.DirEntry {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return entries
}

// Descriptors that no request has asked for are closed.
func TestUnaskedDescriptors(t *testing.T) {
	t.Parallel()
	c := newContainer(t, "crun", "sleep")
	c.run()
	monitor := c.processes().Monitor.PID
	s := c.stranger(t)
	s.receive() // hello
	s.receive() // created
	s.receive() // logged
	before := len(openFiles(t, monitor))
	var own []int
	for range 10 {
		own = append(own, 0)
	}
	for _, request := range []string{"reopen-log", "attach", "attach stdout", "attach nonsense", "nonsense"} {
		for n := 2; n <= len(own); n += 8 { // fewer and more than there is room for
			if err := unix.Sendmsg(s.fd, []byte(request), unix.UnixRights(own[:n]...), nil, 0); err != nil {
				t.Fatal(err)
			}
			if got := s.receive(); !bytes.HasPrefix([]byte(got), []byte("error ")) && request != "reopen-log" {
				t.Errorf("%s: %q", request, got)
			}
		}
	}
	if after := len(openFiles(t, monitor)); after != before {
		t.Errorf("%d descriptors, before %d", after, before)
	}
}

// A container that is deleted while a client does not read leaves its exit, and
// all it has written in its log.
func TestReleaseDespiteLaggard(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		const attempts, lag = 5, 2 * time.Second // if the laggard is waited for, it is so each time
		took := time.Duration(math.MaxInt64)
		for range attempts {
			if took = min(took, releaseDespiteLaggard(t, runtime)); took < lag*3/4 {
				return
			}
		}
		t.Errorf("the laggard was waited for: %v", took)
	})
}

func releaseDespiteLaggard(t *testing.T, runtime string) (took time.Duration) {
	c := newContainer(t, runtime, "burst", "3000000")
	c.Stdin = true
	client := c.run()
	lazy := c.attach(everything)
	lazy.CloseStdin() // and the burst begins
	eventually(t, "a full pipe", func() bool {
		stdout, _ := c.log()
		return len(stdout) > 60<<10
	})
	began := time.Now()
	if err := conmon.Terminate(limit(t, time.Minute), c.Dir); err != nil {
		t.Fatal(err)
	}
	took = time.Since(began)
	if e := exit(t, client); e.Signal != 9 {
		t.Errorf("exit %+v", e)
	}
	if _, err := conmon.ReadExit(c.ExitFile); err != nil {
		t.Error(err)
	}
	return took
}

// However many attach, the server and who ends the monitor find a place.
func TestCrowdOfAttachments(t *testing.T) {
	t.Parallel()
	c := newContainer(t, "crun", "sleep")
	client := c.run()
	refused := 0
	for range 60 {
		a, err := conmon.Attach(limit(t, time.Minute), c.Dir, conmon.Streams{Stdout: true})
		if err == nil {
			t.Cleanup(a.Close)
			continue
		}
		refused++
		if !strings.Contains(err.Error(), "too many clients") {
			t.Errorf("refused with %v", err)
		}
	}
	if refused == 0 {
		t.Error("none was refused")
	}
	if err := conmon.Terminate(limit(t, time.Minute), c.Dir); err != nil {
		t.Fatal(err)
	}
	if e := exit(t, client); e.Signal != 9 {
		t.Errorf("exit %+v", e)
	}
	if _, err := conmon.ReadExit(c.ExitFile); err != nil {
		t.Error(err)
	}
}
