package integration

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/logstress"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
)

// logWriterImage has the logstress writer as its entry point.
func (w *world) logWriterImage(t *testing.T) string {
	t.Helper()
	repo, err := tools.Repository()
	if err != nil {
		t.Fatal(err)
	}
	writer, err := image.GoProgram(t.Context(), "writer", repo, "./test/kit/logstress/writer")
	if err != nil {
		t.Fatal(err)
	}
	return w.image(t, func(c *imagespec.ImageConfig) { c.Entrypoint = []string{"/writer"} }, writer)
}

// logWriter is a container that writes to both streams as fast as it can, and a
// kubelet that keeps its log.
type logWriter struct {
	*container
	shared string
	old    []string // files of the log, oldest first
}

func (p *pod) writer(t *testing.T, ref string) *logWriter {
	t.Helper()
	const limit = 1 << 30 // far away: for machines on which the test pauses for long
	shared := p.w.dir(t)
	c := p.start(t, fmt.Sprint("/shared/ledger ", limit), func(c *cri.ContainerConfig) {
		c.Image = &cri.ImageSpec{Image: ref}
		c.Mounts = []*cri.Mount{{HostPath: shared, ContainerPath: "/shared"}}
		// In bursts at full speed, so that reading and checking stays bearable.
		c.Linux.Resources.CpuPeriod, c.Linux.Resources.CpuQuota = 20_000, 3_000
	})
	return &logWriter{container: c, shared: shared}
}

// written returns how much the kernel has accepted from the container.
func (c *logWriter) written(t *testing.T) [2]int64 {
	t.Helper()
	written, err := logstress.Ledger(filepath.Join(c.shared, "ledger"))
	if err != nil {
		t.Fatal(err)
	}
	return written
}

// reaches waits until the container has written that many bytes in total.
func (c *logWriter) reaches(t *testing.T, bytes int64) {
	t.Helper()
	wait.For(t, fmt.Sprint("the container to write ", bytes, " bytes"), func() bool { return c.total(t) >= bytes })
}

func (c *logWriter) total(t *testing.T) int64 {
	t.Helper()
	written := c.written(t)
	return written[0] + written[1]
}

// standsStill waits until the container can write nothing more.
func (c *logWriter) standsStill(t *testing.T) {
	t.Helper()
	last, times := c.written(t), 0
	wait.For(t, "the container to stand still", func() bool {
		now := c.written(t)
		if times++; now != last {
			last, times = now, 0
		}
		return times >= 20
	})
}

// reopen requests a new log file and reports whether there is one: too late is
// not an error.
func (c *logWriter) reopen(t *testing.T) bool {
	t.Helper()
	_, err := c.pod.w.Runtime().ReopenContainerLog(t.Context(), &cri.ReopenContainerLogRequest{ContainerId: c.id})
	if err != nil && !c.hasEnded(t) {
		t.Errorf("ReopenContainerLog: %v", err)
	}
	return err == nil
}

// hasEnded waits until the server knows what the container's monitor knew when
// it refused a request.
func (c *container) hasEnded(t *testing.T) bool {
	t.Helper()
	return wait.Until(t.Context(), func() bool { return c.status(t).State == cri.ContainerState_CONTAINER_EXITED })
}

// rotate does what a kubelet does to a large log: rename it, request a new
// file, delete the old one. It reports whether the container continues.
func (c *logWriter) rotate(t *testing.T) bool {
	t.Helper()
	renamed := c.logFile() + ".old"
	if err := os.Rename(c.logFile(), renamed); err != nil {
		t.Fatal(err)
	}
	goesOn := c.reopen(t)
	// Possibly from a small file system to a large one.
	old := filepath.Join(c.shared, fmt.Sprint("log.", len(c.old)))
	if out, err := exec.Command("mv", renamed, old).CombinedOutput(); err != nil {
		t.Fatalf("move: %v: %s", err, out)
	}
	c.old = append(c.old, old)
	return goesOn
}

