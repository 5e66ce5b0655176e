package conmon_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/eintr"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/wait"
)

// stranger is a client that does not follow the protocol.
type stranger struct {
	t  *testing.T
	fd int
}

func (c *container) stranger(t *testing.T) stranger {
	t.Helper()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: c.Dir + "/monitor.sock"}); err != nil {
		t.Fatal(err)
	}
	limit := unix.NsecToTimeval(wait.Limit.Nanoseconds())
	must(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit))
	return stranger{t, fd}
}

func (s stranger) send(packet string) error {
	return unix.Send(s.fd, []byte(packet), unix.MSG_NOSIGNAL)
}

// receive returns the next packet, empty at the end of the stream.
func (s stranger) receive() string {
	s.t.Helper()
	buf := make([]byte, wire.MaxPacket)
	n := 0
	err := eintr.Retry(func() (err error) {
		n, err = unix.Read(s.fd, buf)
		return err
	})
	if err != nil && !errors.Is(err, unix.ECONNRESET) {
		s.t.Fatalf("receive: %v", err)
	}
	return string(buf[:max(n, 0)])
}

func (s stranger) ask(request, want string) {
	s.t.Helper()
	if err := s.send(request); err != nil {
		s.t.Fatal(err)
	}
	if got := s.receive(); got != want {
		s.t.Errorf("%.100q: answer %q, want %q", request, got, want)
	}
}

