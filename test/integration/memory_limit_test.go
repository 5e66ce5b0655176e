package integration

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
)

// memoryOfServer is enough for all input from outside (docs/security.md).
const memoryOfServer = 256 * mib

// A server with little memory survives input designed to use up much: it
// refuses it, or keeps a part. With its OOM score of -999 it could otherwise
// take down the node.
func TestServerLivesInLittleMemory(t *testing.T) {
	t.Parallel()
	// The race detector takes several times as much memory, and files in a tmpfs
	// count.
	programs, err := tools.Programs(t.Context(), false)
	must(t, err)
	w := private(t, node.Options{Server: filepath.Join(programs, "crius"), Disk: true})
	c := w.run(t, "crun").start(t, "sleep")
	pid := w.PID()
	killed := confine(t, w)

	t.Run("layers that name huge dictionaries", func(t *testing.T) { refusesGreedyLayers(t, w) })
	t.Run("image configs of many parts", func(t *testing.T) { keepsLittleOfConfigs(t, w) })
	t.Run("commands that print much", func(t *testing.T) {
		var calls sync.WaitGroup
		for range 20 {
			calls.Go(func() {
				_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.id, Timeout: 3, Cmd: []string{"/probe", "flood"}})
				wantCode(t, err, codes.DeadlineExceeded)
			})
		}
		calls.Wait()
	})

	equal(t, "output of a command afterwards", c.exec(t, "echo well"), "well\n")
	equal(t, "process id of the server", w.PID(), pid)
	equal(t, "processes killed for want of memory", killed(), "0")
}

func refusesGreedyLayers(t *testing.T, w *world) {
	xz := []byte("\xfd7zXZ\x00\x00\x04\xe6\xd6\xb4\x46\x02\x00\x21\x01\x28\x00\x00\x00") // a dictionary of 4 GiB
	var layers []image.Layer
	for i := range 3 {
		blob := append(xz[:len(xz):len(xz)], strings.Repeat("x", i)...)
		layers = append(layers, image.Layer{Blob: blob, Digest: digest.FromBytes(blob), DiffID: digest.FromString(strconv.Itoa(i))})
	}
	built, err := image.Image{Layers: layers}.Build()
	must(t, err)
	w.Registry.Push("greedy", "latest", built)
	_, err = w.Images().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: node.RegistryHost + "/greedy:latest"}})
	wantCode(t, err, codes.InvalidArgument, "xz")
}

// keepsLittleOfConfigs pulls configs of the maximum size, and requests all of
// them.
func keepsLittleOfConfigs(t *testing.T, w *world) {
	const count = 9 // their sum is above what is kept
	for i := range count {
		// 3.9 MB, and nearly 100,000 parts.
		raw := fmt.Sprintf(`{"architecture":%q,"os":"linux","rootfs":{"type":"layers","diff_ids":[]},"history":[%s{}],"config":{"Labels":{"n":"%d %s"}}}`,
			runtime.GOARCH, strings.Repeat(`{"empty_layer":true},`, 20_000), i, strings.Repeat("v", 3_400_000))
		built, err := image.Image{}.Build()
		must(t, err)
		size := len(built.Blobs[built.Config])
		config := digest.FromString(raw)
		built.Manifest = []byte(strings.NewReplacer(string(built.Config), string(config), fmt.Sprintf(`"size":%d`, size), fmt.Sprintf(`"size":%d`, len(raw))).Replace(string(built.Manifest)))
		built.Config, built.Blobs = config, map[digest.Digest][]byte{config: []byte(raw)}
		w.Registry.Push("crowded", strconv.Itoa(i), built)
		w.pull(t, node.RegistryHost+"/crowded:"+strconv.Itoa(i))
	}
	for _, img := range w.listImages(t, nil) {
		resp, err := w.Images().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: img.Id}, Verbose: true})
		if err != nil || resp.Image == nil {
			t.Errorf("image %s: %v", img.Id, err)
		}
	}
}

// confine gives the server and its children their own memory cgroup, and
// returns a function that returns how many of them the kernel has killed.
func confine(t *testing.T, w *world) (killed func() string) {
	t.Helper()
	dir, limit, events := "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.oom_control"
	if cgroup.Detect() == cgroup.V2 {
		dir, limit, events = "/sys/fs/cgroup", "memory.max", "memory.events"
	}
	before := filepath.Join(dir, memoryCgroup(t, w.PID()))
	dir = filepath.Join(dir, w.CgroupParent(), "server")
	must(t, os.MkdirAll(dir, 0o755))
	t.Cleanup(func() {
		wait.For(t, "the server's cgroup to be empty and go", func() bool {
			for pid := range strings.FieldsSeq(read(t, filepath.Join(dir, "cgroup.procs"))) {
				_ = os.WriteFile(filepath.Join(before, "cgroup.procs"), []byte(pid), 0) // it may have ended
			}
			err := os.Remove(dir)
			return err == nil || errors.Is(err, os.ErrNotExist)
		})
	})
	put(t, filepath.Join(dir, limit), strconv.Itoa(memoryOfServer))
	put(t, filepath.Join(dir, "cgroup.procs"), strconv.Itoa(w.PID()))
	return func() string {
		for line := range strings.Lines(read(t, filepath.Join(dir, events))) {
			if count, found := strings.CutPrefix(line, "oom_kill "); found {
				return strings.TrimSpace(count)
			}
		}
		t.Fatalf("%s has no oom_kill", events)
		return ""
	}
}

// memoryCgroup returns the cgroup to which the memory of a process is charged.
func memoryCgroup(t *testing.T, pid int) string {
	t.Helper()
	for line := range strings.Lines(read(t, fmt.Sprintf("/proc/%d/cgroup", pid))) {
		if part := strings.SplitN(strings.TrimSpace(line), ":", 3); part[1] == "memory" || part[0] == "0" && cgroup.Detect() == cgroup.V2 {
			return part[2]
		}
	}
	t.Fatalf("process %d has no memory cgroup", pid)
	return ""
}
