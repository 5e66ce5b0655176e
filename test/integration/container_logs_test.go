package integration

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/wait"
)

func TestLogFormat(t *testing.T) {
	t.Parallel()
	w := shared(t)
	before := time.Now()
	p := w.run(t, "crun")
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
}

// numbered returns what the probe's verb bytes prints, from offset on.
func numbered(offset, n int) string {
	var out strings.Builder
	for i := offset / 8; out.Len() < n+8; i++ {
		fmt.Fprintf(&out, "%07d.", i)
	}
	return out.String()[offset%8:][:n]
}

// The kubelet shows a last line without a newline as it was written: it takes
// the message of FallbackToLogsOnError from there.
func TestLogOfAnUnendedLine(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	for _, n := range []int{4, 16 << 10, 16<<10 + 1} {
		c := p.start(t, fmt.Sprintf("bytes %d", n))
		c.wait(t)
		equal(t, fmt.Sprintf("%d bytes in the log", n), c.output(t), numbered(0, n))
	}
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

// The kubelet removes the log directory of an evicted pod and, until the pod's
// containers have ended, requests rotation of logs that are missing. Nothing on
// the node has to be repaired: once the directory exists again the log does,
// too.
func TestReopenWithoutTheLogDirectory(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "runc")
	c := p.start(t, "cat", stdin)
	e := c.attach(t, w.spdy(), attachInput)
	typed(t, e, "before\n")
	c.says(t, "before")
	dir := p.config.LogDirectory
	must(t, os.RemoveAll(dir))
	reopen := func() error {
		_, err := w.Runtime().ReopenContainerLog(t.Context(), &cri.ReopenContainerLogRequest{ContainerId: c.id})
		return err
	}
	wantCode(t, reopen(), codes.FailedPrecondition, dir)
	if about := w.LogAbout(20, c.id); strings.Contains(about, "level=ERROR") {
		t.Errorf("the server's log calls for its operator:\n%s", about)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory that the kubelet has removed: %v", err)
	}
	typed(t, e, "meanwhile\n")
	shows(t, e, "meanwhile\n")

	must(t, os.MkdirAll(filepath.Dir(c.logFile()), 0o755), reopen())
	typed(t, e, "after\n")
	c.says(t, "after")
}

// CRI leaves open whether the log of an ended container is made again, but a
// failed call must not make one.
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

// A process that can write to the directory of all pods' logs, for example of a
// hostPath pod, can put a link in place of a log or of one of its parents.
// Rotation follows no link: the file outside stays unchanged, and the old file
// stays the log.
func TestRotationFollowsNoLink_CVE_2025_0750(t *testing.T) {
	t.Parallel()
	w := shared(t)
	for name, swap := range map[string]func(p *pod, c *container, outside string) (path, link string){
		"directory of the log": func(p *pod, _ *container, outside string) (string, string) {
			return filepath.Join(p.config.LogDirectory, "c"), filepath.Join(outside, "c")
		},
		"directory of the pod": func(p *pod, _ *container, outside string) (string, string) {
			return p.config.LogDirectory, outside
		},
		"log": func(_ *pod, c *container, outside string) (string, string) {
			return c.logFile(), filepath.Join(outside, "c", "0.log")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := w.run(t, "runc")
			c := p.start(t, "lines 1000000 5ms", func(c *cri.ContainerConfig) { c.LogPath = "c/0.log" })
			outside := w.dir(t)
			victim := filepath.Join(outside, "c", "0.log")
			must(t, os.Mkdir(filepath.Dir(victim), 0o755))
			put(t, victim, "untouched")
			reopen := func() error {
				_, err := w.Runtime().ReopenContainerLog(t.Context(), &cri.ReopenContainerLogRequest{ContainerId: c.id})
				return err
			}
			path, target := swap(p, c, outside)
			links := map[string]func(target, path string) error{"symbolic link": os.Symlink}
			if name == "log" {
				links["hard link"] = os.Link
			}
			for kind, link := range links {
				must(t, os.Rename(path, path+".away"), link(target, path))
				if err := reopen(); err == nil {
					t.Errorf("%s: the log was opened again", kind)
				}
				must(t, os.Remove(path), os.Rename(path+".away", path))
				before := len(c.log(t))
				wait.For(t, "the old log to grow", func() bool { return len(c.log(t)) > before })
				equal(t, kind+": the file outside", read(t, victim), "untouched")
			}
			must(t, reopen())
			c.stop(t, 0)
		})
	}
}

// A log that somebody empties has no hole at its beginning, by which readers would not know its format.
func TestEmptiedLogHasNoHole_moby_40584(t *testing.T) {
	t.Parallel()
	w := shared(t)
	dir := w.dir(t)
	c := w.run(t, "crun").start(t, "lines 1000 ; await /vol/go ; echo after ; sleep", func(c *cri.ContainerConfig) {
		c.Mounts = []*cri.Mount{{ContainerPath: "/vol", HostPath: dir}}
	})
	c.says(t, "line 1000\n")
	must(t, os.Truncate(c.logFile(), 0))
	must(t, os.WriteFile(filepath.Join(dir, "go"), nil, 0o600))
	c.says(t, "after\n")
	equal(t, "all of the log", c.output(t), "after\n")
}
