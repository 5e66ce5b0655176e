package faults

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// A disk is a small file system that can be filled.
type disk struct{ point string }

// onSmallDisk moves directories of the node to a separate ext4 file system,
// including records and images.
func onSmallDisk(t *testing.T, w *scene.World, dirs ...string) *disk {
	t.Helper()
	if err := w.Stop(); err != nil {
		t.Fatal(err)
	}
	image, d := w.Path("disk.img"), &disk{w.Path("disk")}
	run(t, "truncate", "--size=96M", image)
	run(t, "mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image)
	run(t, "mkdir", d.point)
	run(t, "mount", "-o", "loop", image, d.point) // the node unmounts it, which frees the device
	for _, dir := range dirs {
		run(t, "cp", "-a", w.Path(dir), d.point)
		run(t, "mount", "--bind", filepath.Join(d.point, dir), w.Path(dir))
	}
	if err := w.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := w.TakeStock(t.Context()); err != nil {
		t.Fatal(err)
	}
	return d
}

func run(t *testing.T, argv ...string) {
	t.Helper()
	if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %v: %s", argv, err, out)
	}
}

func (d *disk) ballast() string { return filepath.Join(d.point, "ballast") }

// fill leaves not one block free, whatever was freed since the last call.
func (d *disk) fill(t *testing.T) {
	t.Helper()
	f, err := os.OpenFile(d.ballast(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for size := 1 << 20; size >= 512; size /= 2 {
		for err == nil {
			_, err = f.Write(make([]byte, size))
		}
		if !errors.Is(err, syscall.ENOSPC) {
			t.Fatal(err)
		}
		err = nil
	}
	if err := f.Sync(); err != nil && !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
}

func (d *disk) free(t *testing.T) {
	t.Helper()
	if err := os.Remove(d.ballast()); err != nil {
		t.Fatal(err)
	}
}

func (d *disk) used(t *testing.T) uint64 {
	t.Helper()
	syscall.Sync()
	var st syscall.Statfs_t
	if err := syscall.Statfs(d.point, &st); err != nil {
		t.Fatal(err)
	}
	return (st.Blocks - st.Bfree) * uint64(st.Bsize)
}

// On a full disk what needs space is refused, with that reason and without a
// trace. What frees space works, so that a kubelet can react to disk pressure.
// With space again everything is as before.
func TestAFullDisk_crio_6981(t *testing.T) {
	t.Parallel()
	w := scene.Spotless(t, node.Options{})
	d := onSmallDisk(t, w, "lib", "img")
	before := d.used(t)
	removable := w.Image(t, nil)
	v := watch(t, w)
	p := w.Pod(t, "crun")
	running, created := p.Start(t, "ignore TERM ; echo ready ; sleep"), p.Create(t, "echo runs")
	running.Says(t, "ready")
	doomed := w.Pod(t, "runc")
	doomed.Start(t, "sleep")
	// Until a record is on disk its previous version stands beside it, whose
	// removal would make room.
	wait.For(t, "the records to reach the disk", func() bool {
		last, err := filepath.Glob(filepath.Join(w.StateRoot(), "*", "*", "*.last"))
		return err == nil && len(last) == 0
	})

	d.fill(t)
	left := mustInventory(t, w)
	needsRoom(t, w, p)
	w.Restored(t, left) // after refusals because of the full disk
	scene.Equal(t, "what an exec prints", running.Exec(t, "echo inside"), "inside\n")
	if err := created.TryStart(t.Context()); err != nil {
		scene.WantCode(t, err, codes.ResourceExhausted, "no space left on device")
	}
	makesRoom(t, d, running, doomed, removable)
	v.unaffected(t)

	d.free(t)
	later := w.Pod(t, "runc")
	later.Finish(t, "echo runs")
	w.Image(t, func(c *imagespec.ImageConfig) { c.StopSignal = "SIGUSR1" })
	for _, pod := range []*scene.Pod{p, later, v.pod} {
		pod.Stop(t)
		pod.Remove(t)
	}
	w.Bare(t)
	if err := w.Restart(t.Context()); err != nil { // which ends the grace period of unused images
		t.Fatal(err)
	}
	const slack = 1 << 20 // directories do not shrink
	var now uint64
	if !wait.Until(t.Context(), func() bool { now = d.used(t); return now <= before+slack }) {
		t.Errorf("%d bytes of the disk are in use, %d were in the beginning", now, before)
	}
}

// needsRoom checks that what needs space is refused.
func needsRoom(t *testing.T, w *scene.World, p *scene.Pod) {
	t.Helper()
	_, err := w.TryPod(t, "runc")
	scene.WantCode(t, err, codes.ResourceExhausted, "no space left on device")
	_, err = p.Try(t.Context(), "sleep")
	scene.WantCode(t, err, codes.ResourceExhausted, "no space left on device")
	built, err := images.Build(func(c *imagespec.ImageConfig) { c.Labels = map[string]string{"too": "large"} })
	if err != nil {
		t.Fatal(err)
	}
	w.Registry.Push("large", "latest", built)
	_, err = w.Images().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: node.RegistryHost + "/large:latest"}})
	scene.WantCode(t, err, codes.ResourceExhausted, "no space left on device")
}

