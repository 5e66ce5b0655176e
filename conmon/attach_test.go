package conmon_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/wait"
)

var everything = conmon.Streams{Stdin: true, Stdout: true, Stderr: true}

func (c *container) attach(wanted conmon.Streams) *conmon.Attachment {
	c.Helper()
	a, err := conmon.Attach(limit(c.TB), c.Dir, wanted)
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
	_ = f.SetReadDeadline(time.Now().Add(wait.Limit))
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

// All attached clients see all output; input outlives the client that gave it;
// the output ends with the container.
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
		if _, err := conmon.Attach(limit(t), c.Dir, everything); !errors.Is(err, fault.Precondition) {
			t.Errorf("attach to the dead: %v", err)
		}
	})
}

func TestAttachStreamsApart(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		const lines, every = 12_000, 3 // as much as a pipe can hold: no client is dropped
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

// The first client to leave ends the input, however it leaves.
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

// A client that detaches gets everything that the container had written, and
// the container keeps its input.
func TestDetach(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		c := newContainer(t, runtime, "copy")
		c.Stdin = true
		client := c.run()
		stays := c.attach(everything)
		var want strings.Builder
		for i := range 20 {
			text := strings.Repeat(fmt.Sprintf("of %d\n", i), 5000)
			want.WriteString(text)
			a := c.attach(everything)
			typeIn(t, a.Stdin, text)
			expect(t, stays.Stdout, text) // it is written
			if err := a.Detach(limit(t)); err != nil {
				t.Fatal(err)
			}
			if got, err := io.ReadAll(a.Stdout); string(got) != text || err != nil {
				t.Fatalf("%d bytes of %d, %v", len(got), len(text), err)
			}
			if err := a.Dropped(); err != nil {
				t.Error(err)
			}
			a.Close()
		}
		a := c.attach(conmon.Streams{Stdout: true})
		stays.CloseStdin()
		exit(t, client)
		if err := a.Detach(limit(t)); err != nil {
			t.Errorf("detach from the dead: %v", err)
		}
		stdout, _ := c.log()
		same(t, "log", stdout, want.String()+"end of input\n")
	})
}

// What a monitor may answer, and that it may not answer.
func TestDetachAnswers(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		before  string   // sent before the request
		answers []string // none: it hangs
		leaves  bool
		want    error
	}{
		"done":               {answers: []string{"logged 5", "ok"}},
		"container ends":     {answers: []string{"exited 0 0 0 0", "ok"}},
		"monitor leaves":     {answers: []string{"exited 0 0 0 0"}, leaves: true},
		"earlier release":    {answers: []string{"error unknown request"}, want: fault.Unimplemented},
		"client is dropped":  {answers: []string{"dropped too slow"}, leaves: true, want: fault.Unavailable},
		"client was dropped": {before: "dropped too slow", leaves: true, want: fault.Unavailable},
		"monitor had left":   {before: "exited 0 0 0 0", leaves: true},
		"hangs":              {want: context.DeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			l, err := net.Listen("unixpacket", filepath.Join(dir, "monitor.sock"))
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			asked := make(chan struct{})
			go func() {
				defer close(asked)
				conn, err := l.Accept()
				if err != nil {
					return
				}
				request := make([]byte, 100)
				_, _ = conn.Read(request)
				say := func(packets ...string) {
					for _, packet := range packets {
						_, _ = conn.Write([]byte(packet))
					}
				}
				say("hello 1 running", "ok")
				if test.before != "" {
					say(test.before)
				} else {
					_, _ = conn.Read(request)
					say(test.answers...)
				}
				if !test.leaves {
					t.Cleanup(func() { conn.Close() })
					return
				}
				conn.Close()
			}()
			a, err := conmon.Attach(limit(t), dir, conmon.Streams{Stdout: true})
			if err != nil {
				t.Fatal(err)
			}
			defer a.Close()
			ctx := limit(t)
			switch {
			case test.before != "":
				<-asked
			case test.answers == nil:
				hung, cancel := context.WithTimeout(ctx, time.Millisecond)
				defer cancel()
				ctx = hung
			}
			if err := a.Detach(ctx); !errors.Is(err, test.want) {
				t.Errorf("%v, want %v", err, test.want)
			}
			<-asked
		})
	}
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
		typeIn(t, b.Stdin, "\x04") // end of file on a terminal
		exit(t, client)
	})
}

