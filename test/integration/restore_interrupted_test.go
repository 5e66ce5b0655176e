package integration

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/wait"
)

// Who stops or removes a pod that is being restored, or a container of it, wins: RestorePod fails, and removes what is
// left. Meanwhile one container is held, and the runtime restores the other.
func TestInterruptedRestore(t *testing.T) {
	t.Parallel()
	w, runtime, ok := brittleCriu(t)
	if !ok {
		return
	}
	p := w.run(t, "brittle")
	first, second := p.start(t, "lines 1000000000 20ms"), p.start(t, "lines 1000000000 20ms")
	first.says(t, "line 1")
	second.says(t, "line 1")
	dir := p.checkpointed(t, first, second)
	p.vanish(t)
	request := func() *cri.RestorePodRequest {
		req := w.restoring(t, dir, first, second)
		req.RuntimeHandler = "brittle"
		return req
	}
	before := mustInventory(t, w)
	for name, c := range map[string]struct {
		words     string
		interrupt func(ctx context.Context, pod, container string) error
	}{
		"StopContainer": {"was stopped or has ended", func(ctx context.Context, _, container string) error {
			_, err := w.Runtime().StopContainer(ctx, &cri.StopContainerRequest{ContainerId: container})
			return err
		}},
		"RemoveContainer": {"was removed", func(ctx context.Context, _, container string) error {
			_, err := w.Runtime().RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: container})
			return err
		}},
		"StopPodSandbox": {"", func(ctx context.Context, pod, _ string) error {
			_, err := w.Runtime().StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: pod})
			return err
		}},
		"RemovePodSandbox": {"", func(ctx context.Context, pod, _ string) error {
			_, err := w.Runtime().RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: pod})
			return err
		}},
	} {
		runtime.does(t, "restore", "at 2 wait")
		waiting, req := len(runtime.calls(t, "restore", "waits")), request()
		result := w.beginRestore(t, req)
		wait.For(t, "the runtime to be asked for the second container", func() bool { return len(runtime.calls(t, "restore", "waits")) > waiting })
		held := w.containersOf(t, req)
		equal(t, "containers that are held", len(held), 1)
		must(t, c.interrupt(t.Context(), held[0].PodSandboxId, held[0].Id))
		runtime.heal(t)
		err := <-result
		t.Logf("%s: %v", name, err)
		wantCode(t, err, codes.FailedPrecondition, c.words)
		equal(t, "pods after "+name, w.podsNamed(t, req.Config.Metadata.Name), 0)
		w.Restored(t, before)
	}
	_, all := w.restore(t, request())
	for _, c := range all {
		c.start(t)
		c.number(t)
	}
}

// containersOf returns the containers of the pod that a request makes.
func (w *world) containersOf(t *testing.T, req *cri.RestorePodRequest) (found []*cri.Container) {
	t.Helper()
	pods, err := w.Runtime().ListPodSandbox(t.Context(), &cri.ListPodSandboxRequest{})
	must(t, err)
	for _, p := range pods.Items {
		if p.Metadata.Name != req.Config.Metadata.Name {
			continue
		}
		list, err := w.Runtime().ListContainers(t.Context(), &cri.ListContainersRequest{Filter: &cri.ContainerFilter{PodSandboxId: p.Id}})
		must(t, err)
		found = append(found, list.Containers...)
	}
	return found
}

// smallDisk moves the node's records to a file system of their own, and returns its directory.
func (w *world) smallDisk(t *testing.T) (point string) {
	t.Helper()
	must(t, w.Stop())
	point = w.Path("disk")
	must(t, os.Mkdir(point, 0o755))
	must(t, unix.Mount("tmpfs", point, "tmpfs", 0, "mode=0755,size=64m")) // the node unmounts it
	must(t, exec.Command("cp", "-a", w.StateRoot(), point).Run())
	must(t, unix.Mount(filepath.Join(point, filepath.Base(w.StateRoot())), w.StateRoot(), "", unix.MS_BIND, ""))
	must(t, w.Start(t.Context()))
	must(t, w.TakeStock(t.Context()))
	return point
}

// fill leaves no room on a disk, and returns what makes some again.
func fill(t *testing.T, disk string) (empty func()) {
	t.Helper()
	f, err := os.Create(filepath.Join(disk, "ballast"))
	must(t, err)
	defer f.Close()
	for size := 1 << 20; size > 0; size /= 2 {
		for err = nil; err == nil; {
			_, err = f.Write(make([]byte, size))
		}
		if !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
	}
	return func() { must(t, os.Remove(f.Name())) }
}

// A restore that has no room, from the beginning or because the disk fills up while the first of two containers is
// restored, says so and leaves nothing. With room again it succeeds.
func TestRestoreOnFullDisk(t *testing.T) {
	t.Parallel()
	w, runtime, ok := brittleCriu(t)
	if !ok {
		return
	}
	disk := w.smallDisk(t)
	p := w.run(t, "brittle")
	// The copy of the second one needs more room than that of the first, which is removed before it is made.
	first, second := p.start(t, "lines 1000000000 20ms"), p.start(t, "alloc 16 ; lines 1000000000 20ms")
	first.says(t, "line 1")
	second.says(t, "line 1")
	dir := p.checkpointed(t, first, second)
	p.vanish(t)
	request := func() *cri.RestorePodRequest {
		req := w.restoring(t, dir, first, second)
		req.RuntimeHandler = "brittle"
		return req
	}
	before := mustInventory(t, w)

	req, empty := request(), fill(t, disk)
	_, err := w.tryRestore(t, req)
	t.Log(err)
	wantCode(t, err, codes.ResourceExhausted, "no space for the checkpoint")
	equal(t, "pods", w.podsNamed(t, req.Config.Metadata.Name), 0)
	empty()

	req = request()
	runtime.does(t, "restore", "at 1 wait")
	result := w.beginRestore(t, req)
	wait.For(t, "the runtime to be asked for the first container", func() bool { return len(runtime.calls(t, "restore", "waits")) > 0 })
	empty = fill(t, disk)
	runtime.heal(t)
	err = <-result
	t.Log(err)
	wantCode(t, err, codes.ResourceExhausted, "no space left on device")
	equal(t, "pods", w.podsNamed(t, req.Config.Metadata.Name), 0)
	empty()
	w.Restored(t, before)

	_, all := w.restore(t, request())
	for _, c := range all {
		c.start(t)
		c.number(t)
	}
}

// beginRestore calls RestorePod, whose error comes later.
func (w *world) beginRestore(t *testing.T, req *cri.RestorePodRequest) (result <-chan error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), wait.Limit)
	ended := make(chan error, 1)
	go func() {
		defer cancel()
		_, err := w.Runtime().RestorePod(ctx, req)
		ended <- err
	}()
	return ended
}
