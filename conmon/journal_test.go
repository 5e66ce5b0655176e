package conmon_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/test/kit/journald"
	"github.com/crius-run/crius/test/kit/wait"
)

// output joins the entries of each stream.
func output(entries []journald.Entry) (stdout, stderr string) {
	streams := map[string]*strings.Builder{"6": {}, "3": {}, "4": {}}
	for _, e := range entries {
		b := streams[e["PRIORITY"]]
		b.WriteString(e["MESSAGE"])
		if e["CONTAINER_PARTIAL_MESSAGE"] == "" {
			b.WriteByte('\n')
		}
	}
	return streams["6"].String(), streams["3"].String()
}

// A container's output is in the journal as it is in its log, while journald is
// killed, gone and restarted.
func TestJournal(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		d := journald.New(t)
		c := newContainer(t, runtime, "number", "400", "3", "stay")
		c.Stdin = true
		c.Journal, c.JournalFields = d.Path, []string{"CONTAINER_NAME=name"}
		client := c.launch()
		d.Stop()
		c.start()
		wait.For(t, "the container to have written", func() bool { stdout, _ := c.log(); return strings.Contains(stdout, "\n301:") })
		if err := os.Remove(d.Path); err != nil {
			t.Fatal(err)
		}
		d.Start()
		// After a container has ended, what journald does not accept for seconds is
		// lost.
		var entries []journald.Entry
		wait.For(t, "the journal to have what the log has", func() bool {
			entries = append(entries, d.Read()...)
			stdout, stderr := c.log()
			journalOut, journalErr := output(entries)
			return strings.Contains(stderr, "\n399:") && len(journalOut) >= len(stdout) && len(journalErr) >= len(stderr)
		})
		if err := client.CloseStdin(limit(t)); err != nil {
			t.Error(err)
		}
		wait.For(t, "the monitor to leave", c.refuses)
		entries = append(entries, d.Read()...)
		if e := exit(t, client); e.Code != 0 {
			t.Errorf("exit %+v", e)
		}
		stdout, stderr := c.log()
		journalOut, journalErr := output(entries)
		same(t, "stdout", journalOut, stdout)
		same(t, "stderr", journalErr, stderr)
		for _, e := range entries {
			if e["CONTAINER_NAME"] != "name" {
				t.Fatalf("entry %v", e)
			}
		}
		if lost := client.Logged(limit(t)).JournalLost; lost != 0 {
			t.Errorf("%d bytes are lost", lost)
		}
	})
}

// A journald that accepts nothing does not keep a container from writing or
// ending, nor its exit from being reported, its log from being complete, or its
// monitor from exiting.
func TestJournalThatIsStuck(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		d := journald.New(t)
		c := newContainer(t, runtime, "bytes", "5000000")
		c.Journal = d.Path
		client := c.run()
		if e := exit(t, client); e.Code != 0 {
			t.Errorf("exit %+v", e)
		}
		wait.For(t, "the monitor to leave", c.refuses)
		if stdout, _ := c.log(); len(stdout) != 5_000_000 {
			t.Errorf("the log has %d bytes", len(stdout))
		}
		taken, _ := output(d.Read())
		lost := client.Logged(limit(t)).JournalLost
		if lost < 4_000_000 || int(lost)+len(taken) < 5_000_000 {
			t.Errorf("%d bytes are in the journal, %d are lost", len(taken), lost)
		}
	})
}

// The removal of a container does not wait for journald.
func TestReleaseWithJournalThatIsStuck(t *testing.T) {
	t.Parallel()
	c := newContainer(t, "crun", "burst", "1000000")
	c.Journal = fmt.Sprint(c.Dir, "/nobody")
	client := c.run()
	c.awaitLog("end of burst\n")
	if err := client.Release(limit(t)); err != nil {
		t.Error(err)
	}
	if e := exit(t, client); e.Signal != int32(unix.SIGKILL) {
		t.Errorf("exit %+v", e)
	}
	if lost := client.Logged(limit(t)).JournalLost; lost < 1_000_000 {
		t.Errorf("%d bytes are lost", lost)
	}
}
