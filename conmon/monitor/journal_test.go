package monitor

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/test/kit/journald"
)

// text is what the entries say, as in the log.
func text(t testing.TB, entries []journald.Entry) string {
	t.Helper()
	var b strings.Builder
	for _, e := range entries {
		stream, known := map[string]string{"6": "stdout", "3": "stderr", "4": "notice"}[e["PRIORITY"]]
		if !known || e["CONTAINER_ID"] != "abc" {
			t.Fatalf("entry %v", e)
		}
		tag := map[string]string{"": "F", "true": "P"}[e["CONTAINER_PARTIAL_MESSAGE"]]
		fmt.Fprintf(&b, "%s %s %s\n", stream, tag, e["MESSAGE"])
	}
	return b.String()
}

// journaled is a log with that journal.
func journaled(t testing.TB, path string, limit wire.Options) *logFile {
	t.Helper()
	l := limitedBy(t, limit)
	if err := l.journal.open(&wire.Options{LogFile: l.path, Journal: path, JournalFields: []string{"CONTAINER_ID=abc", "CONTAINER_NAME=a=b"}}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(l.journal.fd) })
	return l
}

// The journal has the log's records, with all bytes that a line can have.
func TestJournal(t *testing.T) {
	t.Parallel()
	d := journald.New(t)
	l := journaled(t, d.Path, wire.Options{})
	long := strings.Repeat("x", maxContent)
	put(l, "stdout", "one\n\n"+long+"two\n")
	put(l, "stderr", "=\x00\xff\r\t\nMESSAGE=x\nPRIORITY=0\n")
	entries := d.Read()
	if got, want := text(t, entries), content(t, l); got != want {
		t.Errorf("the journal has %.200q\nthe log %.200q", got, want)
	}
	if got := entries[0]; len(got) != 4 || got["CONTAINER_NAME"] != "a=b" {
		t.Errorf("an entry is %v", got)
	}
	if l.journal.owes() || l.journal.total != 0 || !l.journal.settled() {
		t.Errorf("%d bytes are kept, %d lost", len(l.journal.kept), l.journal.total)
	}
}

// The longest record goes in one datagram.
func TestJournalOfLongestRecord(t *testing.T) {
	t.Parallel()
	d := journald.New(t)
	l := journaled(t, d.Path, wire.Options{})
	l.journal.fields = append(bytes.Repeat([]byte("F"), 60), "="+strings.Repeat("v", 8000)+"\n"...)
	put(l, "stdout", strings.Repeat("x", maxContent)+"\n")
	if entries := d.Read(); len(entries) != 1 || len(entries[0]["MESSAGE"]) != maxContent {
		t.Errorf("%d entries; refused: %v", len(entries), l.journal.refused)
	}
}

// What the log discards for its limit is in the journal.
func TestJournalHasNoLimit(t *testing.T) {
	t.Parallel()
	d := journald.New(t)
	l := journaled(t, d.Path, wire.Options{LogMost: 64 << 10})
	lines := 0
	for range 100 {
		put(l, "stdout", strings.Repeat("y", 999)+"\n")
		lines += strings.Count(text(t, d.Read()), "stdout F y")
	}
	if lines != 100 || l.limit.total == 0 || l.journal.total != 0 {
		t.Errorf("the journal has %d lines, of which the log has discarded %d bytes", lines, l.limit.total)
	}
}

var lossNotice = regexp.MustCompile(`(?m)^notice F \[crius: (\d+) bytes of output are missing here, which journald did not take\]\n`)

// Nothing is missing as long as what a stuck journald has not taken fits into memory.
func TestJournalThatIsStuckForAWhile(t *testing.T) {
	t.Parallel()
	d := journald.New(t)
	l := journaled(t, d.Path, wire.Options{})
	line := strings.Repeat("z", 99) + "\n"
	put(l, "stdout", strings.Repeat(line, 1500))
	if !l.journal.owes() || !errors.Is(l.journal.refused, syscall.EAGAIN) {
		t.Fatalf("the socket is not full: %v", l.journal.refused)
	}
	got := drain(t, d, l)
	if want := content(t, l); text(t, got) != want || l.journal.total != 0 {
		t.Errorf("%d entries, %d bytes lost", len(got), l.journal.total)
	}
}

