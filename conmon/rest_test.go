//go:build amd64

package conmon_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/test/kit/journald"
	"github.com/crius-run/crius/test/kit/wait"
)

// A monitor rests whenever nothing happens, and each event finds it as if it
// had not rested.
func TestRest(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		c := newContainer(t, runtime, "copy")
		c.Stdin, c.RestAfter = true, time.Millisecond
		client := c.run()
		before := c.processes()
		c.atRest()
		open := c.descriptors()

		a := c.attach(everything)
		typeIn(t, a.Stdin, "one\n")
		expect(t, a.Stdout, "one\n")
		a.Close()
		c.atRest()
		c.awaitLog("one\n")

		b := c.attach(everything) // input goes to the container without the monitor
		c.staysAwake()
		typeIn(t, b.Stdin, "two\n")
		expect(t, b.Stdout, "two\n")

		must(os.Rename(c.LogFile, c.LogFile+".1"))
		b.Close()
		c.atRest()
		must(client.ReopenLog(limit(t)))
		c.atRest()
		if len(c.descriptors()) != len(open) {
			t.Errorf("descriptors %q, at first %q", c.descriptors(), open)
		}
		if again := c.processes(); again.Monitor != before.Monitor || again.Container != before.Container || again.Rests == nil {
			t.Errorf("processes %+v, before %+v", again, before)
		}
		if n := client.Logged(limit(t)); n.Written != uint64(len(joinedFile(t, c.LogFile+".1"))) {
			t.Errorf("%d bytes logged", n.Written)
		}
		c.atRest() // the request did not wake it

		other := c.dial()
		if other.Process() != before.Container {
			t.Errorf("container %+v, before %+v", other.Process(), before.Container)
		}
		c.atRest()
		must(other.CloseStdin(limit(t)))
		e := exit(t, client)
		if e.Code != 0 || exit(t, other) != e {
			t.Errorf("exit %+v", e)
		}
		if stdout, _ := c.log(); stdout != "end of input\n" {
			t.Errorf("%q in the second log", stdout)
		}
		c.checkGone(client, e)
	})
}

// The same without a connected client and after the monitor has rested.
func TestNothingOutlivesTheFirstProcessWithoutAServer(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		c := newContainer(t, runtime, "brood", "deaf", "daemon")
		c.Stdin, c.RestAfter = true, time.Millisecond
		c.join(newContainer(t, runtime, "sleep"))
		client := c.run()
		wait.For(t, "both deaf children", func() bool { out, _ := c.log(); return strings.Count(out, "deaf") == 2 })
		c.atRest()
		first := client.Process()
		client.Close()
		must(conmon.Signal(first, unix.SIGKILL))
		var e conmon.Exit
		wait.For(t, "the exit file", func() (there bool) {
			var err error
			e, err = conmon.ReadExit(c.ExitFile)
			return err == nil
		})
		if left := c.all(); len(left) > 0 || e.Code != 137 {
			t.Errorf("exit %+v, alive when it is written: %v", e, left)
		}
	})
}

// dial connects like a server that has just started.
func (c *container) dial() *conmon.Client {
	c.Helper()
	client, err := conmon.Dial(limit(c.TB), c.Dir, c.ExitFile)
	if err != nil {
		c.Fatal(err)
	}
	c.Cleanup(func() { client.Close() })
	return client
}