// makesRoom checks that a kubelet's ways to free space work, each verb without
// the space that the previous one has freed.
func makesRoom(t *testing.T, d *disk, running *scene.Container, doomed *scene.Pod, image string) {
	t.Helper()
	d.fill(t)
	running.Stop(t, 0)
	scene.Equal(t, "exit code", running.Wait(t).ExitCode, 137)
	d.fill(t)
	running.Remove(t)
	d.fill(t)
	doomed.Stop(t)
	scene.Equal(t, "state", doomed.Status(t).State, cri.PodSandboxState_SANDBOX_NOTREADY)
	d.fill(t)
	doomed.Remove(t)
	doomed.NothingBut(t, nil)
	d.fill(t)
	w := doomed.World
	if _, err := w.Images().RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: image}}); err != nil {
		t.Errorf("RemoveImage: %v", err)
	}
}

func mustInventory(t *testing.T, w *scene.World) *inventory.Snapshot {
	t.Helper()
	s, err := w.Stock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// The same with only the run directory full, which is in memory.
func TestAFullRunDirectory(t *testing.T) {
	t.Parallel()
	w := scene.Spotless(t, node.Options{})
	if err := w.Stop(); err != nil {
		t.Fatal(err)
	}
	d := &disk{w.Path("r")}
	run(t, "mount", "-t", "tmpfs", "-o", "size=8m,mode=711", "tmpfs", d.point)
	if err := w.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := w.Settle(t.Context(), scene.Handlers...); err != nil {
		t.Fatal(err)
	}
	v := watch(t, w)
	p := w.Pod(t, "runc")
	running, created := p.Start(t, "sleep"), p.Create(t, "sleep")
	d.fill(t)
	left := mustInventory(t, w)
	// A pod's files have their own tmpfs, so that a pod may need no space here.
	if other, err := w.TryPod(t, "crun"); err == nil {
		other.Stop(t)
		other.Remove(t)
	} else {
		scene.WantCode(t, err, codes.ResourceExhausted, "no space left on device")
	}
	_, err := p.Try(t.Context(), "sleep")
	if err == nil || !strings.Contains(strings.ToLower(err.Error()), "no space left on device") {
		t.Errorf("CreateContainer: %v", err)
	}
	w.Restored(t, left) // after refusals because of the full disk
	d.fill(t)
	running.Stop(t, 0)
	scene.Equal(t, "exit code", running.Wait(t).ExitCode, 137)
	d.fill(t)
	created.Remove(t)
	p.Stop(t)
	p.Remove(t)
	p.NothingBut(t, nil)
	v.unaffected(t)
	d.free(t)
	w.Pod(t, "crun").Finish(t, "echo runs")
}
