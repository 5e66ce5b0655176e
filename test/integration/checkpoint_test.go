package integration

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/storage/checkpoint"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// dumping is a node with a criu that works on current kernels. Only runc uses it: Debian's crun was built
// without.
var dumping = scene.Commons{Prepare: withCriu}

// errCriu is why there is no criu, if Debian's archives cannot be reached; set by withCriu.
var errCriu error

func withCriu(ctx context.Context) (node.Options, error) {
	criu, err := tools.Criu(ctx)
	if errors.Is(err, tools.ErrNoCriu) {
		criu, err, errCriu = "/nonexistent/criu", nil, err
	}
	return node.Options{Config: fmt.Sprintf(`[runtime]
criu = %q
restore = true
[runtime.handlers.runc]
path = "runc"
allowed_annotations = ["org.criu.*"]
allowed_container_annotations = ["org.criu.config"]
default_annotations = ["org.criu.config=/nowhere"]
`, criu)}, err
}

// dumps returns such a node, or false without criu: then it has tested instead that checkpoints are refused.
func dumps(t *testing.T) (_ *world, ok bool) {
	t.Helper()
	w := known(dumping.World(t))
	if errCriu == nil {
		return w, true
	}
	t.Logf("only the refusal is tested: %v", errCriu)
	p, c := w.counter(t)
	out := w.dir(t)
	wantCode(t, c.checkpoint(t.Context(), filepath.Join(out, "x.tar")), codes.Unimplemented, "checkpoint/restore requires at least CRIU")
	ctx, cancel := context.WithTimeout(t.Context(), wait.Limit)
	defer cancel()
	_, err := w.Runtime().CheckpointPod(ctx, &cri.CheckpointPodRequest{PodSandboxId: p.id, OutputPath: out, ContainerIds: []string{c.id}})
	wantCode(t, err, codes.Unimplemented, "checkpoint/restore requires at least CRIU")
	empty(t, out)
	c.goesOnCounting(t)
	return w, false
}

// counter starts a container that counts, in a pod of its own.
func (w *world) counter(t *testing.T) (*pod, *container) {
	t.Helper()
	p := w.run(t, "runc")
	c := p.start(t, "lines 1000000000 20ms")
	c.says(t, "line 1")
	return p, c
}

func (c *container) checkpoint(ctx context.Context, location string) error {
	_, err := c.pod.w.Runtime().CheckpointContainer(ctx, &cri.CheckpointContainerRequest{ContainerId: c.id, Location: location, Timeout: scene.LimitSeconds})
	return err
}

// lines returns how many lines a counting container has written, which must be without a gap.
func (c *container) lines(t *testing.T) int {
	t.Helper()
	log := c.log(t)
	for i, r := range log {
		if r.Content != fmt.Sprintf("line %d", i+1) {
			t.Fatalf("record %d of the log is %q", i+1, r.Content)
		}
	}
	return len(log)
}

// goesOnCounting checks that the container continues.
func (c *container) goesOnCounting(t *testing.T) {
	t.Helper()
	before := c.lines(t)
	wait.For(t, "the container to continue", func() bool { return c.lines(t) > before+3 })
	equal(t, "state", c.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
}

// members returns the entries of an archive.
func members(t *testing.T, archive string) map[string][]byte {
	t.Helper()
	f, err := os.Open(archive)
	must(t, err)
	defer f.Close()
	found := map[string][]byte{}
	for in := tar.NewReader(f); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return found
		}
		must(t, err)
		found[h.Name], err = io.ReadAll(in)
		must(t, err)
	}
}