func joinedFile(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// A monitor that cannot write what it needs for its rest, as on a full disk, keeps its clients: one that
// loses its monitor has the container killed. It rests once it can.
func TestRestThatFails(t *testing.T) {
	t.Parallel()
	c := newContainer(t, "crun", "copy")
	c.Stdin, c.RestAfter = true, time.Millisecond
	client := c.run()
	c.atRest()
	inTheWay := filepath.Join(c.Dir, "monitor.json.tmp")
	must(os.Mkdir(inTheWay, 0o700))
	must(client.ReopenLog(limit(t))) // wakes it
	wait.For(t, "a rest that fails", func() bool {
		return strings.Contains(joinedFile(t, filepath.Join(c.Dir, "monitor.log")), "cannot rest: write ")
	})
	must(client.ReopenLog(limit(t)))
	must(os.Remove(inTheWay))
	c.atRest()
	must(client.CloseStdin(limit(t)))
	e := exit(t, client)
	if e.Code != 0 {
		t.Errorf("exit %+v", e)
	}
	c.checkGone(client, e)
}

// atRest waits until the monitor has one thread and a few pages.
func (c *container) atRest() {
	c.Helper()
	pid := c.processes().Monitor.PID
	wait.For(c.TB, "the monitor to rest", func() bool { return c.resting(pid) })
}

// staysAwake checks that the monitor does not rest in twice the time in which
// another container's monitor comes to rest.
func (c *container) staysAwake() {
	c.Helper()
	for range 2 {
		other := newContainer(c.TB, "crun", "sleep")
		other.RestAfter = time.Millisecond
		other.run()
		other.atRest()
	}
	if c.resting(c.processes().Monitor.PID) {
		c.Error("the monitor rests")
	}
}

func (c *container) resting(pid int) bool {
	c.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		c.Fatal(err)
	}
	var size, resident, shared int
	if _, err := fmt.Sscan(string(text), &size, &resident, &shared); err != nil {
		c.Fatal(err)
	}
	return (resident-shared)*os.Getpagesize() <= 32<<10
}

func (c *container) descriptors() (open []string) {
	c.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", c.processes().Monitor.PID)
	entries, err := os.ReadDir(dir)
	if err != nil {
		c.Fatal(err)
	}
	for _, e := range entries {
		target, _ := os.Readlink(filepath.Join(dir, e.Name()))
		open = append(open, target)
	}
	return open
}

// Every end during the rest is reported and recorded: the container's, by
// itself or by a signal, with its earlier output, and the monitor's.
func TestEndsAtRest(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		for name, end := range map[string]struct {
			verb []string
			by   func(c *container, client *conmon.Client)
			want conmon.Exit
		}{
			"by SIGKILL": {[]string{"sleep"}, func(_ *container, client *conmon.Client) { must(client.Signal(unix.SIGKILL)) }, conmon.Exit{Code: 137, Signal: 9}},
			"by itself":  {[]string{"trap"}, func(_ *container, client *conmon.Client) { must(client.Signal(unix.SIGTERM)) }, conmon.Exit{Code: 42}},
			"released":   {[]string{"sleep"}, func(_ *container, client *conmon.Client) { must(client.Release(limit(t))) }, conmon.Exit{Code: 137, Signal: 9}},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				c := newContainer(t, runtime, end.verb...)
				c.RestAfter = time.Millisecond
				client := c.run()
				if end.verb[0] == "trap" {
					c.awaitLog("armed\n")
				}
				c.atRest()
				dormant := c.dial()
				c.dial().Close()
				c.atRest()
				end.by(c, client)
				e := exit(t, client)
				if other := exit(t, dormant); other != e {
					t.Errorf("a client that did not wake the monitor was told %+v, another %+v", other, e)
				}
				if e.Code != end.want.Code || e.Signal != end.want.Signal {
					t.Errorf("%+v, want %+v", e, end.want)
				}
				c.checkGone(client, e)
			})
		}
	})
}

// A monitor that is killed while it rests is lost, for all of its clients.
func TestKilledAtRest(t *testing.T) {
	t.Parallel()
	c := newContainer(t, "crun", "sleep")
	c.RestAfter = time.Millisecond
	client := c.run()
	c.atRest()
	dormant := c.dial()
	must(client.Kill())
	for _, client := range []*conmon.Client{client, dormant} {
		if _, err := client.Exit(); !errors.Is(err, conmon.ErrLost) {
			t.Errorf("%v, want %v", err, conmon.ErrLost)
		}
	}
	if !conmon.Alive(c.processes().Container) {
		t.Error("the container died with its monitor")
	}
}