// The protocol as seen by a person with socat.
func TestProtocolByHand(t *testing.T) {
	t.Parallel()
	c := newContainer(t, "crun", "sleep")
	client := c.run()
	st, err := os.Stat(c.Dir + "/monitor.sock")
	if err != nil || st.Mode() != os.ModeSocket|0o600 {
		t.Errorf("socket: %v, %v", st.Mode(), err)
	}
	p := client.Process()
	created := fmt.Sprintf("created %d %d", p.PID, p.StartTime)
	s := c.stranger(t)
	for _, want := range []string{"hello 1 running", created, "logged 0"} {
		if got := s.receive(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	s.ask("reopen-log", "ok")
	s.ask("count-log", "logged 0")
	if got := s.receive(); got != "ok" {
		t.Errorf("after logged comes %q", got)
	}
	s.ask("detach", "ok")
	s.ask("resize 80 25", "error the container has no terminal")
	s.ask("close-stdin", "error the container has no standard input")
	s.ask("attach stdout", "error attach: send one descriptor each for stdout and stderr")
	s.ask("attach stdout stdwhat", "error attach: unknown stream, use stdin, stdout or stderr")
	for _, garbage := range []string{" ", "reopen-log ", "reopen-log x", "resize 1", "resize a b", "resize 1 99999999999999999999", "Release",
		"hello 1 running", "exited 0 0 0 0", "attach", "\x00", strings.Repeat("x", 100_000), "release\n"} {
		s.ask(garbage, "error unknown request")
	}
	s.ask("release", "ok")
	e := exit(t, client)
	want := fmt.Sprintf("exited 137 9 %d 0", e.FinishedAt.UnixNano())
	if got := s.receive(); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got := s.receive(); got != "logged 0" {
		t.Errorf("the last word is %q", got)
	}
	if got := s.receive(); got != "" {
		t.Errorf("%q after the end", got)
	}
}

// No client can harm the container, or the server's connection.
func TestHostileClients(t *testing.T) {
	t.Parallel()
	const lines = 100_000
	c := newContainer(t, "crun", "number", fmt.Sprint(lines), "0")
	client := c.launch()

	deaf := c.stranger(t)
	var crowd []stranger
	for range 40 {
		crowd = append(crowd, c.stranger(t))
	}
	// A client that sends requests and never reads is dropped.
	var err error
	wait.For(t, "a client that does not read to be dropped", func() bool {
		for range 100 {
			if err = deaf.send("attach stdout"); err != nil {
				return true
			}
		}
		return false
	})
	if !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("a client that does not read: %v", err)
	}
	c.start()
	var wg sync.WaitGroup
	stop := make(chan struct{})
	torment := func(f func() bool) {
		wg.Go(func() {
			for f() {
				select {
				case <-stop:
					return
				default:
				}
			}
		})
	}
	torment(func() bool { return crowd[0].send(strings.Repeat("garbage", 100)) == nil })
	torment(func() bool { // comes and goes
		fd, _ := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		_ = unix.Connect(fd, &unix.SockaddrUnix{Name: c.Dir + "/monitor.sock"})
		_ = unix.Close(fd)
		return true
	})
	for range 20 {
		if err := client.ReopenLog(limit(t)); err != nil && !errors.Is(err, fault.Precondition) {
			t.Errorf("the server's request: %v", err)
		}
	}
	e := exit(t, client)
	close(stop)
	wg.Wait()
	if e.Code != 0 {
		t.Errorf("exit %+v", e)
	}
	stdout, _ := c.log()
	want, _ := numbered(lines, 0)
	same(t, "stdout", stdout, want)
	refused := 0
	for _, s := range crowd {
		if s.receive() == "error too many clients" {
			refused++
		}
	}
	if refused < len(crowd)-31 { // there is room for 32, including the server
		t.Errorf("only %d of %d were turned away", refused, len(crowd))
	}
}

// A hanging monitor makes requests fail in time; killed, it is lost, and its
// container can still be found.
func TestLostMonitor(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		c := newContainer(t, runtime, "sleep")
		client := c.run()
		process := client.Process()
		other, err := conmon.Dial(limit(t), c.Dir, c.ExitFile)
		if err != nil {
			t.Fatal(err)
		}
		defer other.Close()

		stop(t, c.processes().Monitor)
		short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if err := client.ReopenLog(short); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("request to a hanging monitor: %v", err)
		}
		if _, err := conmon.Dial(short, c.Dir, c.ExitFile); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("dial of a hanging monitor: %v", err)
		}
		pending := make(chan error)
		go func() { pending <- other.ReopenLog(limit(t)) }()

		if err := client.Kill(); err != nil {
			t.Fatal(err)
		}
		for _, c := range []*conmon.Client{client, other} {
			<-c.Exited()
			if _, err := c.Exit(); !errors.Is(err, conmon.ErrLost) || !errors.Is(err, fault.Unavailable) {
				t.Errorf("exit: %v", err)
			}
			if c.Process() != process {
				t.Errorf("process %+v, was %+v", c.Process(), process)
			}
		}
		if err := <-pending; !errors.Is(err, fault.Precondition) {
			t.Errorf("pending request: %v", err)
		}
		if _, err := conmon.Dial(t.Context(), c.Dir, c.ExitFile); !errors.Is(err, conmon.ErrLost) {
			t.Errorf("dial: %v", err)
		}
		wait.For(t, "the monitor to be reaped", func() bool {
			_, err := os.Stat(fmt.Sprintf("/proc/%d", c.processes().Monitor.PID))
			return errors.Is(err, os.ErrNotExist)
		})
		if got := c.processes().Container; got != process || !conmon.Alive(process) {
			t.Errorf("recorded %+v, was %+v, alive: %v", got, process, conmon.Alive(process))
		}
		// The client that notices the loss reports it for good.
		if err := client.Signal(unix.SIGKILL); err != nil {
			t.Error(err)
		}
		gone(t, process)
		want := conmon.Exit{Code: 137, FinishedAt: time.Now().UTC(), Message: "the monitor was lost"}
		if err := conmon.WriteExit(c.ExitFile, want); err != nil {
			t.Fatal(err)
		}
		again, err := conmon.Dial(t.Context(), c.Dir, c.ExitFile)
		if err != nil {
			t.Fatal(err)
		}
		if e, err := again.Exit(); err != nil || e != want {
			t.Errorf("exit %+v, %v, want %+v", e, err, want)
		}
	})
}