// drain reads until nothing is kept.
func drain(t testing.TB, d *journald.Journald, l *logFile) (entries []journald.Entry) {
	t.Helper()
	for {
		more := d.Read()
		entries = append(entries, more...)
		if len(more) == 0 && !l.journal.owes() {
			return entries
		}
		if len(more) == 0 && l.journal.refused != nil && !errors.Is(l.journal.refused, syscall.EAGAIN) {
			t.Fatal(l.journal.refused)
		}
		l.journal.retry()
	}
}

// A journald that takes nothing costs no more than is set aside, the log has it all, and
// the journal learns what it has missed, and no line is joined with another's rest.
func TestJournalThatIsStuck(t *testing.T) {
	t.Parallel()
	d := journald.New(t)
	l := journaled(t, d.Path, wire.Options{})
	room := cap(l.journal.kept)
	lines := strings.Repeat(strings.Repeat("z", 99)+"\n", 10_000)
	full := strings.Repeat("p", maxContent)
	put(l, "stdout", full+"x") // a line, of which some is sent and the end lost
	put(l, "stderr", lines)
	put(l, "stdout", full+full+"end\n")
	put(l, "stderr", full+"x") // one of which the beginning is lost
	if cap(l.journal.kept) != room || !l.journal.losing {
		t.Fatalf("it keeps %d bytes", cap(l.journal.kept))
	}
	if n := strings.Count(content(t, l), "\n"); n != 10_005 {
		t.Errorf("the log has %d records", n)
	}
	drain(t, d, l)
	put(l, "stderr", "rest\nfirst\n")
	put(l, "stdout", "second\n")
	last := text(t, drain(t, d, l))
	if rest := lossNotice.FindStringSubmatch(last); rest == nil || rest[1] != "5" || last != rest[0]+"stderr F first\nstdout F second\n" {
		t.Errorf("it goes on with %q", last)
	}
}

// The entries around a gap.
func TestJournalTellsGap(t *testing.T) {
	t.Parallel()
	d := journald.New(t)
	l := journaled(t, d.Path, wire.Options{})
	full := strings.Repeat("p", maxContent)
	put(l, "stdout", full+"x") // its first record is out
	lines := 0
	for !l.journal.losing {
		put(l, "stderr", "0123456789\n")
		lines++
	}
	put(l, "stdout", "end\n")
	all := text(t, drain(t, d, l))
	found := lossNotice.FindStringSubmatch(all)
	if found == nil || found[1] != strconv.Itoa(len("0123456789\n"+"end\n")) || found[1] != strconv.FormatUint(l.journal.total, 10) {
		t.Fatalf("notice %q, %d bytes are lost", found, l.journal.total)
	}
	want := "stdout P " + full + "\n" + strings.Repeat("stderr F 0123456789\n", lines-1) + "stdout F \n" + found[0]
	if all != want {
		t.Errorf("%d bytes, want %d; it ends with %q", len(all), len(want), all[max(0, len(all)-300):])
	}
	if l.journal.losing {
		t.Error("more is lost")
	}
}

