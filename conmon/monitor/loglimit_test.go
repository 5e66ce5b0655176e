package monitor

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/crius-run/crius/conmon/wire"
)

// limited is a log with a limit.
func limited(t testing.TB, rate, burst uint64) *logFile {
	t.Helper()
	return limitedBy(t, wire.Options{LogRate: rate, LogBurst: burst})
}

func limitedBy(t testing.TB, opt wire.Options) *logFile {
	t.Helper()
	l := &logFile{records: make([]byte, 0, bufferSize), limit: newLogLimit(opt), journal: noJournal}
	if err := l.open("", filepath.Join(t.TempDir(), "log")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(l.fd) })
	return l
}

// put writes all of text, which ends where the stream does not.
func put(l *logFile, stream, text string) {
	for in := []byte(text); ; {
		used, full := l.add(stream, in, false)
		in = in[used:]
		l.flush()
		if !full {
			return
		}
	}
}

func content(t testing.TB, l *logFile) string {
	t.Helper()
	l.flush()
	text, err := os.ReadFile(l.path)
	if err != nil {
		t.Fatal(err)
	}
	return regexp.MustCompile(`(?m)^\S+ (std...) `).ReplaceAllString(string(text), "$1 ")
}

// pass lets time go by for the limit.
func (l *logLimit) pass(milliseconds int64) { l.at -= milliseconds }

var gap = regexp.MustCompile(`(?m)^stderr F \[crius: (\d+) bytes of this log were discarded for runtime\.container_log_(?:rate|max_size) = (\d+)\]$`)

// Up to its burst a log takes everything, then nothing until there is room again,
// and says how much is missing before it goes on.
func TestLogLimit(t *testing.T) {
	t.Parallel()
	const rate, burst = 1, 200_000 // so slow that no time counts but that which is made to pass
	l := limited(t, rate, burst)
	line := strings.Repeat("x", 900) + "\n"
	record := uint64(len(line) + maxRecord - maxContent - 1)
	put(l, "stdout", strings.Repeat(line, 1000))
	kept := uint64(strings.Count(content(t, l), line))
	if most := burst / record; kept > most || kept < most-1 {
		t.Errorf("%d lines are kept, %d fit", kept, most)
	}
	if gap.MatchString(content(t, l)) || l.limit.total != (1000-kept)*record {
		t.Errorf("%d bytes discarded, and told too early: %t", l.limit.total, gap.MatchString(content(t, l)))
	}
	l.limit.pass(10_000_000)
	put(l, "stderr", "too early\n")
	l.limit.pass(10_000_000)
	put(l, "stderr", "afterwards\n")
	text := content(t, l)
	found := gap.FindStringSubmatch(text)
	if found == nil || found[1] != strconv.FormatUint(l.limit.total, 10) || found[2] != fmt.Sprint(rate) {
		t.Fatalf("the gap is not told: %.300q", text[len(text)-300:])
	}
	if strings.Contains(text, "too early") || !strings.HasSuffix(text, found[0]+"\nstderr F afterwards\n") {
		t.Errorf("it goes on with %q", text[len(text)-300:])
	}
	l.conclude()
	if again := content(t, l); again != text {
		t.Errorf("the gap is told twice: %q", again[len(text):])
	}
}

// A log that is full takes records again once somebody has emptied it, which is noticed within a second, and
// says how much is missing, and once more when it is full again.
func TestFullLogIsEmptied(t *testing.T) {
	t.Parallel()
	const most = 100_000
	l := limitedBy(t, wire.Options{LogMost: most})
	fill := func() {
		t.Helper()
		put(l, "stdout", strings.Repeat(strings.Repeat("x", 900)+"\n", 2*most/900))
		l.conclude()
		if text := content(t, l); strings.Count(text, "xxx\n") > most/900 || len(gap.FindAllString(text, -1)) == 0 {
			t.Fatalf("a full log has %d bytes and ends with %q", len(text), text[max(0, len(text)-200):])
		}
	}
	fill()
	empty := func() {
		t.Helper()
		if err := os.Truncate(l.path, 0); err != nil {
			t.Fatal(err)
		}
	}
	empty()
	l.limit.counted = uptime() + 1_000_000 // it has just been asked
	put(l, "stdout", "too early\n")
	if text := content(t, l); text != "" {
		t.Errorf("before the next look: %q", text)
	}
	l.limit.counted = 0
	put(l, "stdout", "afterwards\n")
	if text := content(t, l); !gap.MatchString(text) || !strings.HasSuffix(text, "\nstdout F afterwards\n") {
		t.Errorf("an emptied log has %q", text)
	}
	empty()
	fill()
}

