package conmon_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/wait"
)

// record is one line of a CRI log.
type record struct {
	stream  string
	partial bool
	content []byte
}

// parseLog parses a log at least as strictly as the kubelet.
func parseLog(text []byte) (records []record, err error) {
	for n := 1; len(text) > 0; n++ {
		line, rest, ended := bytes.Cut(text, []byte("\n"))
		if !ended {
			return records, fmt.Errorf("line %d has no end: %.80q", n, line)
		}
		text = rest
		words := bytes.SplitN(line, []byte(" "), 4)
		if len(words) != 4 {
			return records, fmt.Errorf("line %d has %d words: %.80q", n, len(words), line)
		}
		if _, err := time.Parse(time.RFC3339Nano, string(words[0])); err != nil {
			return records, fmt.Errorf("line %d: %w", n, err)
		}
		stream, tag, content := string(words[1]), string(words[2]), words[3]
		if stream != "stdout" && stream != "stderr" || tag != "P" && tag != "F" || len(content) > 16<<10 {
			return records, fmt.Errorf("line %d: stream %q, tag %q, %d bytes", n, stream, tag, len(content))
		}
		records = append(records, record{stream, tag == "P", content})
	}
	return records, nil
}

// joinLogs returns what each stream had written, over all files of the log.
func joinLogs(t testing.TB, files ...string) (stdout, stderr string) {
	t.Helper()
	streams := map[string]*bytes.Buffer{"stdout": {}, "stderr": {}}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		// While the log is being written its last line may be incomplete.
		if end := bytes.LastIndexByte(text, '\n'); end+1 < len(text) {
			text = text[:end+1]
		}
		records, err := parseLog(text)
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		for _, r := range records {
			streams[r.stream].Write(r.content)
			if !r.partial {
				streams[r.stream].WriteByte('\n')
			}
		}
	}
	return streams["stdout"].String(), streams["stderr"].String()
}

// numbered returns what the probe writes for "number LINES EVERY".
func numbered(lines, every int) (stdout, stderr string) {
	var out, diag strings.Builder
	for i := range lines {
		w := &out
		if every > 0 && i%every == 0 {
			w = &diag
		}
		fill := strings.Repeat("x", (i%97)*(i%97)%97)
		if i%1000 == 999 {
			fill = strings.Repeat("y", 40_000+i%7)
		}
		fmt.Fprintf(w, "%d:%s\n", i, fill)
	}
	return out.String(), diag.String()
}

// same compares texts that may be long.
func same(t *testing.T, what, got, want string) {
	t.Helper()
	if got == want {
		return
	}
	at := 0
	for at < min(len(got), len(want)) && got[at] == want[at] {
		at++
	}
	around := func(s string) string { return s[max(0, at-40):min(len(s), at+40)] }
	t.Errorf("%s: %d bytes, want %d; they differ at %d: %q, want %q", what, len(got), len(want), at, around(got), around(want))
}

// conmon 29d17be: log corrupted in rotation. With both streams at full speed,
// long lines among them, and the log rotated every few milliseconds, no byte is
// lost, doubled, reordered or in a broken record.
func TestRotation(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		const lines, every = 80_000, 3
		c := newContainer(t, runtime, "number", fmt.Sprint(lines), fmt.Sprint(every))
		client := c.run()
		files := []string{}
		for done := false; !done; {
			select {
			case <-client.Exited():
				done = true
			case <-time.After(3 * time.Millisecond):
			}
			old := fmt.Sprintf("%s.%d", c.LogFile, len(files))
			if err := os.Rename(c.LogFile, old); err != nil {
				t.Fatal(err)
			}
			files = append(files, old)
			if err := client.ReopenLog(limit(t)); errors.Is(err, fault.Precondition) {
				break // everything was written, and the monitor has exited
			} else if err != nil {
				t.Fatal(err)
			}
			// Nothing more is written to the old file.
			before := size(t, old)
			defer func() {
				if size(t, old) != before {
					t.Errorf("%s was written to after its rotation", old)
				}
			}()
		}
		if e := exit(t, client); e.Code != 0 {
			t.Errorf("exit %+v", e)
		}
		if _, err := os.Stat(c.LogFile); err == nil {
			files = append(files, c.LogFile)
		}
		t.Logf("%d rotations", len(files)-1)
		var total int64
		for _, file := range files {
			total += size(t, file)
		}
		if logged := client.Logged(limit(t)).Written; logged != uint64(total) {
			t.Errorf("the monitor counts %d bytes, the files have %d", logged, total)
		}
		stdout, stderr := joinLogs(t, files...)
		wantOut, wantErr := numbered(lines, every)
		same(t, "stdout", stdout, wantOut)
		same(t, "stderr", stderr, wantErr)
	})
}