// stop makes a process hang.
func stop(t *testing.T, p conmon.Process) {
	t.Helper()
	if err := conmon.Signal(p, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks(t, p.PID) {
		wait.For(t, "a stopped process", func() bool {
			status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/status", p.PID, task.Name()))
			return strings.Contains(string(status), "\nState:\tT")
		})
	}
}

// Close leaves the monitor alone, and the monitor does not mind.
func TestCloseAndDial(t *testing.T) {
	t.Parallel()
	c := newContainer(t, "crun", "tick", "1")
	client := c.run()
	process := client.Process()
	for range 100 {
		if err := errors.Join(client.Close(), client.Close()); err != nil {
			t.Fatal(err)
		}
		select {
		case <-client.Exited():
			t.Fatal("a closed client claims to know of an exit")
		default:
		}
		if err := client.ReopenLog(t.Context()); err == nil {
			t.Error("a closed client takes requests")
		}
		var err error
		if client, err = conmon.Dial(limit(t), c.Dir, c.ExitFile); err != nil {
			t.Fatal(err)
		}
		if client.Process() != process {
			t.Errorf("process %+v, was %+v", client.Process(), process)
		}
	}
	if err := client.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	c.checkGone(client, exit(t, client))
}

func TestTerminate(t *testing.T) {
	t.Parallel()
	ctx := limit(t)
	c := newContainer(t, "crun", "sleep")
	if err := conmon.Terminate(ctx, c.Dir); err != nil {
		t.Errorf("before it began: %v", err)
	}
	client := c.run()
	client.Close()
	if err := conmon.Terminate(ctx, c.Dir); err != nil {
		t.Errorf("running: %v", err)
	}
	if e, err := conmon.ReadExit(c.ExitFile); err != nil || e.Code != 137 {
		t.Errorf("exit %+v, %v", e, err)
	}
	if err := conmon.Terminate(ctx, c.Dir); err != nil {
		t.Errorf("again: %v", err)
	}

	// A monitor that has exited by itself is reaped.
	c = newContainer(t, "crun", "exit", "0", "0")
	client = c.launch()
	client.Close()
	c.start()
	zombie := c.processes().Monitor
	gone(t, zombie)
	if err := conmon.Terminate(ctx, c.Dir); err != nil {
		t.Errorf("exited: %v", err)
	}
	if now, err := wire.Find(zombie.PID); err == nil && now == zombie {
		t.Error("the zombie of a monitor is left")
	}

	// A monitor that no longer listens is killed. Its container is not: the
	// caller, which knows the cgroup, must do that.
	c = newContainer(t, "crun", "sleep")
	c.run()
	monitor := c.processes().Monitor
	stop(t, monitor)
	if err := conmon.Terminate(ctx, c.Dir); err != nil || conmon.Alive(monitor) {
		t.Errorf("hanging: %v, alive: %v", err, conmon.Alive(monitor))
	}
}

// A process with a reused pid is not the one that had it.
func TestProcessIdentity(t *testing.T) {
	t.Parallel()
	self, err := wire.Find(os.Getpid())
	if err != nil || !conmon.Alive(self) {
		t.Fatalf("%+v, %v", self, err)
	}
	other := self
	other.StartTime++
	if conmon.Alive(other) {
		t.Error("a process that started at another time is alive")
	}
	for _, p := range []conmon.Process{other, {}, {PID: -1}, {PID: 1 << 22}} {
		if err := conmon.Signal(p, unix.SIGKILL); err != nil { // otherwise the test would be dead
			t.Errorf("%+v: %v", p, err)
		}
	}
}

// Both CRI-O and containerd have leaked descriptors and goroutines per
// container. Not parallel: it counts those of the process.
func TestNoLeak(t *testing.T) {
	settle := func() (fds, goroutines int) {
		runtime.GC() // closes what only a finalizer would close
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries), runtime.NumGoroutine()
	}
	cycle := func(n int) {
		for i := range n {
			c := newContainer(t, "crun", "exit", "0", "0")
			switch i % 3 {
			case 0:
				exit(t, c.run())
			case 1:
				client := c.run()
				client.Close()
			case 2:
				c.fake("exit 1")
				if _, err := c.tryLaunch(limit(t)); err == nil {
					t.Fatal("no error")
				}
			}
			c.destroy()
		}
	}
	cycle(3)
	fds, goroutines := settle()
	cycle(12)
	wait.For(t, "all descriptors and goroutines to be given back", func() bool {
		f, g := settle()
		return f <= fds && g <= goroutines+2
	})
}