// The bucket fills by its rate, and not beyond its size however long nothing was written;
// a notice is taken from it as records are.
func TestLogBucket(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		rate, burst uint64
		passed      int64
		want        int64 // bytes
	}{
		{1000, 5000, 1500, 1500},
		{1, 5000, 999, 0},
		{1000, 5000, 5001, 5000},
		{1<<40 - 1, 1<<40 - 1, 1 << 50, 1<<40 - 1},
	} {
		l := newLogLimit(wire.Options{LogRate: c.rate, LogBurst: c.burst})
		l.left = 0
		l.refill(l.at + c.passed)
		if got := l.left / perByte; got != c.want {
			t.Errorf("%d bytes per second, at most %d: %d after %d ms, want %d", c.rate, c.burst, got, c.passed, c.want)
		}
		before := l.left
		if log := l.notice(nil); before-l.left != int64(len(log))*perByte || len(log) > maxNotice {
			t.Errorf("a notice of %d bytes takes %d thousandths", len(log), before-l.left)
		}
	}
}

// A gap that nothing follows is told as well.
func TestLogLimitAtTheEnd(t *testing.T) {
	t.Parallel()
	l := limited(t, 1000, 70_000)
	put(l, "stdout", strings.Repeat("0123456789\n", 10_000))
	l.conclude()
	if text := content(t, l); !gap.MatchString(text[strings.LastIndex(text, "stderr"):]) {
		t.Errorf("it ends with %q", text[len(text)-300:])
	}
}

// A line of which the beginning is in the log ends there: what comes after a gap is
// nobody's rest. One that began in a gap is missing as a whole.
func TestLogLimitWithinLine(t *testing.T) {
	t.Parallel()
	const burst = 70_000
	l := limited(t, 1000, burst)
	full := strings.Repeat("y", maxContent)
	put(l, "stdout", full+full+full+full+full+"z") // four records fit
	put(l, "stderr", "other\n")
	l.limit.pass(13_000) // enough for a record and some notices
	for range 5 {
		put(l, "stdout", full+"y")
	}
	l.limit.pass(burst)
	put(l, "stdout", "rest\nnext\n")
	text := content(t, l)
	want := strings.Repeat("stdout P "+full+"\n", 4) + "stdout F \n"
	after, ok := strings.CutPrefix(text, want)
	if !ok {
		t.Fatalf("it has %d bytes", len(text))
	}
	told := gap.FindStringSubmatch(after)
	if told == nil || told[1] != strconv.FormatUint(l.limit.total, 10) || after != told[0]+"\nstdout F next\n" {
		t.Errorf("then, with %d bytes discarded, %.400q", l.limit.total, after)
	}
}