func size(t *testing.T, file string) int64 {
	t.Helper()
	st, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	return st.Size()
}

// A last line without a newline is a partial record, whatever its length:
// readers add no newline then, as the conformance test of FallbackToLogsOnError
// requires. The log is complete when the exit is known (conmon#252).
func TestUnendedLines(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		for _, n := range []int{1, 16384, 16385, 100_000} {
			c := newContainer(t, runtime, "bytes", fmt.Sprint(n))
			exit(t, c.run())
			stdout, _ := c.log()
			want := strings.Repeat("0123456789abcde\x00", 1+n/16)[:n]
			same(t, fmt.Sprint(n), stdout, want)
		}
	})
}

// A prompt is not in the log before its line ends, but is complete when it
// does.
func TestHeldBackLine(t *testing.T) {
	t.Parallel()
	c := newContainer(t, "crun", "prompt")
	c.Stdin = true
	client := c.launch()
	a := c.attach(conmon.Streams{Stdout: true})
	c.start()
	expect(t, a.Stdout, "password: ")
	if stdout, _ := c.log(); stdout != "" {
		t.Errorf("stdout %q", stdout)
	}
	if err := client.CloseStdin(limit(t)); err != nil {
		t.Fatal(err)
	}
	exit(t, client)
	if stdout, _ := c.log(); stdout != "password: none\n" {
		t.Errorf("stdout %q", stdout)
	}
}

func TestDiscardedLog(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		c := newContainer(t, runtime, "number", "20000", "2")
		c.LogFile = ""
		client := c.run()
		if err := client.ReopenLog(limit(t)); err != nil && !errors.Is(err, fault.Precondition) {
			t.Error(err)
		}
		if e := exit(t, client); e.Code != 0 {
			t.Errorf("exit %+v", e)
		}
		if logged := client.Logged(limit(t)).Written; logged != 0 {
			t.Errorf("of a discarded log %d bytes are counted", logged)
		}
	})
}

// A container that exceeds its log's limit runs on unaffected, and its log and
// its monitor say how much is missing.
func TestLogRate(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		const burst = conmon.LeastLogBytes
		c := newContainer(t, runtime, "bytes", "50000000")
		c.LogRate, c.LogBurst = 1000, burst
		client := c.run()
		if e := exit(t, client); e.Code != 0 {
			t.Errorf("exit %+v", e)
		}
		text, err := os.ReadFile(c.LogFile)
		if err != nil {
			t.Fatal(err)
		}
		var told uint64
		for _, found := range regexp.MustCompile(` stderr F \[crius: (\d+) bytes of this log were discarded `).FindAllSubmatch(text, -1) {
			n, err := strconv.ParseUint(string(found[1]), 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			told += n
		}
		logged := client.Logged(limit(t))
		if logged.Written != uint64(len(text)) || logged.Discarded != told || told == 0 {
			t.Errorf("the monitor counts %+v, the log has %d bytes and says that %d are missing", logged, len(text), told)
		}
		if len(text) < burst/2 || len(text) > 4*burst {
			t.Errorf("the log has %d bytes, the limit is %d at once", len(text), burst)
		}
	})
}