// pipeMax returns the pipe size that is always allowed.
func pipeMax(t *testing.T) (size int) {
	t.Helper()
	text, err := os.ReadFile("/proc/sys/fs/pipe-max-size")
	if err == nil {
		_, err = fmt.Sscan(string(text), &size)
	}
	if err != nil {
		t.Fatal(err)
	}
	return min(size, wire.MostBehind)
}

// slowly is a container with a client that has not read anything yet while the container
// writes size bytes in lines.
func slowly(t *testing.T, runtime string, patience time.Duration, size int) (*container, *conmon.Client, *conmon.Attachment) {
	c := newContainer(t, runtime, "flood", "1000", fmt.Sprint(size))
	c.AttachWait = patience
	client := c.launch()
	a := c.attach(conmon.Streams{Stdout: true})
	c.start()
	c.awaitLogSize(pipeMax(t) / 8)
	return c, client, a
}

func (c *container) awaitLogSize(size int) {
	c.Helper()
	wait.For(c.TB, fmt.Sprintf("%d bytes in the log", size), func() bool {
		info, err := os.Stat(c.LogFile)
		return err == nil && info.Size() >= int64(size)
	})
}

// The container waits for an attached client that reads, which gets everything, however
// slowly it reads.
func TestAttachedClientThatReadsSlowlyGetsEverything(t *testing.T) {
	const size = 3 * wire.MostBehind
	everyRuntime(t, func(t *testing.T, runtime string) {
		c, client, a := slowly(t, runtime, time.Hour, size)
		var got strings.Builder
		for piece := make([]byte, 8<<10); ; {
			n, err := a.Stdout.Read(piece)
			if got.Write(piece[:n]); err != nil {
				break
			}
			if got.Len() < size-pipeMax(t) {
				c.awaitLogSize(got.Len() + pipeMax(t)/8)
			}
		}
		if err := a.Dropped(); err != nil {
			t.Error(err)
		}
		exit(t, client)
		stdout, _ := c.log()
		same(t, "what the client has read", got.String(), stdout)
		if len(stdout) < size {
			t.Errorf("the log has %d bytes, want %d", len(stdout), size)
		}
	})
}

// The end of a container waits for nobody, and its client still gets everything.
func TestContainerThatIsKilledWhileItWaitsForAClient(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		c, client, a := slowly(t, runtime, time.Hour, 100<<20)
		if err := client.Signal(unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		exit(t, client)
		got, err := io.ReadAll(a.Stdout)
		if err != nil {
			t.Error(err)
		}
		if err := a.Dropped(); err != nil {
			t.Error(err)
		}
		stdout, _ := c.log()
		same(t, "what the client has read", string(got), stdout)
	})
}

// A client that reads nothing is waited for as long as it was agreed, and is then told so.
func TestAttachedClientThatReadsNothingIsDroppedInTheEnd(t *testing.T) {
	const size = 2 * wire.MostBehind
	everyRuntime(t, func(t *testing.T, runtime string) {
		c, client, a := slowly(t, runtime, 50*time.Millisecond, size)
		exit(t, client)
		if err := a.Dropped(); !errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "it read none of the output for 50ms; the container log is complete") {
			t.Errorf("a client that reads nothing: %v", err)
		}
		if stdout, _ := c.log(); len(stdout) < size {
			t.Errorf("the log has %d bytes, want %d", len(stdout), size)
		}
	})
}

// cri-o#7945: a client that wants no output holds nothing up.
func TestAttachToTheInputAlone(t *testing.T) {
	t.Parallel()
	c := newContainer(t, "crun", "copy")
	c.Stdin, c.AttachWait = true, time.Hour
	client := c.run()
	a := c.attach(conmon.Streams{Stdin: true})
	text := strings.Repeat("0123456789abcde\n", 2<<20/16)
	typeIn(t, a.Stdin, text)
	a.CloseStdin()
	exit(t, client)
	stdout, _ := c.log()
	same(t, "log", stdout, text+"end of input\n")
}