// names returns what is in a directory.
func names(t *testing.T, dir string) (all []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

// A checkpoint is an archive as the kubelet's end-to-end tests and checkpointctl want it. The container
// does not notice it, and can be checkpointed again and again.
func TestCheckpointContainer(t *testing.T) {
	t.Parallel()
	w, ok := dumps(t)
	if !ok {
		return
	}
	out, outside := w.dir(t), w.dir(t)
	script, options := filepath.Join(outside, "script"), filepath.Join(outside, "options")
	program(t, script, "touch "+script+".ran\n")
	put(t, options, "action-script "+script+"\n")
	evil := map[string]string{"org.criu.config": options}
	p := w.run(t, "runc", func(c *cri.PodSandboxConfig) { c.Annotations = evil })
	c := p.start(t, "write /changed text ; remove /etc/passwd ; lines 1000000000 20ms", func(c *cri.ContainerConfig) { c.Annotations = evil })
	c.says(t, "line 5")
	for i := range 10 {
		archive := filepath.Join(out, fmt.Sprintf("%d.tar", i))
		must(t, c.checkpoint(t.Context(), archive))
		c.goesOnCounting(t)
	}
	archive := filepath.Join(out, "9.tar")
	info, err := os.Stat(archive)
	must(t, err)
	equal(t, "mode", info.Mode(), 0o600)
	if got := names(t, out); len(got) != 10 {
		t.Errorf("there is %q beside the archives", got)
	}
	found := members(t, archive)
	for _, name := range []string{"spec.dump", "config.dump", "checkpoint/", "checkpoint/inventory.img", "rootfs-diff.tar", "deleted.files", "stats-dump", "dump.log"} {
		if _, ok := found[name]; !ok {
			t.Errorf("%s is missing", name)
		}
	}
	var spec struct{ Annotations map[string]string }
	must(t, json.Unmarshal(found["spec.dump"], &spec))
	equal(t, "manager", spec.Annotations["io.container.manager"], "cri-o")
	equal(t, "pod", spec.Annotations["io.kubernetes.pod.name"], p.config.Metadata.Name)
	if given := spec.Annotations["org.criu.config"]; filepath.Base(filepath.Dir(given)) != c.id {
		t.Errorf("criu was given the options in %s", given)
	}
	equal(t, "files of the hostile options", strings.Join(names(t, outside), " "), "options script")
	var config checkpoint.Config
	must(t, json.Unmarshal(found["config.dump"], &config))
	equal(t, "id", config.ID, c.id)
	equal(t, "deleted", string(found["deleted.files"]), `["etc/passwd"]`)
	layer := filepath.Join(out, "layer.tar")
	must(t, os.WriteFile(layer, found["rootfs-diff.tar"], 0o600))
	equal(t, "changed file", string(members(t, layer)["changed"]), "text")
	must(t, os.Remove(layer))
	c.isRead(t, archive)
}

// isRead checks that checkpointctl reads all of an archive of a counting container.
func (c *container) isRead(t *testing.T, archive string) {
	t.Helper()
	checkpointctl, err := tools.Checkpointctl(t.Context())
	must(t, err)
	for _, try := range []struct {
		args, words []string
	}{
		{[]string{"show"}, []string{c.config.Metadata.Name, "CRI-O", "runc"}},
		{[]string{"inspect", "--all"}, []string{"Pod name: " + c.pod.config.Metadata.Name, "Process tree", "/probe", "CRIU dump statistics", "Overview of mounts"}},
	} {
		text, err := exec.CommandContext(t.Context(), checkpointctl, append(try.args, archive)...).CombinedOutput()
		if err != nil {
			t.Errorf("checkpointctl %q: %v: %s", try.args, err, text)
		}
		for _, word := range try.words {
			if !strings.Contains(string(text), word) {
				t.Errorf("checkpointctl %q does not show %q:\n%s", try.args, word, text)
			}
		}
	}
}

// All containers of a pod are written down as they are at one moment.
func TestCheckpointPod(t *testing.T) {
	t.Parallel()
	w, ok := dumps(t)
	if !ok {
		return
	}
	p, out := w.run(t, "runc"), w.dir(t)
	var ids []string
	var all []*container
	for range 3 {
		c := p.start(t, "lines 1000000000 20ms")
		c.says(t, "line 1")
		ids, all = append(ids, c.id), append(all, c)
	}
	volume, open := w.dir(t), w.dir(t)
	below := filepath.Join(volume, "below")
	must(t, os.Mkdir(below, 0o700))
	must(t, os.Chmod(open, 0o1777))
	must(t, os.Symlink(volume, volume+"-link"))
	other := w.run(t, "runc").start(t, "sleep", withMounts(
		&cri.Mount{ContainerPath: "/volume", HostPath: volume + "-link"},
		&cri.Mount{ContainerPath: "/out", HostPath: out, Readonly: true}))
	call := func(ctx context.Context, dir string, change func(*cri.CheckpointPodRequest)) error {
		req := &cri.CheckpointPodRequest{PodSandboxId: p.id, OutputPath: dir, ContainerIds: ids}
		if change != nil {
			change(req)
		}
		_, err := w.Runtime().CheckpointPod(ctx, req)
		return err
	}
	ctx, cancel := context.WithTimeout(t.Context(), wait.Limit)
	defer cancel()
	full := w.dir(t)
	put(t, filepath.Join(full, "file"), "")
	for _, c := range []struct {
		code   codes.Code
		words  string
		dir    string
		change func(*cri.CheckpointPodRequest)
	}{
		{codes.InvalidArgument, "options", out, func(r *cri.CheckpointPodRequest) { r.Options = map[string]string{"leave": "running"} }},
		{codes.InvalidArgument, "twice", out, func(r *cri.CheckpointPodRequest) { r.ContainerIds = []string{ids[0], ids[0]} }},
		{codes.InvalidArgument, "twice", out, func(r *cri.CheckpointPodRequest) { r.ContainerIds = []string{ids[0], ids[0][:20]} }},
		{codes.InvalidArgument, "empty", out, func(r *cri.CheckpointPodRequest) { r.ContainerIds = nil }},
		{codes.InvalidArgument, "another pod", out, func(r *cri.CheckpointPodRequest) { r.ContainerIds = []string{ids[0], other.id} }},
		{codes.NotFound, "", out, func(r *cri.CheckpointPodRequest) { r.ContainerIds = []string{ids[0], "0123456789abcdef"} }},
		{codes.NotFound, "", out, func(r *cri.CheckpointPodRequest) { r.PodSandboxId = "0123456789abcdef" }},
		{codes.InvalidArgument, "absolute", "relative", nil},
		{codes.NotFound, "directory", filepath.Join(out, "missing"), nil},
		{codes.FailedPrecondition, "empty", full, nil},
		{codes.FailedPrecondition, "", filepath.Join(full, "file"), nil},
		{codes.FailedPrecondition, "container " + other.id, below, nil}, // it could change what is signed
		{codes.FailedPrecondition, "other users", open, nil},
	} {
		wantCode(t, call(ctx, c.dir, c.change), c.code, c.words)
	}
	for _, dir := range []string{out, below, open} {
		empty(t, dir)
	}

	must(t, call(ctx, out, nil))
	for _, c := range all {
		c.goesOnCounting(t)
	}
	var m checkpoint.PodManifest
	must(t, json.Unmarshal([]byte(read(t, filepath.Join(out, checkpoint.Manifest))), &m))
	equal(t, "pod", m.PodID, p.id)
	var parts []string
	for _, part := range m.Containers {
		parts = append(parts, part.ID)
		for _, name := range []string{"checkpoint/inventory.img", "spec.dump", "config.dump", "rootfs-diff.tar"} {
			if info, err := os.Stat(filepath.Join(out, part.Directory, name)); err != nil || info.Size() == 0 {
				t.Errorf("%s of %s: %v", name, part.Name, err)
			}
		}
	}
	equal(t, "containers", strings.Join(parts, " "), strings.Join(ids, " "))
	want := append(slices.Clone(ids), checkpoint.Shm, checkpoint.Request, checkpoint.Manifest, checkpoint.Signature)
	slices.Sort(want)
	equal(t, "files", strings.Join(names(t, out), " "), strings.Join(want, " "))
}

// Nothing of the node is overwritten, and nothing is left of a checkpoint that fails.
func TestCheckpointLocations(t *testing.T) {
	t.Parallel()
	w, ok := dumps(t)
	if !ok {
		return
	}
	_, c := w.counter(t)
	out := w.dir(t)
	victim := filepath.Join(w.dir(t), "victim")
	put(t, victim, "not to be changed")
	must(t, os.Symlink(victim, filepath.Join(out, "link.tar")))
	must(t, os.Symlink("/nowhere/at-all", filepath.Join(out, "dangling.tar")))
	put(t, filepath.Join(out, "file.tar"), "not to be changed")
	must(t, os.Mkdir(filepath.Join(out, "dir.tar"), 0o755))
	before := names(t, out)
	small := w.tmpfs(t)
	put(t, filepath.Join(small, "ballast"), strings.Repeat("b", 4<<20-64<<10))
	for location, code := range map[string]codes.Code{
		"":                                 codes.InvalidArgument,
		"relative.tar":                     codes.InvalidArgument,
		out + "/":                          codes.InvalidArgument,
		out + "/../x.tar":                  codes.InvalidArgument,
		filepath.Join(out, "link.tar"):     codes.AlreadyExists,
		filepath.Join(out, "dangling.tar"): codes.AlreadyExists,
		filepath.Join(out, "file.tar"):     codes.AlreadyExists,
		filepath.Join(out, "dir.tar"):      codes.AlreadyExists,
		filepath.Join(out, "missing", "file.tar"): codes.NotFound,
		filepath.Join(victim, "file.tar"):         codes.FailedPrecondition,
		filepath.Join(small, "file.tar"):          codes.ResourceExhausted,
	} {
		t.Logf("location %q", location)
		words := ""
		if code == codes.ResourceExhausted { // before the container is frozen
			words = "no space for the checkpoint"
		}
		wantCode(t, c.checkpoint(t.Context(), location), code, words)
	}
	equal(t, "files", strings.Join(names(t, out), " "), strings.Join(before, " "))
	equal(t, "files on the full disk", strings.Join(names(t, small), " "), "ballast")
	for _, file := range []string{victim, filepath.Join(out, "file.tar")} {
		equal(t, file, read(t, file), "not to be changed")
	}
	c.goesOnCounting(t)
}

// crius checkpoint is for people on the node: it prints the path of what has been written.
func TestCheckpointCommand(t *testing.T) {
	t.Parallel()
	w, ok := dumps(t)
	if !ok {
		return
	}
	p, c := w.counter(t)
	out := w.dir(t)
	pod := p.config.Metadata.Namespace + "/" + p.config.Metadata.Name
	archive, dir := filepath.Join(out, "x.tar"), filepath.Join(out, "pod")
	code, said, errs := w.try(t, "", "checkpoint", pod, c.config.Metadata.Name, "--output", archive)
	if code != 0 || said != archive+"\n" || len(members(t, archive)["spec.dump"]) == 0 {
		t.Errorf("a container: exit code %d, %q, %q", code, said, errs)
	}
	code, said, errs = w.try(t, "", "checkpoint", pod, "--output", dir)
	if code != 0 || said != dir+"\n" || !slices.Contains(names(t, dir), checkpoint.Manifest) {
		t.Errorf("a pod: exit code %d, %q, %q", code, said, errs)
	}
	code, said, errs = w.try(t, "", "checkpoint", pod, c.config.Metadata.Name, "--output", archive)
	if code != 1 || said != "" || !strings.Contains(errs, "exists already, choose another name") {
		t.Errorf("again: exit code %d, %q, %q", code, said, errs)
	}
	c.goesOnCounting(t)
	if n := w.metric(t, "crius_checkpoint_frozen_seconds_count"); n < 2 {
		t.Errorf("containers were frozen %v times", n)
	}
}

// criu dumps a PID namespace only with its first process: what shares that of its pod or of the node is
// refused while it runs, and not by criu in the middle.
func TestCheckpointInSharedPIDNamespace(t *testing.T) {
	t.Parallel()
	w, ok := dumps(t)
	if !ok {
		return
	}
	out := w.dir(t)
	for _, mode := range []cri.NamespaceMode{cri.NamespaceMode_POD, cri.NamespaceMode_NODE} {
		forPod, forContainer := pidMode(mode)
		p := w.run(t, "runc", forPod)
		c := p.start(t, "lines 1000000000 20ms", forContainer)
		c.says(t, "line 1")
		wantCode(t, c.checkpoint(t.Context(), filepath.Join(out, "x.tar")), codes.FailedPrecondition, "shares the PID namespace")
		ctx, cancel := context.WithTimeout(t.Context(), wait.Limit)
		defer cancel()
		_, err := w.Runtime().CheckpointPod(ctx, &cri.CheckpointPodRequest{PodSandboxId: p.id, OutputPath: out, ContainerIds: []string{c.id}})
		wantCode(t, err, codes.FailedPrecondition, "shares the PID namespace")
		c.goesOnCounting(t)
	}
	empty(t, out)
}

// A node without checkpoints says so in words that the kubelet's end-to-end tests know: with another
// error they fail.
func TestNodeWithoutCheckpoints(t *testing.T) {
	t.Parallel()
	w := known(dumping.World(t))
	c := w.run(t, "crun").start(t, "sleep") // Debian's was built without criu
	out := w.dir(t)
	wantCode(t, c.checkpoint(t.Context(), filepath.Join(out, "x.tar")), codes.Unimplemented, "checkpoint/restore requires at least CRIU", "crun")
	empty(t, out)
}

// Probes and a checkpoint do not disturb each other: a command that the runtime is starting is started first.
func TestCheckpointBetweenProbes(t *testing.T) {
	t.Parallel()
	w, ok := dumps(t)
	if !ok {
		return
	}
	p := w.run(t, "runc")
	c := p.start(t, "alloc 400 ; lines 1000000000 20ms") // long enough for a probe's time to be up meanwhile
	c.says(t, "line 1")
	out := w.dir(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var probes errgroup.Group
	for _, command := range []string{"echo", "echo", "sleep"} {
		probes.Go(func() error {
			for ctx.Err() == nil {
				_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.id, Cmd: []string{"/probe", command}, Timeout: 1})
				if code := status.Code(err); code != codes.OK && code != codes.Unavailable && code != codes.DeadlineExceeded {
					return err
				}
			}
			return nil
		})
	}
	for i := range 5 {
		if err := c.checkpoint(t.Context(), filepath.Join(out, fmt.Sprint(i))); err != nil {
			t.Errorf("checkpoint %d: %v", i, err)
		}
	}
	cancel()
	must(t, probes.Wait())
}