// A later client counts from its connection on, so that two servers do not
// count anything twice.
func TestLoggedSinceTheClientCame(t *testing.T) {
	t.Parallel()
	c := newContainer(t, "crun", "tick", "5")
	first := c.run()
	wait.For(t, "output", func() bool { return size(t, c.LogFile) > 0 })
	before := size(t, c.LogFile)
	second, err := conmon.Dial(limit(t), c.Dir, c.ExitFile)
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	at := size(t, c.LogFile)
	wait.For(t, "more output", func() bool { return size(t, c.LogFile) > at })
	if err := first.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	exit(t, first)
	total := size(t, c.LogFile)
	if logged := first.Logged(limit(t)).Written; logged != uint64(total) {
		t.Errorf("the first client counts %d bytes of %d", logged, total)
	}
	if logged := int64(second.Logged(limit(t)).Written); logged < total-at || logged > total-before {
		t.Errorf("the second client counts %d bytes, of %d that came after %d to %d", logged, total, before, at)
	}
}

// CRI, ReopenContainerLog: if the new file cannot be opened the old one stays
// the log.
func TestReopenFails(t *testing.T) {
	t.Parallel()
	c := newContainer(t, "crun", "tick", "2")
	dir := filepath.Join(t.TempDir(), "logs")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	c.LogFile = filepath.Join(dir, "log")
	client := c.run()
	c.awaitLog("tick 3")
	ctx := limit(t)

	// The whole directory is gone, as after the deletion of a pod.
	moved := dir + ".moved"
	if err := os.Rename(dir, moved); err != nil {
		t.Fatal(err)
	}
	if err := client.ReopenLog(ctx); err == nil || !strings.Contains(err.Error(), "no such file or directory") {
		t.Errorf("reopen without a directory: %v", err)
	}
	grown := size(t, moved+"/log")
	wait.For(t, "the old file to grow", func() bool { return size(t, moved+"/log") > grown })

	// The log has been replaced with a link.
	if err := errors.Join(os.Mkdir(dir, 0o755), os.Symlink("/etc/passwd", c.LogFile)); err != nil {
		t.Fatal(err)
	}
	if err := client.ReopenLog(ctx); err == nil {
		t.Error("a link was taken for the log")
	}
	if err := os.Remove(c.LogFile); err != nil {
		t.Fatal(err)
	}
	if err := client.ReopenLog(ctx); err != nil {
		t.Error(err)
	}
	if err := client.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	exit(t, client)
	stdout, _ := joinLogs(t, moved+"/log", c.LogFile)
	for i, line := range strings.Split(strings.TrimSuffix(stdout, "\n"), "\n") {
		if line != fmt.Sprint("tick ", i) {
			t.Fatalf("line %d: %q", i, line)
		}
	}
}

// tinyDisk mounts a file system with very little space.
func tinyDisk(t *testing.T, kib int) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("mode=0700,size=%dk", kib)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// A full disk makes only the container wait: nothing is lost, doubled or torn
// once there is space, in the same file or, after a rotation, elsewhere.
func TestFullDisk(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		disk := tinyDisk(t, 64)
		const lines = 20_000
		c := newContainer(t, runtime, "number", fmt.Sprint(lines), "2")
		c.LogFile = filepath.Join(disk, "log")
		client := c.run()
		files := []string{}
		for !c.refuses() {
			full := func() bool {
				var st unix.Statfs_t
				if err := unix.Statfs(disk, &st); err != nil {
					t.Fatal(err)
				}
				return st.Bavail == 0
			}
			wait.For(t, "a full disk", func() bool { return full() || c.refuses() })
			// Make space by rotation to a file elsewhere; every other time, reopen on
			// the full disk first.
			old := fmt.Sprintf("%s/log.%d", c.Dir, len(files))
			if len(files)%2 == 1 {
				if err := client.ReopenLog(limit(t)); err != nil && !errors.Is(err, fault.Precondition) {
					t.Fatal(err)
				}
			}
			hold := filepath.Join(disk, "log.old")
			if err := os.Rename(c.LogFile, hold); err != nil {
				t.Fatal(err)
			}
			reopened := client.ReopenLog(limit(t))
			if reopened != nil && !errors.Is(reopened, fault.Precondition) {
				t.Fatal(reopened)
			}
			text, err := os.ReadFile(hold)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := parseLog(text); err != nil {
				t.Fatalf("rotated file: %v", err)
			}
			if err := errors.Join(os.WriteFile(old, text, 0o600), os.Remove(hold)); err != nil {
				t.Fatal(err)
			}
			files = append(files, old)
			if reopened != nil {
				break // the monitor has exited, although its socket may be open for a moment
			}
		}
		if len(files) < 10 {
			t.Errorf("the disk was full only %d times", len(files))
		}
		exit(t, client)
		if _, err := os.Stat(c.LogFile); err == nil {
			files = append(files, c.LogFile)
		}
		stdout, stderr := joinLogs(t, files...)
		wantOut, wantErr := numbered(lines, 2)
		same(t, "stdout", stdout, wantOut)
		same(t, "stderr", stderr, wantErr)
	})
}

