package faults

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/hangfs"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// deadServer mounts a file system that does not answer, below the node.
func deadServer(t *testing.T, w *scene.World) *hangfs.FS {
	t.Helper()
	f, err := hangfs.Mount(w.Dir(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Release(); err != nil {
			t.Error(err)
		}
	})
	return f
}

// from mounts a directory of the node into the container.
func from(dir string) scene.ContainerChange {
	return func(c *cri.ContainerConfig) {
		c.Mounts = append(c.Mounts, &cri.Mount{HostPath: dir, ContainerPath: "/volume"})
	}
}

// A container in state D cannot be killed. Each stop, however many at once,
// returns that with the cause; nothing else is affected, and its end is seen
// when it comes.
func TestStopsUnderStateD_crio_9326(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	f := deadServer(t, w)
	v := watch(t, w)
	var pods []*scene.Pod
	var stuck []*scene.Container
	for _, handler := range scene.Handlers {
		p := w.Pod(t, handler)
		pods = append(pods, p)
		for range 2 {
			stuck = append(stuck, p.Start(t, fmt.Sprint("ignore TERM ; stat /volume/", len(stuck)), from(f.Dir)))
		}
	}
	wait.For(t, "all containers to hang", func() bool { return f.Waiting() >= len(stuck) })

	wait.Retry(t, func() error { // a stop waits for half a minute
		var group sync.WaitGroup
		var returned atomic.Int64
		const stops = 20
		for i := range stops {
			group.Go(func() {
				var err error
				if i%5 == 0 {
					_, err = w.Runtime().StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: pods[i/5%2].ID})
				} else {
					_, err = w.Runtime().StopContainer(t.Context(), &cri.StopContainerRequest{ContainerId: stuck[i%len(stuck)].ID, Timeout: rand.Int64N(4)})
				}
				returned.Add(1)
				scene.WantCode(t, err, codes.DeadlineExceeded, "uninterruptible", "still trying")
			})
		}
		v.answered(t)
		late := returned.Load() > 0
		v.works(t)
		group.Wait()
		if late {
			return errors.New("List and Status answered only when stops had given up")
		}
		return nil
	})
	for _, c := range stuck {
		scene.Equal(t, "state", c.Status(t).State, cri.ContainerState_CONTAINER_RUNNING)
	}
	v.works(t)
	v.unaffected(t)

	if err := f.Release(); err != nil {
		t.Fatal(err)
	}
	for _, c := range stuck {
		scene.Equal(t, "exit code", c.Wait(t).ExitCode, 137)
	}
	for _, p := range pods {
		p.Stop(t)
	}
}

// A path of a volume or a device that does not answer keeps its own container
// from being created, and the error names it. Everything else continues: the
// server itself never accesses a path that may block it.
func TestPathsThatHang_containerd_13867(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	f := deadServer(t, w)
	v := watch(t, w)
	device := func(name string) scene.ContainerChange {
		return func(c *cri.ContainerConfig) {
			c.Devices = []*cri.Device{{HostPath: filepath.Join(f.Dir, name), ContainerPath: "/dev/one", Permissions: "rw"}}
		}
	}
	hangs := []struct {
		path   string
		change scene.ContainerChange
	}{
		{f.Dir, from(f.Dir)}, // usually the root of the file system is a pod's volume
		{f.Dir, from(f.Dir)},
		{filepath.Join(f.Dir, "a", "b"), from(filepath.Join(f.Dir, "a", "b"))},
		{filepath.Join(f.Dir, "device"), device("device")},
	}
	var pods []*scene.Pod
	for i := range hangs {
		pods = append(pods, w.Pod(t, scene.Handlers[i%2]))
	}
	f.Hang()
	var group sync.WaitGroup
	for i, c := range hangs {
		group.Go(func() { createHangs(t, pods[i], c.path, c.change) })
	}
	othersWait(t, w, f)
	v.works(t)
	group.Wait()
	v.works(t)
	v.unaffected(t)
	list, err := w.Runtime().ListContainers(t.Context(), &cri.ListContainersRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range list.Containers {
		if c.State == cri.ContainerState_CONTAINER_CREATED {
			t.Errorf("container %s is there although its create failed", c.Id)
		}
	}
	if err := f.Release(); err != nil {
		t.Fatal(err)
	}
}

func createHangs(t *testing.T, p *scene.Pod, path string, change scene.ContainerChange) {
	_, err := p.Try(t.Context(), "sleep", change)
	scene.WantCode(t, err, codes.DeadlineExceeded, path+" did not respond")
	// The name is free: only the file server still holds what is left.
	if c, err := p.Try(t.Context(), "sleep"); err != nil {
		t.Errorf("the same without the path: %v", err)
	} else if err := c.TryStart(t.Context()); err != nil {
		t.Errorf("the same without the path: %v", err)
	}
}

// A file system that stops answering after the paths have been checked blocks
// the runtime itself.
func TestARuntimeThatHangsInAVolume(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{Config: "[runtime.handlers.brief]\npath = \"runc\"\ncreate_timeout = \"30s\"\n"})
	if err := w.Settle(t.Context(), "brief"); err != nil {
		t.Fatal(err)
	}
	f := deadServer(t, w)
	v := watch(t, w)
	p := w.Pod(t, "brief")
	// The root answers; the link in place of the mount point in the container's
	// root file system leads to a path that does not.
	_, err := p.Try(t.Context(), "sleep", from(f.Dir), func(c *cri.ContainerConfig) {
		c.Mounts = append(c.Mounts, &cri.Mount{HostPath: w.Path("tmp"), ContainerPath: "/volume/below"})
	})
	scene.WantCode(t, err, codes.DeadlineExceeded, "did not create the container within 30s", f.Dir, "fuse.hangfs")
	v.works(t)
	v.unaffected(t)
	if err := f.Release(); err != nil {
		t.Fatal(err)
	}
}

// othersWait checks that a process waits for the hanging file system, and no
// thread of the server does.
func othersWait(t *testing.T, w *scene.World, f *hangfs.FS) {
	t.Helper()
	wait.For(t, "somebody to wait for the file system", func() bool { return f.Waiting() > 0 })
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/[0-9]*/stack", w.PID()))
	for _, thread := range threads {
		if stack, _ := os.ReadFile(thread); bytes.Contains(stack, []byte("fuse_")) {
			t.Errorf("a thread of the server waits for the file system:\n%s", stack)
		}
	}
}

// spotless is a node of the test's own that must be bare again when the pods of
// the test are gone. Orphans are reaped after a while.
func spotless(t *testing.T, o node.Options) *scene.World {
	t.Helper()
	w := scene.Spotless(t, o)
	t.Cleanup(func() { w.Bare(t) })
	return w
}