// A criu that hangs does not keep a container from being removed: it traces the processes, and nobody else learns that
// they are dead.
func TestRemoveBesideHangingCriu(t *testing.T) {
	t.Parallel()
	w, ok := dumps(t)
	if !ok {
		return
	}
	p, out := w.run(t, "runc"), w.dir(t)
	c := p.start(t, "alloc 200 ; lines 1000000000 20ms")
	c.says(t, "line 1")
	stopped := false
	for i := 0; !stopped; i++ { // a dump may be over before it is seen
		result := make(chan error, 1)
		go func() { result <- c.checkpoint(context.Background(), filepath.Join(out, fmt.Sprint(i))) }()
		wait.For(t, "criu to trace the container, or the end of the checkpoint", func() bool {
			criu := tracerOf(c.id)
			if stopped = criu > 1 && unix.Kill(criu, unix.SIGSTOP) == nil; stopped && criu != tracerOf(c.id) {
				stopped = false // it had let go already
				_ = unix.Kill(criu, unix.SIGCONT)
			}
			return stopped || len(result) > 0
		})
		if stopped {
			c.remove(t)
		}
		if err := <-result; (err != nil) != stopped {
			t.Errorf("criu was stopped: %t, but the checkpoint: %v", stopped, err)
		}
	}
}

