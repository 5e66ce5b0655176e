package faults

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/testkit/hangfs"
	"github.com/crius-run/crius/internal/testkit/node"
	"github.com/crius-run/crius/test/scene"
)

// deadServer mounts a file system that does not answer below the node.
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

// from shows a directory of the node in the container.
func from(dir string) scene.ContainerChange {
	return func(c *cri.ContainerConfig) {
		c.Mounts = append(c.Mounts, &cri.Mount{HostPath: dir, ContainerPath: "/volume"})
	}
}

// bound is how long a stop without grace may take to say that it cannot be, and
// the machine's load on top.
const bound = 30*time.Second + time.Minute

// A container in state D cannot be killed. Whoever stops it, however many at
// once, is told so and why; nobody else notices, and its end is seen when it
// comes.
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
	if !scene.Eventually(func() bool { return f.Waiting() >= len(stuck) }) {
		t.Fatalf("%d of %d containers hang", f.Waiting(), len(stuck))
	}

	var group sync.WaitGroup
	for i := range 100 {
		group.Go(func() {
			grace := rand.Int64N(4)
			ctx, cancel := context.WithTimeout(t.Context(), 2*bound)
			defer cancel()
			began := time.Now()
			var err error
			if i%10 == 0 {
				_, err = w.Runtime().StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: pods[i/10%2].ID})
			} else {
				_, err = w.Runtime().StopContainer(ctx, &cri.StopContainerRequest{ContainerId: stuck[i%len(stuck)].ID, Timeout: grace})
			}
			if took := time.Since(began); took > bound {
				t.Errorf("stop %d with a grace of %d s took %v", i, grace, took)
			}
			scene.WantCode(t, err, codes.DeadlineExceeded, "uninterruptible", "the kill goes on")
		})
	}
	v.works(t, true)
	group.Wait()
	for _, c := range stuck {
		scene.Equal(t, "state", c.Status(t).State, cri.ContainerState_CONTAINER_RUNNING)
	}
	v.works(t, true)
	v.unaffected(t)

	began := time.Now()
	if err := f.Release(); err != nil {
		t.Fatal(err)
	}
	for _, c := range stuck {
		scene.Equal(t, "exit code", c.Wait(t).ExitCode, 137)
	}
	t.Logf("all were dead %v after the release", time.Since(began))
	for _, p := range pods {
		p.Stop(t)
	}
}

// A path that does not answer keeps its own container from being made, for a
// time that is bounded, and the error names it. All else goes on.
func TestAVolumeThatHangs_containerd_13867(t *testing.T) {
	t.Parallel()
	const many = 20
	w := spotless(t, node.Options{})
	f := deadServer(t, w)
	v := watch(t, w)
	var pods []*scene.Pod
	for i := range many {
		pods = append(pods, w.Pod(t, scene.Handlers[i%2]))
	}
	f.Hang()
	var group sync.WaitGroup
	for i, p := range pods {
		path := f.Dir // as a rule it is the root that is a pod's volume
		if i == 0 {
			path = filepath.Join(f.Dir, "a", "b")
		}
		group.Go(func() { createHangs(t, p, path) })
	}
	othersWait(t, w, f)
	v.works(t, true)
	group.Wait()
	v.works(t, true)
	v.unaffected(t)
	list, err := w.Runtime().ListContainers(t.Context(), &cri.ListContainersRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range list.Containers {
		if c.Id != v.container.ID && c.State == cri.ContainerState_CONTAINER_CREATED {
			t.Errorf("container %s is there although its create failed", c.Id)
		}
	}
	if err := f.Release(); err != nil {
		t.Fatal(err)
	}
}

func createHangs(t *testing.T, p *scene.Pod, path string) {
	began := time.Now()
	_, err := p.Try(t.Context(), "sleep", from(path))
	if took := time.Since(began); took > bound {
		t.Errorf("took %v", took)
	}
	scene.WantCode(t, err, codes.DeadlineExceeded, path+" does not answer")
	// The name is free: what is left is nobody's but the file server's.
	if c, err := p.Try(t.Context(), "sleep"); err != nil {
		t.Errorf("the same without the volume: %v", err)
	} else if err := c.TryStart(t.Context()); err != nil {
		t.Errorf("the same without the volume: %v", err)
	}
}

// The same holds for the path of a device: the server asks for none that may keep
// it.
func TestADeviceThatHangs(t *testing.T) {
	t.Parallel()
	const many = 10
	w := spotless(t, node.Options{})
	f := deadServer(t, w)
	v := watch(t, w)
	p := w.Pod(t, "crun")
	f.Hang()
	var group sync.WaitGroup
	for i := range many {
		path := filepath.Join(f.Dir, fmt.Sprint("device", i))
		group.Go(func() {
			began := time.Now()
			_, err := p.Try(t.Context(), "sleep", func(c *cri.ContainerConfig) {
				c.Metadata.Name = fmt.Sprint("device", i)
				c.Devices = []*cri.Device{{HostPath: path, ContainerPath: "/dev/one", Permissions: "rw"}}
			})
			if took := time.Since(began); took > bound {
				t.Errorf("took %v", took)
			}
			scene.WantCode(t, err, codes.DeadlineExceeded, path, "does not answer")
		})
	}
	othersWait(t, w, f)
	v.works(t, true)
	group.Wait()
	v.unaffected(t)
	if err := f.Release(); err != nil {
		t.Fatal(err)
	}
}

// A file system that stops answering when the paths have been looked at holds
// the runtime itself.
func TestARuntimeThatHangsInAVolume(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{Config: "[runtime.handlers.brief]\npath = \"runc\"\ncreate_timeout = \"15s\"\n"})
	if err := w.Settle(t.Context(), "brief"); err != nil {
		t.Fatal(err)
	}
	f := deadServer(t, w)
	v := watch(t, w)
	p := w.Pod(t, "brief")
	began := time.Now()
	// The root answers, and the link does not that the container's root file
	// system has in the place of the mount point.
	_, err := p.Try(t.Context(), "sleep", from(f.Dir), func(c *cri.ContainerConfig) {
		c.Mounts = append(c.Mounts, &cri.Mount{HostPath: w.Path("tmp"), ContainerPath: "/volume/below"})
	})
	if took := time.Since(began); took > bound {
		t.Errorf("took %v", took)
	}
	scene.WantCode(t, err, codes.DeadlineExceeded, "did not create the container within 15s", f.Dir, "fuse.hangfs")
	v.works(t, true)
	v.unaffected(t)
	if err := f.Release(); err != nil {
		t.Fatal(err)
	}
}

// othersWait sees to it that somebody waits for a file system that hangs, and no
// thread of the server does.
func othersWait(t *testing.T, w *scene.World, f *hangfs.FS) {
	t.Helper()
	if !scene.Eventually(func() bool { return f.Waiting() > 0 }) {
		t.Error("nobody waits for the file system: the test is of no use")
	}
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/[0-9]*/stack", w.PID()))
	for _, thread := range threads {
		if stack, _ := os.ReadFile(thread); bytes.Contains(stack, []byte("fuse_")) {
			t.Errorf("a thread of the server waits for the file system:\n%s", stack)
		}
	}
}

// spotless is a node of the test's own that must be bare again when the pods
// of the test are gone. Orphans are reaped in their own time.
func spotless(t *testing.T, o node.Options) *scene.World {
	t.Helper()
	w := scene.Spotless(t, o)
	t.Cleanup(func() {
		if err := w.Clean(context.Background(), w.Empty, 3*scene.Patience); err != nil {
			t.Error(err)
		}
	})
	return w
}
