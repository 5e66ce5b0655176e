package conmon_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/logstress"
	"github.com/crius-run/crius/test/kit/wait"
)

var buildPour = sync.OnceFunc(func() {
	build(filepath.Join(rootfs, "writer"), "../test/kit/logstress/writer")
})

// logWriter is a container that writes to both streams as fast as it can.
type logWriter struct {
	*container
	t     *testing.T
	files []string // of the log, rotated ones first
}

// newLogWriter prepares one with the arguments of writer that determine its
// end. It writes at full speed for share percent of the time, so that reading
// and checking the result stays bearable.
func newLogWriter(t *testing.T, runtime string, share int, end ...string) *logWriter {
	t.Helper()
	buildPour()
	c := &logWriter{container: newContainer(t, runtime), t: t}
	shared := filepath.Join(c.Dir, "shared")
	if err := os.Mkdir(shared, 0o755); err != nil {
		t.Fatal(err)
	}
	c.linux()["resources"] = map[string]any{"cpu": map[string]any{"period": 100_000, "quota": 1000 * share}}
	c.ociProcess()["args"] = append([]string{"/writer", "/tmp/ledger"}, end...)
	c.config["mounts"] = append(c.config["mounts"].([]any), map[string]any{
		"destination": "/tmp", "type": "bind", "source": shared, "options": []string{"bind", "rw"},
	})
	t.Cleanup(func() {
		if t.Failed() {
			complaints, _ := os.ReadFile(filepath.Join(c.Dir, wire.Diagnostics))
			t.Logf("%d bytes were written; the monitor's own log:\n%s", c.written(), complaints)
		}
	})
	return c
}

// written returns how much the kernel has accepted from the container.
func (c *logWriter) written() [2]int64 {
	c.t.Helper()
	written, err := logstress.Ledger(filepath.Join(c.Dir, "shared", "ledger"))
	if err != nil {
		c.t.Fatal(err)
	}
	return written
}

func (c *logWriter) total() int64 {
	w := c.written()
	return w[0] + w[1]
}

// reaches waits until the container has written that many bytes in total.
func (c *logWriter) reaches(bytes int64) {
	c.t.Helper()
	wait.For(c.t, fmt.Sprint(bytes, " bytes to be written"), func() bool { return c.total() >= bytes })
}

// pours waits until it has written that many bytes more.
func (c *logWriter) pours(bytes int64) {
	c.t.Helper()
	c.reaches(c.total() + bytes)
}

// rename is the first half of a rotation.
func (c *logWriter) rename() {
	c.t.Helper()
	old := fmt.Sprintf("%s/log.%d", c.Dir, len(c.files))
	if err := os.Rename(c.LogFile, old); err != nil {
		c.t.Fatal(err)
	}
	c.files = append(c.files, old)
}

// check compares the log, over all its files, with what was written.
func (c *logWriter) check() {
	c.t.Helper()
	var check logstress.Check
	files := c.files
	if _, err := os.Stat(c.LogFile); err == nil {
		files = append(files, c.LogFile)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			c.t.Fatal(err)
		}
		records, err := parseLog(text)
		if err != nil {
			c.t.Fatalf("%s: %v", file, err)
		}
		for _, r := range records {
			if err := check.Record(r.stream, r.partial, r.content); err != nil {
				c.t.Fatalf("%s: %v", file, err)
			}
		}
	}
	if err := check.End(c.written()); err != nil {
		c.t.Error(err)
	}
}