// With the option for that, the container, its log and other clients do not wait for a
// client that does not read.
func TestAttachedClientThatDoesNotReadIsDropped(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		c := newContainer(t, runtime, "copy")
		c.Stdin, c.AttachWait = true, conmon.NoAttachWait
		client := c.run()
		lazy, busy := c.attach(conmon.Streams{Stdout: true}), c.attach(everything)
		piece := strings.Repeat("0123456789abcde\n", 1<<12)
		var want strings.Builder
		var dropped error
		for dropped == nil && want.Len() <= wire.MostBehind {
			typeIn(t, busy.Stdin, piece)
			expect(t, busy.Stdout, piece)
			want.WriteString(piece)
			dropped = lazy.Dropped()
		}
		if !errors.Is(dropped, fault.Unavailable) || !strings.Contains(dropped.Error(), "too slowly") || want.Len() <= pipeMax(t)*3/4 {
			t.Errorf("a client that is %d bytes behind: %v", want.Len(), dropped)
		}
		busy.CloseStdin()
		expect(t, busy.Stdout, "end of input\n")
		if err := busy.Dropped(); err != nil {
			t.Errorf("the client that reads: %v", err)
		}
		exit(t, client)
		want.WriteString("end of input\n")
		stdout, _ := c.log()
		same(t, "log", stdout, want.String())
		got, err := io.ReadAll(lazy.Stdout)
		if err != nil || len(got) < pipeMax(t)*3/4 || !strings.HasPrefix(want.String(), string(got)) {
			t.Errorf("the laggard has %d bytes that are not the first of the output, or too few: %v", len(got), err)
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
	for range 50 { // more than fit at once
		a := c.attach(everything)
		_, _ = a.Stdout.Read(make([]byte, 100))
		a.Close()
	}
	wait.For(t, "no more descriptors than before", func() bool { return len(openFiles(t, monitor)) <= before })
	if err := client.ReopenLog(limit(t)); err != nil {
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

// Descriptors that no request needs are closed.
func TestUnrequestedDescriptorsAreClosed(t *testing.T) {
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
		for n := 2; n <= len(own); n += 8 { // fewer and more than fit
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
// everything that it has written in its log.
func TestReleaseDespiteSlowClient(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		c := newContainer(t, runtime, "burst", "300000")
		c.Stdin, c.AttachWait = true, conmon.NoAttachWait
		client := c.run()
		lazy := c.attach(everything)
		lazy.CloseStdin() // and the burst begins
		wait.For(t, "the burst in the log", func() bool {
			stdout, _ := c.log()
			return strings.HasSuffix(stdout, "end of burst\n")
		})
		if err := conmon.Terminate(limit(t), c.Dir); err != nil {
			t.Fatal(err)
		}
		if e := exit(t, client); e.Signal != 9 {
			t.Errorf("exit %+v", e)
		}
		if _, err := conmon.ReadExit(c.ExitFile); err != nil {
			t.Error(err)
		}
		if err := lazy.Dropped(); err != nil {
			t.Errorf("the client of a container that has ended: %v", err)
		}
	})
}

// However many clients attach, the server and a client that ends the monitor
// still get a connection.
func TestCrowdOfAttachments(t *testing.T) {
	t.Parallel()
	c := newContainer(t, "crun", "sleep")
	client := c.run()
	refused := 0
	for range 60 {
		a, err := conmon.Attach(limit(t), c.Dir, conmon.Streams{Stdout: true})
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
	if err := conmon.Terminate(limit(t), c.Dir); err != nil {
		t.Fatal(err)
	}
	if e := exit(t, client); e.Signal != 9 {
		t.Errorf("exit %+v", e)
	}
	if _, err := conmon.ReadExit(c.ExitFile); err != nil {
		t.Error(err)
	}
}