// A terminal works the same after a rest.
func TestTerminalAtRest(t *testing.T) {
	t.Parallel()
	c := newContainer(t, "crun", "tty")
	c.Terminal, c.RestAfter = true, time.Millisecond
	client := c.run()
	c.awaitLog("terminal")
	c.atRest()
	must(client.Resize(limit(t), 77, 33))
	if e := exit(t, client); e.Code != 0 {
		t.Errorf("exit %+v", e)
	}
	if stdout, _ := c.log(); !strings.Contains(stdout, "size 77 33") {
		t.Errorf("%q in the log", stdout)
	}
}

// The count of what a limited log has discarded continues after a rest.
func TestCountsSurviveRest(t *testing.T) {
	t.Parallel()
	c := newContainer(t, "crun", "copy")
	c.Stdin, c.RestAfter, c.LogRate, c.LogBurst = true, time.Millisecond, 1, conmon.LeastLogBytes
	client := c.run()
	a := c.attach(everything)
	line := strings.Repeat("x", 10_000) + "\n"
	var known conmon.LogCount
	for range 2 {
		for range 10 {
			typeIn(t, a.Stdin, line)
			expect(t, a.Stdout, line)
		}
		a.Close()
		var count conmon.LogCount
		wait.For(t, "the count of the lines", func() bool { // while the client believes that the monitor rests it returns the old count
			count = client.Logged(limit(t))
			return count.Discarded > known.Discarded
		})
		c.atRest()
		if now := client.Logged(limit(t)); now.Discarded != count.Discarded {
			t.Errorf("%+v at rest, %+v before", now, count)
		}
		dormant := c.dial()
		known = client.Logged(limit(t))
		a = c.attach(everything)
		typeIn(t, a.Stdin, line)
		expect(t, a.Stdout, line)
		var more conmon.LogCount // as explained above
		wait.For(t, "the count of the line", func() bool {
			more = client.Logged(limit(t))
			return more.Discarded > known.Discarded
		})
		if own := dormant.Logged(limit(t)).Discarded; own != more.Discarded-known.Discarded {
			t.Errorf("%d discarded bytes counted by a client that came during the rest, want %d", own, more.Discarded-known.Discarded)
		}
		known = more
	}
	if n := client.Logged(limit(t)).Discarded; n < 100_000 {
		t.Errorf("%d bytes discarded", n)
	}
}

// A server that requests the count every few seconds keeps no monitor awake,
// even one to which it was not connected at first.
func TestQuestionsDoNotKeepAwake(t *testing.T) {
	t.Parallel()
	c := newContainer(t, "crun", "copy")
	c.Stdin, c.RestAfter = true, 3*time.Second
	client := c.run()
	asked := func(client *conmon.Client) {
		t.Helper()
		done := make(chan struct{})
		var asking sync.WaitGroup
		asking.Go(func() {
			for again := time.NewTicker(1500 * time.Millisecond); ; {
				select {
				case <-again.C:
					client.Logged(limit(t))
				case <-done:
					return
				}
			}
		})
		c.atRest()
		close(done)
		asking.Wait()
	}
	asked(client)
	dormant := c.dial()
	a := c.attach(everything)
	typeIn(t, a.Stdin, "line\n")
	expect(t, a.Stdout, "line\n")
	a.Close()
	asked(dormant)
	wait.For(t, "a question that does not wake the monitor", func() bool {
		c.atRest() // which the client notices a moment earlier or later
		dormant.Logged(limit(t))
		return c.resting(c.processes().Monitor.PID)
	})
	if n := dormant.Logged(limit(t)).Written; n == 0 {
		t.Error("the line is not counted")
	}
}