// The exit of a container whose log is stuck is reported nevertheless. The
// monitor stays with what it could not write until there is space, or it is
// released.
func TestExitOnFullDisk(t *testing.T) {
	t.Parallel()
	for _, way := range []string{"room", "release"} {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			disk := tinyDisk(t, 16)
			ballast := filepath.Join(disk, "ballast")
			if err := os.WriteFile(ballast, make([]byte, 12<<10), 0o600); err != nil {
				t.Fatal(err)
			}
			c := newContainer(t, "crun", "bytes", "30000") // fits into the pipe
			c.LogFile = filepath.Join(disk, "log")
			client := c.run()
			e := exit(t, client)
			if e.Code != 0 || c.refuses() {
				t.Fatalf("exit %+v; the monitor has left: %v", e, c.refuses())
			}
			complaints, _ := os.ReadFile(filepath.Join(c.Dir, "monitor.log"))
			if !strings.Contains(string(complaints), "no space left on device") {
				t.Errorf("the monitor's own log: %q", complaints)
			}
			if way == "release" {
				if err := client.Release(limit(t)); err != nil {
					t.Fatal(err)
				}
			} else {
				if err := unix.Mount("", disk, "", unix.MS_REMOUNT, "size=1m"); err != nil {
					t.Fatal(err)
				}
				wait.For(t, "the monitor to leave", c.refuses)
				stdout, _ := c.log()
				same(t, "stdout", stdout, strings.Repeat("0123456789abcde\x00", 2000)[:30000])
			}
			c.checkGone(client, e)
		})
	}
}

// A disk without space for the exit file does not keep a dead container alive.
func TestExitFileOnFullDisk(t *testing.T) {
	t.Parallel()
	disk := tinyDisk(t, 16)
	ballast := filepath.Join(disk, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 16<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	c := newContainer(t, "crun", "exit", "5", "0")
	c.ExitFile = filepath.Join(disk, "exit.json")
	client := c.run()
	e := exit(t, client)
	if passed := time.Since(e.FinishedAt); passed < time.Second {
		t.Errorf("the exit was told after %v: before it was recorded", passed)
	}
	if e.Code != 5 {
		t.Errorf("exit %+v", e)
	}
	if _, err := conmon.ReadExit(c.ExitFile); !errors.Is(err, fault.NotFound) {
		t.Errorf("exit file: %v", err)
	}
	again, err := conmon.Dial(limit(t), c.Dir, c.ExitFile)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if got := exit(t, again); got != e {
		t.Errorf("told %+v, then %+v", e, got)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	wait.For(t, "the monitor to leave", c.refuses)
	c.checkGone(client, e)
}

// coreos/bugs#990: how fast a log can be written, in bytes of the container,
// and its cost for the monitor.
func BenchmarkLog(b *testing.B) {
	for _, size := range []int{10, 100, 1000, 16000} {
		b.Run(fmt.Sprintf("line=%d", size), func(b *testing.B) {
			const total = 128 << 20
			b.SetBytes(total)
			var busy time.Duration
			for b.Loop() {
				c := newContainer(b, "crun", "flood", fmt.Sprint(size), fmt.Sprint(total))
				client := c.launch()
				monitor := c.processes().Monitor.PID
				c.start()
				for client.PID() != 0 {
					busy = max(busy, cpu(b, monitor))
					time.Sleep(time.Millisecond)
				}
				c.destroy()
			}
			b.ReportMetric(total/busy.Seconds()/1e6, "MB/monitor-CPU-s")
		})
	}
}

// cpu returns the CPU time of a process.
func cpu(t testing.TB, pid int) time.Duration {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+2:]))
	var ticks int
	for _, f := range fields[11:13] {
		n, _ := strconv.Atoi(f)
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}