// A file that is full says so once, and how much more is missing the next one says before
// it goes on.
func TestLogMost(t *testing.T) {
	t.Parallel()
	const most = 100_000
	l := limitedBy(t, wire.Options{LogMost: most})
	line := strings.Repeat("x", 900) + "\n"
	put(l, "stdout", strings.Repeat(line, 1000))
	l.conclude()
	first := l.limit.total
	full := content(t, l)
	if found := gap.FindStringSubmatch(full); found == nil || found[1] != strconv.FormatUint(first, 10) || found[2] != fmt.Sprint(most) {
		t.Errorf("it ends with %q", full[len(full)-300:])
	}
	if n := int(l.written); n > most+maxNotice || n < most-maxRecord-maxNotice {
		t.Errorf("it has %d bytes", n)
	}
	for range 3 { // with pauses
		put(l, "stdout", "more\n")
		l.conclude()
	}
	if again := content(t, l); again != full {
		t.Errorf("the full file gets %q", again[len(full):])
	}
	if err := os.Rename(l.path, l.path+".1"); err != nil {
		t.Fatal(err)
	}
	if err := l.reopen(); err != nil {
		t.Fatal(err)
	}
	put(l, "stdout", "afterwards\n")
	text := content(t, l)
	found := gap.FindStringSubmatch(text)
	if found == nil || found[1] != strconv.FormatUint(l.limit.total-first, 10) || text != found[0]+"\nstdout F afterwards\n" {
		t.Errorf("the next file has %q", text)
	}
	put(l, "stdout", strings.Repeat(line, 1000))
	l.conclude()
	if n := len(gap.FindAllString(content(t, l), -1)); n != 2 {
		t.Errorf("when it is full as well it tells of %d gaps", n)
	}
}

// Without a limit nothing is counted and nothing discarded.
func TestNoLogLimit(t *testing.T) {
	t.Parallel()
	l := limited(t, 0, 0)
	text := strings.Repeat("0123456789\n", 100_000)
	put(l, "stdout", text)
	if got := strings.Count(content(t, l), "0123456789\n"); got != 100_000 || l.limit.total != 0 {
		t.Errorf("%d lines, %d bytes discarded", got, l.limit.total)
	}
	var told []wire.Verb
	l.count(func(m wire.Message) { told = append(told, m.Verb) })
	if len(told) != 1 {
		t.Errorf("clients are told %v", told)
	}
}

func TestLogLimitAllocatesNothing(t *testing.T) {
	l := limited(t, 1000, 70_000)
	in := []byte(strings.Repeat("0123456789\n", 1000))
	if n := testing.AllocsPerRun(100, func() {
		l.add("stdout", in, false)
		l.flush()
	}); n > 0 {
		t.Errorf("%v allocations per read", n)
	}
}

// However a container writes, its log keeps to the limit, has whole records, and
// tells all that is missing.
func FuzzLogLimit(f *testing.F) {
	f.Add([]byte("a\nb"), uint16(0), uint32(1000), uint64(1))
	f.Add([]byte("xyz\n\n"), uint16(maxContent), uint32(100_000), uint64(2))
	f.Add([]byte("\n"), uint16(3), uint32(1), uint64(3))
	f.Fuzz(func(t *testing.T, text []byte, repeat uint16, rate uint32, seed uint64) {
		if len(text) == 0 || rate == 0 {
			return
		}
		text = append(bytes.Repeat(text[:1], int(repeat)), text...)
		random := rand.New(rand.NewPCG(seed, 0))
		const burst = 64 << 10
		l := limited(t, uint64(rate), burst)
		passed := int64(0)
		var held [2][]byte
		for range 40 {
			stream := random.IntN(2)
			held[stream] = append(held[stream], text...)
			for full := true; full; {
				var used int
				used, full = l.add([]string{"stdout", "stderr"}[stream], held[stream], false)
				held[stream] = held[stream][used:]
				l.flush()
			}
			pause := random.Int64N(300)
			l.limit.pass(pause)
			passed += pause
		}
		l.conclude()
		log := content(t, l)
		// What is over: ends of lines that were cut, one notice, and the time that really passed.
		over := uint64(maxNotice + 80*40 + int(rate)*10)
		if most := burst + uint64(passed)*uint64(rate)/1000 + over; l.written > most {
			t.Errorf("%d bytes are written, at most %d", l.written, most)
		}
		told := uint64(0)
		for _, m := range gap.FindAllStringSubmatch(log, -1) {
			n, _ := strconv.ParseUint(m[1], 10, 64)
			told += n
		}
		if told != l.limit.total {
			t.Errorf("%d bytes are told, %d discarded", told, l.limit.total)
		}
		for line := range strings.Lines(log) {
			if !regexp.MustCompile(`^(stdout|stderr) [FP] `).MatchString(line) || !strings.HasSuffix(line, "\n") {
				t.Fatalf("broken record %.100q", line)
			}
		}
	})
}
