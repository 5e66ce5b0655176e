package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/testkit/kubelet"
)

// longest is the size at which a line is cut into partial records.
const longest = 16 << 10

func TestLogFormat(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		before := time.Now()
		p := w.run(t, handler)
		c := p.start(t, "echo one ; echo -err two ; echo ; echo three words here")
		c.wait(t)
		equal(t, "stdout", c.output(t), "one\n\nthree words here\n")
		equal(t, "stderr", kubelet.Text(c.log(t), "stderr"), "two\n")
		for _, r := range c.log(t) {
			if r.Partial {
				t.Errorf("%q is tagged partial", r.Content)
			}
			if r.Time.Before(before) || r.Time.After(time.Now()) {
				t.Errorf("%q was written at %v", r.Content, r.Time)
			}
		}
		equal(t, "log path in the status", c.status(t).LogPath, c.logFile())
	})
}

func TestLongLinesArePartialRecords(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		for _, length := range []int{longest - 1, longest, longest + 1, 3 * longest} {
			c := p.start(t, fmt.Sprintf("bytes %d %d", length, length))
			c.wait(t)
			equal(t, fmt.Sprintf("line of %d bytes", length), c.output(t), numbered(0, length)+"\n")
			records := c.log(t)
			for i, r := range records {
				if len(r.Content) > longest {
					t.Errorf("a record has %d bytes", len(r.Content))
				}
				if last := i == len(records)-1; r.Partial == last {
					t.Errorf("line of %d bytes: record %d of %d has partial %v", length, i, len(records), r.Partial)
				}
			}
		}
		// The last line has no newline: it must not be lost.
		c := p.start(t, "bytes 40")
		c.wait(t)
		equal(t, "a line without its newline", strings.TrimSuffix(c.output(t), "\n"), numbered(0, 40))
	})
}

// numbered is what the probe's verb bytes prints, from offset on.
func numbered(offset, n int) string {
	var out strings.Builder
	for i := offset / 8; out.Len() < n+8; i++ {
		fmt.Fprintf(&out, "%07d.", i)
	}
	return out.String()[offset%8:][:n]
}

func TestNothingIsLostOfMuchOutput(t *testing.T) {
	t.Parallel()
	w := shared(t)
	const size, width = 8 << 20, 79
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		c := p.start(t, fmt.Sprintf("bytes %d %d", size, width))
		c.wait(t)
		checkNumbered(t, c.output(t), size)
	})
}

func checkNumbered(t *testing.T, got string, size int) {
	t.Helper()
	got = strings.ReplaceAll(got, "\n", "")
	want := numbered(0, size)
	if got == want {
		return
	}
	for i := range min(len(got), len(want)) {
		if got[i] != want[i] {
			t.Errorf("byte %d differs: got %.40q, want %.40q", i, got[i:], want[i:])
			return
		}
	}
	t.Errorf("got %d bytes, want %d", len(got), len(want))
}

// A kubelet renames the file and then asks for a new one, while the container
// goes on writing.
func TestReopenLosesNothing(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		const lines = 3000
		c := p.start(t, fmt.Sprintf("lines %d 500us", lines))
		var all []kubelet.LogRecord
		rotations := 0
		for c.status(t).State == cri.ContainerState_CONTAINER_RUNNING && rotations < 20 {
			old := fmt.Sprintf("%s.%d", c.logFile(), rotations)
			if err := os.Rename(c.logFile(), old); err != nil {
				t.Fatal(err)
			}
			if _, err := w.Runtime().ReopenContainerLog(t.Context(), &cri.ReopenContainerLogRequest{ContainerId: c.id}); err != nil {
				if c.hasEnded(t) {
					os.Rename(old, c.logFile())
					break
				}
				t.Fatal(err)
			}
			records, err := kubelet.ReadLog(old)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, records...)
			rotations++
		}
		if rotations < 5 {
			t.Fatalf("only %d rotations happened", rotations)
		}
		c.wait(t)
		all = append(all, c.log(t)...)
		var want strings.Builder
		for i := range lines {
			fmt.Fprintln(&want, "line", i+1)
		}
		if got := kubelet.Text(all, "stdout"); got != want.String() {
			t.Errorf("over %d rotations %d of %d lines arrived, or in another order", rotations, strings.Count(got, "\n"), lines)
		}
	})
}

// CRI leaves open whether the log of an ended container is made anew, but an
// error must not make one.
func TestReopenAfterTheEnd(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "runc")
	c := p.start(t, "exit 0")
	c.wait(t)
	if err := os.Remove(c.logFile()); err != nil {
		t.Fatal(err)
	}
	_, err := w.Runtime().ReopenContainerLog(t.Context(), &cri.ReopenContainerLogRequest{ContainerId: c.id})
	if _, statErr := os.Stat(c.logFile()); (err == nil) != (statErr == nil) {
		t.Errorf("ReopenContainerLog: %v; the new file: %v", err, statErr)
	}
}

func TestNoLogPathMeansNoLog(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		c := p.start(t, "bytes 1000000 ; exit 3", func(c *cri.ContainerConfig) { c.LogPath = "" })
		equal(t, "exit code", c.wait(t).ExitCode, 3)
		equal(t, "log path in the status", c.status(t).LogPath, "")
		if entries, _ := os.ReadDir(p.config.LogDirectory); len(entries) > 0 {
			t.Errorf("the log directory holds %v", entries)
		}
	})
}

func TestLogPathStaysBelowTheLogDirectory_CVE_2025_0750(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "runc")
	outside := w.dir(t)
	victim := filepath.Join(outside, "victim")
	put(t, victim, "untouched")
	dir := p.config.LogDirectory
	if err := os.MkdirAll(filepath.Join(dir, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, target := range map[string]string{"link": victim, "dirlink": outside, "sub/link": victim} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{
		"../escaped.log", "../../escaped.log", "a/../../escaped.log", filepath.Join(outside, "absolute.log"),
		"link", "dirlink/new.log", "sub/link", "dirlink/victim",
	} {
		c, err := p.try(t.Context(), steps("echo written"), func(c *cri.ContainerConfig) { c.LogPath = path })
		if err == nil {
			if _, err := w.Runtime().StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: c.id}); err == nil {
				c.wait(t)
			}
		}
		equal(t, path+": the file outside", read(t, victim), "untouched")
		if entries, _ := os.ReadDir(outside); len(entries) != 1 {
			t.Errorf("%s: made %v outside the log directory", path, entries)
		}
	}
	if entries, _ := filepath.Glob(filepath.Join(filepath.Dir(dir), "*escaped*")); len(entries) > 0 {
		t.Errorf("made %v", entries)
	}
}