// tracerOf returns the process that traces one of a container, or 0.
func tracerOf(id string) (pid int) {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		cgroups, _ := os.ReadFile(filepath.Join(dir, "cgroup")) // it may have ended
		if !strings.Contains(string(cgroups), id) || strings.Contains(string(cgroups), "crius-checkpoint-") {
			continue
		}
		status, _ := os.ReadFile(filepath.Join(dir, "status"))
		if _, tracer, _ := strings.Cut(string(status), "TracerPid:"); tracer != "" {
			_, _ = fmt.Sscan(tracer, &pid)
		}
		if pid > 0 {
			return pid
		}
	}
	return 0
}

// What wants a container to end does not wait for its checkpoint.
func TestStopDuringCheckpoint(t *testing.T) {
	t.Parallel()
	w, ok := dumps(t)
	if !ok {
		return
	}
	for _, end := range []func(*container){
		func(c *container) { c.stop(t, scene.LimitSeconds) },
		func(c *container) { c.stop(t, 0) },
		func(c *container) { c.remove(t) },
		func(c *container) { c.pod.stop(t) },
	} {
		p, out := w.run(t, "runc"), w.dir(t)
		c := p.start(t, "alloc 64 ; lines 1000000000 20ms")
		c.says(t, "line 1")
		result := make(chan error, 1)
		go func() { result <- c.checkpoint(context.Background(), filepath.Join(out, "x.tar")) }()
		wait.For(t, "the checkpoint", func() bool {
			_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.id, Cmd: []string{"/probe", "echo"}, Timeout: 1})
			return err != nil || len(result) > 0
		})
		end(c)
		err := <-result
		for _, name := range names(t, out) {
			if name != "x.tar" || err != nil {
				t.Errorf("%s is left, with the error %v", name, err)
			}
		}
	}
}