// complete checks the log, once it is complete.
func (c *logWriter) complete(t *testing.T) {
	t.Helper()
	c.wait(t)
	wait.For(t, "the monitor to leave", func() bool { return len(c.pod.w.monitors(t, c.id)) == 0 })
	var check logstress.Check
	files := c.old
	if _, err := os.Stat(c.logFile()); err == nil {
		files = append(files, c.logFile())
	}
	for _, file := range files {
		err := kubelet.ScanLog(file, func(r kubelet.LogRecord) error {
			return check.Record(r.Stream, r.Partial, []byte(r.Content))
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := check.End(c.written(t)); err != nil {
		t.Error(err)
	}
	read := check.Read()
	t.Logf("%d files, %d MB", len(files), (read[0]+read[1])/1e6)
}

// ballast is a file on a disk that can be deleted.
const ballast = "ballast"

// disk is a small file system of the test's own.
func (w *world) disk(t *testing.T, size int64) string {
	t.Helper()
	dir := w.dir(t)
	file, mountpoint := filepath.Join(dir, "image"), filepath.Join(dir, "disk")
	if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Truncate(file, size), os.Mkdir(mountpoint, 0o755)); err != nil {
		t.Fatal(err)
	}
	for _, argv := range [][]string{
		{"mkfs.ext4", "-q", "-O", "^has_journal", file},
		{"mount", "-o", "loop", file, mountpoint},
	} {
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%q: %v: %s", argv, err, out)
		}
	}
	t.Cleanup(func() {
		var err error // a runtime that creates a container at the same time looks at all mounts
		if !wait.Until(context.Background(), func() bool { err = unix.Unmount(mountpoint, 0); return err != unix.EBUSY }) || err != nil {
			t.Errorf("unmount %s: %v", mountpoint, err)
		}
	})
	put(t, filepath.Join(mountpoint, ballast), strings.Repeat("b", 2<<20))
	return mountpoint
}

// freeze blocks writers to the disk, uninterruptibly, like a dead storage
// server. The disk is thawed at the latest at the test's end.
func freeze(t *testing.T, disk string) (thaw func()) {
	t.Helper()
	const fiFreeze, fiThaw = 0xc0045877, 0xc0045878
	fd, err := unix.Open(disk, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err == nil {
		err = unix.IoctlSetInt(fd, fiFreeze, 0)
	}
	if err != nil {
		t.Fatalf("freeze %s: %v", disk, err)
	}
	thaw = sync.OnceFunc(func() {
		if err := errors.Join(unix.IoctlSetInt(fd, fiThaw, 0), unix.Close(fd)); err != nil {
			t.Errorf("thaw %s: %v", disk, err)
		}
	})
	t.Cleanup(thaw)
	return thaw
}

// openshift/origin#20444, coreos/bugs#990: a container that fills its log's
// disk, or whose log is on a hanging one, waits. No other does, and nothing is
// lost once the disk accepts writes.
func TestAStuckLogHoldsUpItsContainerAlone(t *testing.T) {
	t.Parallel()
	w := shared(t)
	ref := w.logWriterImage(t)
	for name, test := range map[string]struct {
		size int64
		stop func(t *testing.T, disk string, c *logWriter) // while the log is stuck
		jam  func(t *testing.T, disk string, c *logWriter) (free func())
	}{
		"full": {
			size: 8 << 20,
			jam: func(t *testing.T, disk string, c *logWriter) func() {
				var st unix.Statfs_t
				wait.For(t, "the disk to be full", func() bool { return unix.Statfs(disk, &st) == nil && st.Bavail == 0 })
				return func() { c.rotate(t) } // and then it is full again
			},
			// The end is reported; the rest of the log comes once there is space.
			stop: func(t *testing.T, disk string, c *logWriter) {
				c.stop(t, 0)
				equal(t, "exit code", c.wait(t).ExitCode, 137)
				if err := os.Remove(filepath.Join(disk, ballast)); err != nil {
					t.Fatal(err)
				}
			},
		},
		"hung": {
			size: 2 << 30,
			jam:  func(t *testing.T, disk string, _ *logWriter) func() { return freeze(t, disk) },
			// The end comes once the disk works again.
			stop: func(t *testing.T, disk string, c *logWriter) {
				thaw := freeze(t, disk)
				c.standsStill(t) // until then the monitor may have nothing to write
				_, err := w.Runtime().StopContainer(t.Context(), &cri.StopContainerRequest{ContainerId: c.id})
				wantCode(t, err, codes.DeadlineExceeded, "its monitor", "blocked on a disk", "still trying")
				w.answers(t, c)
				thaw()
				c.stop(t, 0)
				equal(t, "exit code", c.wait(t).ExitCode, 137)
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			disk := w.disk(t, test.size)
			neighbours := w.run(t, "runc")
			neighbour := neighbours.start(t, "lines 1000000 1ms")
			c := w.run(t, "crun", kubelet.LogsBelow(disk)).writer(t, ref)
			c.reaches(t, 1<<20)

			free := test.jam(t, disk, c)
			c.standsStill(t)
			w.answers(t, c)
			neighbours.goesOn(t, neighbour)
			equal(t, "output of an exec in the container that waits", c.exec(t, "echo alive"), "alive\n")
			before := c.total(t)
			free()
			c.reaches(t, before+1<<20)
			test.stop(t, disk, c)
			c.complete(t)
		})
	}
}

// answers checks that the server answers all queries while a log is stuck.
func (w *world) answers(t *testing.T, stuck *logWriter) {
	t.Helper()
	ctx := t.Context()
	_, list := w.Runtime().ListContainers(ctx, &cri.ListContainersRequest{})
	_, pods := w.Runtime().ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	_, status := w.Runtime().Status(ctx, &cri.StatusRequest{Verbose: true})
	_, pod := w.Runtime().PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: stuck.pod.id})
	_, itself := w.Runtime().ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: stuck.id})
	if err := errors.Join(list, pods, status, pod, itself); err != nil {
		t.Error(err)
	}
}

// goesOn checks that all operations on other containers work while a log is
// stuck.
func (p *pod) goesOn(t *testing.T, c *container) {
	t.Helper()
	size := func() int64 {
		st, err := os.Stat(c.logFile())
		if err != nil {
			t.Fatal(err)
		}
		return st.Size()
	}
	before := size()
	wait.For(t, "the neighbour's log to grow", func() bool { return size() > before })
	if _, err := p.w.Runtime().ReopenContainerLog(t.Context(), &cri.ReopenContainerLogRequest{ContainerId: c.id}); err != nil {
		t.Errorf("ReopenContainerLog of the neighbour: %v", err)
	}
	equal(t, "output of a new neighbour", p.finish(t, "echo hello"), "hello\n")
}
