package conmon_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/test/kit/wait"
)

// newNamed returns a container whose runtime opens the streams by name.
func newNamed(t *testing.T, wait string) *remoteContainer {
	t.Helper()
	i := newRemoteContainer(t, "", wait)
	i.Start, i.Helpers, i.Fifos, i.Stdin = nil, false, true, true
	return i
}

// fifo opens one end, like a runtime.
func (i *remoteContainer) fifo(name string, mode int) *os.File {
	i.Helper()
	f, err := os.OpenFile(filepath.Join(i.Dir, name), mode, 0)
	if err != nil {
		i.Fatal(err)
	}
	i.Cleanup(func() { f.Close() })
	return f
}

func write(t *testing.T, f *os.File, text string) {
	t.Helper()
	if _, err := f.WriteString(text); err != nil {
		t.Fatal(err)
	}
}

// The streams do not end while the container lives, even if processes open and
// close them; data still on the way when its end is reported reaches the log
// nevertheless.
func TestFifos(t *testing.T) {
	t.Parallel()
	i := newNamed(t, waits)
	client := i.launch()
	for range 2 {
		out := i.fifo(wire.StdoutFifo, os.O_WRONLY)
		write(t, out, "line\n")
		out.Close()
	}
	late, words := i.fifo(wire.StdoutFifo, os.O_WRONLY), i.fifo(wire.StderrFifo, os.O_WRONLY)
	write(t, words, "oops\n")
	words.Close()
	i.write("end")
	write(t, late, "late\n")
	late.Close()
	i.wants(client, 5)
	if stdout, stderr := joinLogs(t, i.LogFile); stdout != "line\nline\nlate\n" || stderr != "oops\n" {
		t.Errorf("the log has %q and %q", stdout, stderr)
	}
}

// A writer that never ends delays the report for a while and no longer.
func TestFifoHeldOpen(t *testing.T) {
	t.Parallel()
	i := newNamed(t, waits)
	client := i.launch()
	held := i.fifo(wire.StdoutFifo, os.O_WRONLY)
	write(t, held, "out\n")
	i.write("end")
	if e := exit(t, client); e.Code != 5 {
		t.Errorf("it ended with %+v", e)
	}
	held.Close()
	i.wants(client, 5)
}

// The death of the process that create has named means nothing: only the end of
// the wait command counts.
func TestFifosOutliveTheirProcess(t *testing.T) {
	t.Parallel()
	i := newNamed(t, waits)
	client := i.launch()
	if err := unix.Kill(i.sandbox.Process.Pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = i.sandbox.Wait()
	out := i.fifo(wire.StdoutFifo, os.O_WRONLY)
	write(t, out, "still here\n")
	out.Close()
	i.write("end")
	i.wants(client, 5)
	if stdout, _ := joinLogs(t, i.LogFile); stdout != "still here\n" {
		t.Errorf("the log has %q", stdout)
	}
}

// The wait command sees the end of the input, even if it starts later; and it
// reports OOM kills.
func TestFifoInputEnds(t *testing.T) {
	t.Parallel()
	i := newNamed(t, fmt.Sprintf("[ -e second ] || { touch second; kill -9 $$; }\ncat; head -c 6 <>%s >got\necho '{\"exitStatus\":137,\"oom\":true}'", wire.StdinFifo))
	client := i.launch()
	a, err := conmon.Attach(limit(t), i.Dir, everything)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	out := i.fifo(wire.StdoutFifo, os.O_WRONLY)
	write(t, out, "seen\n")
	expect(t, a.Stdout, "seen\n")
	typeIn(t, a.Stdin, "typed\n")
	wait.For(t, "the second command to wait", func() bool { _, err := os.Stat(filepath.Join(i.Dir, "second")); return err == nil })
	a.CloseStdin()
	out.Close()
	if e := exit(t, client); e.Code != 137 || e.OOMKills == 0 {
		t.Errorf("it ended with %+v", e)
	}
	if got, _ := os.ReadFile(filepath.Join(i.Dir, "got")); string(got) != "typed\n" {
		t.Errorf("the input was %q", got)
	}
}