// conmon#252, containerd#12375: the end of the output was lost. Whenever a
// container that writes as fast as it can ends, or is killed, while its log is
// being rotated, every byte that the kernel had accepted is in the log, once
// and in its place, and every line has its end.
func TestEndAtFullSpeed(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		for range 2 {
			limit := 1 + rand.IntN(1<<rand.IntN(21))
			c := newLogWriter(t, runtime, 100, fmt.Sprint(limit))
			client := c.run()
			c.rename()
			reopen(t, client)
			if e := exit(t, client); e.Code != 0 {
				t.Errorf("exit %+v", e)
			}
			wait.For(t, "the monitor to leave", c.refuses)
			if got, want := c.written(), int64(limit); got != [2]int64{want, want} {
				t.Errorf("%d bytes were written, want %d on both streams", got, want)
			}
			c.check()
		}
		for range 2 {
			c := newLogWriter(t, runtime, 100, fmt.Sprint(16<<20), "hold")
			client := c.run()
			c.reaches(rand.Int64N(1 << 21))
			c.rename()
			var wg sync.WaitGroup
			wg.Go(func() {
				if err := client.Signal(unix.SIGKILL); err != nil {
					t.Error(err)
				}
			})
			reopen(t, client)
			wg.Wait()
			if e := exit(t, client); e.Signal != int32(unix.SIGKILL) {
				t.Errorf("exit %+v", e)
			}
			wait.For(t, "the monitor to leave", c.refuses)
			c.check()
		}
	})
}

// reopen may come too late.
func reopen(t *testing.T, client *conmon.Client) {
	t.Helper()
	if err := client.ReopenLog(limit(t)); err != nil && !errors.Is(err, fault.Precondition) {
		t.Error(err)
	}
}

// CRI, ReopenContainerLog: while no new file can be opened everything goes to
// the old one, at full speed, and once one can be opened again nothing is
// missing between the two.
func TestReopenRefusedAtFullSpeed(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		refuse, heal func(t *testing.T, c *logWriter)
		want         error
	}{
		"log directory removed": {
			refuse: func(t *testing.T, c *logWriter) {
				kept := filepath.Join(filepath.Dir(filepath.Dir(c.LogFile)), "kept")
				if err := errors.Join(os.Link(c.LogFile, kept), os.RemoveAll(filepath.Dir(c.LogFile))); err != nil {
					t.Fatal(err)
				}
				c.files = append(c.files, kept)
			},
			heal: func(t *testing.T, c *logWriter) {
				if err := os.Mkdir(filepath.Dir(c.LogFile), 0o755); err != nil {
					t.Fatal(err)
				}
			},
			want: unix.ENOENT,
		},
		"no room for another file": {
			refuse: func(t *testing.T, c *logWriter) {
				old := c.LogFile + ".old"
				if err := os.Rename(c.LogFile, old); err != nil {
					t.Fatal(err)
				}
				c.files = append(c.files, old)
				for {
					f, err := os.CreateTemp(filepath.Dir(c.LogFile), "ballast")
					if errors.Is(err, unix.ENOSPC) {
						break
					}
					if err != nil {
						t.Fatal(err)
					}
					f.Close()
				}
			},
			heal: func(t *testing.T, c *logWriter) {
				ballast, err := filepath.Glob(filepath.Join(filepath.Dir(c.LogFile), "ballast*"))
				if err != nil || len(ballast) == 0 {
					t.Fatal(ballast, err)
				}
				if err := os.Remove(ballast[0]); err != nil {
					t.Fatal(err)
				}
			},
			want: unix.ENOSPC,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			disk := t.TempDir()
			if err := unix.Mount("tmpfs", disk, "tmpfs", 0, "size=1g,nr_inodes=16"); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := unix.Unmount(disk, unix.MNT_DETACH); err != nil {
					t.Error(err)
				}
			})
			c := newLogWriter(t, "crun", 3, "0")
			c.LogFile = filepath.Join(disk, "pod", "log")
			if err := os.Mkdir(filepath.Dir(c.LogFile), 0o755); err != nil {
				t.Fatal(err)
			}
			client := c.run()
			c.pours(1 << 20)
			test.refuse(t, c)
			// The monitor's socket conveys only the text of the system's error.
			if err := client.ReopenLog(limit(t)); err == nil || !strings.Contains(err.Error(), test.want.Error()) {
				t.Errorf("reopen: %v, want %v", err, test.want)
			}
			c.pours(2 << 20) // more than pipes and buffers hold
			test.heal(t, c)
			if err := client.ReopenLog(limit(t)); err != nil {
				t.Error(err)
			}
			before := size(t, c.files[0])
			c.pours(1 << 20)
			if err := client.Signal(unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
			exit(t, client)
			wait.For(t, "the monitor to leave", c.refuses)
			if size(t, c.files[0]) != before {
				t.Error("the old file was written to after its rotation")
			}
			c.check()
		})
	}
}