// A journald that is not there, or comes back, is like one that is stuck.
func TestJournalIsRestarted(t *testing.T) {
	t.Parallel()
	d := journald.New(t)
	l := journaled(t, d.Path, wire.Options{})
	put(l, "stdout", "before\n")
	before := text(t, d.Read())
	d.Stop()
	put(l, "stdout", "killed\n")
	if !errors.Is(l.journal.refused, syscall.ECONNREFUSED) {
		t.Errorf("killed: %v", l.journal.refused)
	}
	if err := os.Remove(d.Path); err != nil {
		t.Fatal(err)
	}
	put(l, "stderr", "gone\n")
	l.journal.retry()
	if !errors.Is(l.journal.refused, syscall.ENOENT) {
		t.Errorf("gone: %v", l.journal.refused)
	}
	d.Start()
	put(l, "stdout", "after\n")
	if got, want := before+text(t, d.Read()), "stdout F before\nstdout F killed\nstderr F gone\nstdout F after\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// The longer journald takes nothing, the less often it is asked; a dead container's
// monitor stays for it, but not for ever, and counts the rest as lost.
func TestJournalIsNotWaitedForLong(t *testing.T) {
	t.Parallel()
	l := journaled(t, filepath.Join(t.TempDir(), "none"), wire.Options{})
	j := &l.journal
	put(l, "stdout", "line\n")
	var pauses []int
	for range 11 {
		pauses = append(pauses, j.pause)
		j.retry()
	}
	if want := []int{10, 20, 40, 80, 160, 320, 640, 1280, 2560, 5120, 5120}; !slices.Equal(pauses, want) {
		t.Errorf("pauses of %v ms, want %v", pauses, want)
	}
	if j.settled() || j.pause > patience {
		t.Errorf("settled at once, or asked after %d ms", j.pause)
	}
	j.until = uptime()
	if !j.settled() {
		t.Error("not settled in the end")
	}
	j.giveUp()
	j.giveUp()
	if j.total != uint64(len("line\n")) {
		t.Errorf("%d bytes are lost", j.total)
	}
}

func TestNoJournal(t *testing.T) {
	t.Parallel()
	for _, opt := range []wire.Options{{}, {LogFile: "/l"}, {Journal: "/j"}} {
		j := noJournal
		if err := j.open(&opt); err != nil || j.on() {
			t.Errorf("%+v: %v", opt, err)
		}
		j.take([]byte("x\n"))
		if !j.settled() {
			t.Errorf("%+v is waited for", opt)
		}
	}
	j := noJournal
	if err := j.open(&wire.Options{LogFile: "/l", Journal: "/" + strings.Repeat("j", 107)}); err == nil || j.on() {
		t.Errorf("a path that no socket has: %v", err)
	}
}

func TestJournalAllocatesNothing(t *testing.T) {
	d := journald.New(t)
	l := journaled(t, d.Path, wire.Options{})
	in := []byte(strings.Repeat("0123456789\n", 1000))
	if n := testing.AllocsPerRun(100, func() {
		l.add("stdout", in, false)
		l.flush()
	}); n > 0 {
		t.Errorf("%v allocations per read", n)
	}
}

// However a container writes and journald reads, whole records come in order, and each
// gap is told.
func FuzzJournal(f *testing.F) {
	f.Add([]byte("a\nb"), uint16(0), uint64(1))
	f.Add([]byte("xyz\n\n"), uint16(maxContent), uint64(2))
	f.Add([]byte("\n"), uint16(3), uint64(3))
	f.Fuzz(func(t *testing.T, piece []byte, repeat uint16, seed uint64) {
		if len(piece) == 0 {
			return
		}
		piece = append(bytes.Repeat(piece[:1], int(repeat)), piece...)
		random := rand.New(rand.NewPCG(seed, 0))
		d := journald.New(t)
		l := journaled(t, d.Path, wire.Options{})
		var held [2][]byte
		var got string
		for range 60 {
			stream := random.IntN(2)
			held[stream] = append(held[stream], piece...)
			for full := true; full; {
				var used int
				used, full = l.add([]string{"stdout", "stderr"}[stream], held[stream], false)
				held[stream] = held[stream][used:]
				l.flush()
			}
			if random.IntN(20) == 0 {
				got += text(t, d.Read())
			}
		}
		got += text(t, drain(t, d, l))
		told := uint64(0)
		for _, m := range lossNotice.FindAllStringSubmatch(got, -1) {
			n, _ := strconv.ParseUint(m[1], 10, 64)
			told += n
		}
		if told != l.journal.total {
			t.Errorf("%d bytes are told, %d lost", told, l.journal.total)
		}
		if told == 0 && got != content(t, l) {
			t.Errorf("the journal is not the log")
		}
	})
}
