package runtimes

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/storage/checkpoint"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// A runtime with checkpoints of its own, which gVisor is, makes them of the only container of a pod, which continues;
// the archive says whose images it has. All others say that they cannot, in words that the kubelet's tests know.
func TestCheckpointContainer(t *testing.T) {
	handlers := slices.DeleteFunc(wanted(), func(h string) bool { return slices.Contains(scene.Handlers, h) || h == current }) // with criu: test/integration
	eachOf(t, handlers, func(t *testing.T, w *scene.World, handler string) {
		p, dir := w.Pod(t, handler), w.Dir(t)
		c := p.Start(t, "write /changed text ; lines 1000000000 20ms")
		c.Says(t, "line 1")
		try := func(name string) error {
			_, err := w.Runtime().CheckpointContainer(t.Context(), &cri.CheckpointContainerRequest{
				ContainerId: c.ID, Location: filepath.Join(dir, name), Timeout: scene.LimitSeconds,
			})
			return err
		}
		ctx, cancel := context.WithTimeout(t.Context(), wait.Limit)
		defer cancel()
		_, err := w.Runtime().CheckpointPod(ctx, &cri.CheckpointPodRequest{PodSandboxId: p.ID, OutputPath: dir, ContainerIds: []string{c.ID}})
		scene.WantCode(t, err, codes.Unimplemented, "checkpoint/restore requires at least CRIU", handler)
		if handler != gvisor {
			scene.WantCode(t, try("0.tar"), codes.Unimplemented, "checkpoint/restore requires at least CRIU", handler)
			return
		}
		for _, name := range []string{"0.tar", "1.tar"} {
			if err := try(name); err != nil {
				t.Fatal(err)
			}
			before := len(c.Log(t))
			wait.For(t, "the container to continue", func() bool { return len(c.Log(t)) > before })
		}
		found := membersOf(t, filepath.Join(dir, "1.tar"))
		for _, name := range []string{"spec.dump", "checkpoint/checkpoint.img", "checkpoint/pages.img", "rootfs-diff.tar"} {
			if len(found[name]) == 0 {
				t.Errorf("the archive has no %s", name)
			}
		}
		if strings.Contains(string(found["rootfs-diff.tar"]), ".gvisor") {
			t.Error("a file of gVisor's is among those that the container has changed")
		}
		var config checkpoint.Config
		if err := json.Unmarshal(found["config.dump"], &config); err != nil {
			t.Fatal(err)
		}
		scene.Equal(t, "images", config.Format, checkpoint.FormatGvisor)
		scene.Equal(t, "file of the container", c.Exec(t, "cat /changed"), "text")

		p.Start(t, "sleep") // whose memory would be in the images
		scene.WantCode(t, try("2.tar"), codes.FailedPrecondition, "another container")
	})
}

// membersOf returns the files of an archive.
func membersOf(t *testing.T, archive string) map[string][]byte {
	t.Helper()
	f, err := os.Open(archive)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	found := map[string][]byte{}
	for in := tar.NewReader(f); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return found
		}
		if err == nil {
			found[h.Name], err = io.ReadAll(in)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}