// sleeps returns how often the monitor has slept, as the kernel counts. A wake and the next
// rest count several times; a monitor that is about to sleep counts once more.
func (c *container) sleeps() (n int) {
	c.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.processes().Monitor.PID))
	if err != nil {
		c.Fatal(err)
	}
	_, count, _ := strings.Cut(string(text), "\nvoluntary_ctxt_switches:")
	if _, err := fmt.Sscan(count, &n); err != nil {
		c.Fatal(err)
	}
	return n
}

// A monitor at rest does not notice that its server dies, nor that the next one comes. One
// whose client does not knock, as those of earlier releases do not, does notice.
func TestServerThatDiesWakesNoMonitor(t *testing.T) {
	t.Parallel()
	c, other := newContainer(t, "crun", "sleep"), newContainer(t, "crun", "sleep")
	c.RestAfter, other.RestAfter = time.Millisecond, time.Millisecond
	client := c.run()
	other.run()
	old := other.stranger(t)
	wait.For(t, "an old client to be greeted", func() bool { return strings.HasPrefix(old.receive(), "rests ") })
	c.atRest()
	other.atRest()
	before, noticed := c.sleeps(), other.sleeps()
	_ = client.Close()
	must(unix.Shutdown(old.fd, unix.SHUT_RDWR)) // the end of the test closes it
	wait.For(t, "the monitor of an old client to wake and to rest again", func() bool { return other.sleeps() > noticed+1 && other.resting(other.processes().Monitor.PID) })
	next := c.dial()
	if now := c.sleeps(); now > before+1 {
		t.Errorf("the monitor has slept %d times, %d before its server died", now, before)
	}
	must(next.ReopenLog(limit(t)))
	c.atRest()
	if c.sleeps() <= before+1 {
		t.Error("a request did not wake the monitor")
	}
}

// Requests reach a monitor that is falling asleep, at rest or awake.
func TestRequestsAroundRests(t *testing.T) {
	t.Parallel()
	c := newContainer(t, "crun", "sleep")
	c.RestAfter = time.Millisecond
	clients := []*conmon.Client{c.run(), c.dial()}
	for i := range 40 {
		if i%4 == 0 { // the wait before a rest doubles up to a limit
			must(clients[i/4%2].ReopenLog(limit(t)))
		}
		var asking sync.WaitGroup
		for _, client := range clients {
			asking.Go(func() {
				if err := client.ReopenLog(limit(t)); err != nil {
					t.Error(err)
				}
			})
		}
		asking.Wait()
		if i < 8 {
			c.atRest()
		}
	}
}

// After a rest the journal continues where it was.
func TestJournalAfterRest(t *testing.T) {
	t.Parallel()
	d := journald.New(t)
	c := newContainer(t, "crun", "copy")
	c.Stdin, c.RestAfter, c.Journal, c.JournalFields = true, time.Millisecond, d.Path, []string{"CONTAINER_NAME=name"}
	client := c.run()
	var entries []journald.Entry
	for range 3 {
		a := c.attach(everything)
		typeIn(t, a.Stdin, "a line\n")
		expect(t, a.Stdout, "a line\n")
		a.Close()
		c.atRest()
		entries = append(entries, d.Read()...)
	}
	if stdout, _ := output(entries); stdout != "a line\na line\na line\n" || entries[2]["CONTAINER_NAME"] != "name" {
		t.Errorf("%q", entries)
	}
	if lost := client.Logged(limit(t)).JournalLost; lost != 0 {
		t.Errorf("%d bytes are lost", lost)
	}
}

// Some monitors never rest: one with NoRest, and one with a container in the
// PID namespace of the host, whose orphans cause no event.
func TestNoRest(t *testing.T) {
	t.Parallel()
	never, host := newContainer(t, "crun", "sleep"), newContainer(t, "crun", "sleep")
	never.RestAfter, host.RestAfter = conmon.NoRest, time.Millisecond
	host.hostPID()
	never.run()
	host.run()
	never.staysAwake()
	host.staysAwake()
}
