package integration

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/storage/checkpoint"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// checkpointed writes a checkpoint of running containers of a pod to a new directory.
func (p *pod) checkpointed(t *testing.T, containers ...*container) (dir string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), wait.Limit)
	defer cancel()
	dir = p.w.dir(t)
	req := &cri.CheckpointPodRequest{PodSandboxId: p.id, OutputPath: dir}
	for _, c := range containers {
		req.ContainerIds = append(req.ContainerIds, c.id)
	}
	_, err := p.w.Runtime().CheckpointPod(ctx, req)
	must(t, err)
	return dir
}

// restoring is a request for a new pod from a checkpoint of containers.
func (w *world) restoring(t *testing.T, dir string, containers ...*container) *cri.RestorePodRequest {
	t.Helper()
	req := &cri.RestorePodRequest{CheckpointPath: dir, RuntimeHandler: "runc", Config: w.podConfig(t)}
	for _, c := range containers {
		req.ContainerConfigs = append(req.ContainerConfigs, proto.CloneOf(c.config))
	}
	return req
}

func (w *world) tryRestore(t *testing.T, req *cri.RestorePodRequest) (*cri.RestorePodResponse, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), wait.Limit)
	defer cancel()
	return w.Runtime().RestorePod(ctx, req)
}

// restore restores a pod, whose containers are created.
func (w *world) restore(t *testing.T, req *cri.RestorePodRequest) (p *pod, all []*container) {
	t.Helper()
	resp, err := w.tryRestore(t, req)
	must(t, err)
	p = &pod{w: w, id: resp.PodSandboxId, handler: req.RuntimeHandler, config: req.Config, made: []string{resp.PodSandboxId}}
	t.Cleanup(func() { p.vanish(t) })
	for i, c := range resp.RestoredContainers {
		equal(t, "name", c.Name, req.ContainerConfigs[i].Metadata.Name)
		restored := &container{p, c.ContainerId, req.ContainerConfigs[i]}
		p.made = append(p.made, restored.id)
		equal(t, "state", restored.status(t).State, cri.ContainerState_CONTAINER_CREATED)
		equal(t, "lines in the log of a container that is held", len(restored.log(t)), 0)
		all = append(all, restored)
	}
	equal(t, "containers", len(all), len(req.ContainerConfigs))
	return p, all
}

// number returns the first number that a restored counter has written.
func (c *container) number(t *testing.T) int {
	t.Helper()
	wait.For(t, "the restored container to continue", func() bool { return len(c.log(t)) > 3 })
	var numbers []int
	for i, r := range c.log(t) {
		n, err := strconv.Atoi(strings.TrimPrefix(r.Content, "line "))
		if err != nil || i > 0 && n != numbers[i-1]+1 {
			t.Fatalf("record %d of the log is %q", i+1, r.Content)
		}
		numbers = append(numbers, n)
	}
	return numbers[0]
}

// podsNamed returns how many pods have the name of a request.
func (w *world) podsNamed(t *testing.T, name string) (n int) {
	t.Helper()
	list, err := w.Runtime().ListPodSandbox(t.Context(), &cri.ListPodSandboxRequest{})
	must(t, err)
	for _, p := range list.Items {
		if p.Metadata.Name == name {
			n++
		}
	}
	return n
}

// A pod of three goes on in another pod: each container from where it was, when it is started, with what it has
// written, in the new pod's namespaces and cgroups, and it ends as any other.
func TestRestorePod(t *testing.T) {
	t.Parallel()
	w, ok := dumps(t)
	if !ok {
		return
	}
	p := w.run(t, "runc")
	confined := func(c *cri.ContainerConfig) { // not as another user: for that criu needs CAP_SYS_RESOURCE on the node
		c.Linux.SecurityContext.NoNewPrivs = true
		c.Linux.SecurityContext.Capabilities = &cri.Capability{DropCapabilities: []string{"ALL"}}
	}
	counter := p.start(t, "write /changed text ; write /dev/shm/shared memory ; remove /etc/passwd ; lines 1000000000 20ms")
	other := p.start(t, "lines 1000000000 20ms", confined)
	waiter := p.start(t, "trap TERM ; exit 7")
	counter.says(t, "line 5")
	other.says(t, "line 1")
	waiter.says(t, "ready")
	dir := p.checkpointed(t, counter, other, waiter)
	before, digest := counter.lines(t), sumOf(t, dir)
	p.stop(t)

	req := w.restoring(t, dir, counter, other, waiter)
	req.ContainerConfigs[0].Linux.Resources.MemoryLimitInBytes = 99 * mib
	q, all := w.restore(t, req)
	for _, c := range all {
		c.start(t)
		equal(t, "state", c.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
	}
	r := all[0]
	if first := r.number(t); first < 5 || first > before+1 {
		t.Errorf("the counter goes on with %d; it had written %d", first, before)
	}
	all[1].number(t)
	equal(t, "changed file", r.exec(t, "cat /changed"), "text")
	equal(t, "/dev/shm", r.exec(t, "cat /dev/shm/shared"), "memory")
	if resp := r.execResult(t, "cat /etc/passwd"); resp.ExitCode == 0 {
		t.Error("a deleted file is there again")
	}
	equal(t, "memory limit", strings.TrimSpace(r.kernel(t, memoryLimit)), strconv.Itoa(99*mib))
	status := all[1].procfs(t, "status")
	for _, line := range []string{"CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"} {
		if !strings.Contains(status, line) {
			t.Errorf("the status of the confined process lacks %q:\n%s", line, status)
		}
	}
	var pinned unix.Stat_t
	must(t, unix.Stat(w.Path("ns", "netns", "crius-"+q.id), &pinned))
	link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", w.processesOf(t, r.id)[0]))
	must(t, err)
	equal(t, "network", link, fmt.Sprintf("net:[%d]", pinned.Ino))
	all[2].stop(t, scene.LimitSeconds)
	equal(t, "exit code", all[2].wait(t).ExitCode, 7)
	equal(t, "the directory", sumOf(t, dir), digest)

	// What was restored can be checkpointed and restored again.
	latest := r.number(t) + len(r.log(t)) - 1 // written before the checkpoint
	again := q.checkpointed(t, r)
	q.stop(t)
	_, last := w.restore(t, w.restoring(t, again, r))
	last[0].start(t)
	if second := last[0].number(t); second < latest {
		t.Errorf("the counter goes on with %d; it had written %d before the checkpoint", second, latest)
	}
}

// sumOf is a digest of all files in a directory.
func sumOf(t *testing.T, dir string) string {
	t.Helper()
	sum := sha256.New()
	must(t, filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		fmt.Fprintln(sum, path, info.Mode(), info.Size(), info.ModTime())
		if e.Type().IsRegular() {
			text, err := os.ReadFile(path)
			sum.Write(text)
			return err
		}
		return nil
	}))
	return hex.EncodeToString(sum.Sum(nil))
}

// resign changes a file of a checkpoint, and signs for it with the key in a directory.
func resign(t *testing.T, keys, dir, name string, change func(text []byte) []byte) {
	t.Helper()
	file := filepath.Join(dir, name)
	must(t, os.WriteFile(file, change([]byte(read(t, file))), 0o600))
	sign(t, keys, dir)
}

// sign signs for all that is in the directory of a checkpoint, as it is now.
func sign(t *testing.T, keys, dir string) {
	t.Helper()
	var m checkpoint.PodManifest
	must(t, json.Unmarshal([]byte(read(t, filepath.Join(dir, checkpoint.Manifest))), &m))
	for _, file := range []string{checkpoint.Manifest, checkpoint.Signature} {
		must(t, os.Remove(filepath.Join(dir, file)))
	}
	m.Files = nil
	must(t, filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		sum := sha256.Sum256(text)
		m.Files = append(m.Files, checkpoint.File{Path: strings.TrimPrefix(path, dir+"/"), Size: int64(len(text)), SHA256: hex.EncodeToString(sum[:])})
		return err
	}))
	key, err := checkpoint.NodeKey(keys)
	must(t, err)
	target, err := checkpoint.OpenTarget(dir)
	must(t, err)
	defer target.Close()
	must(t, target.PutManifest(m, key, ".tmp"))
}

// What cannot be restored is refused with the reason, and leaves nothing.
func TestRestorePodRefuses(t *testing.T) {
	t.Parallel()
	w, ok := dumps(t)
	if !ok {
		return
	}
	p, c := w.counter(t)
	dir := p.checkpointed(t, c)
	link := filepath.Join(w.dir(t), "link")
	must(t, os.Symlink(dir, link))
	type request = cri.RestorePodRequest
	security := func(r *request) *cri.LinuxContainerSecurityContext {
		return r.ContainerConfigs[0].Linux.SecurityContext
	}
	for name, refusal := range map[string]struct {
		code   codes.Code
		words  string
		change func(*request)
	}{
		"option":            {codes.InvalidArgument, "options", func(r *request) { r.Options = map[string]string{"a": "b"} }},
		"no container":      {codes.InvalidArgument, "container_configs", func(r *request) { r.ContainerConfigs = nil }},
		"twice":             {codes.InvalidArgument, "another container", func(r *request) { r.ContainerConfigs = append(r.ContainerConfigs, r.ContainerConfigs[0]) }},
		"another container": {codes.InvalidArgument, "not in the checkpoint", func(r *request) { r.ContainerConfigs[0].Metadata.Name = "other" }},
		"one more container": {codes.InvalidArgument, "not in the checkpoint", func(r *request) {
			more := proto.CloneOf(r.ContainerConfigs[0])
			more.Metadata.Name = "more"
			r.ContainerConfigs = append(r.ContainerConfigs, more)
		}},
		"relative":        {codes.InvalidArgument, "absolute", func(r *request) { r.CheckpointPath = "relative" }},
		"no directory":    {codes.NotFound, "", func(r *request) { r.CheckpointPath = filepath.Join(dir, "missing") }},
		"file":            {codes.InvalidArgument, "directory", func(r *request) { r.CheckpointPath = filepath.Join(dir, checkpoint.Manifest) }},
		"link":            {codes.InvalidArgument, "link", func(r *request) { r.CheckpointPath = link }},
		"through a link":  {codes.InvalidArgument, "link", func(r *request) { r.CheckpointPath = filepath.Join(link, c.id) }},
		"no checkpoint":   {codes.InvalidArgument, checkpoint.Signature, func(r *request) { r.CheckpointPath = filepath.Join(dir, c.id) }},
		"unknown handler": {codes.NotFound, "handler", func(r *request) { r.RuntimeHandler = "unknown" }},
		"another handler": {codes.Unimplemented, "checkpoint/restore requires", func(r *request) { r.RuntimeHandler = "crun" }},
		"user":            {codes.FailedPrecondition, "user of the checkpoint", func(r *request) { security(r).RunAsUser = &cri.Int64Value{Value: 1001} }},
		"capabilities":    {codes.FailedPrecondition, "capabilities", func(r *request) { security(r).Capabilities = &cri.Capability{DropCapabilities: []string{"KILL"}} }},
		"no_new_privs":    {codes.FailedPrecondition, "no_new_privs", func(r *request) { security(r).NoNewPrivs = true }},
		"seccomp": {codes.FailedPrecondition, "seccomp", func(r *request) {
			security(r).Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Unconfined}
		}},
		"read-only root": {codes.FailedPrecondition, "read-only root", func(r *request) { security(r).ReadonlyRootfs = true }},
		"command":        {codes.FailedPrecondition, "command", func(r *request) { r.ContainerConfigs[0].Args = steps("sleep") }},
		"environment":    {codes.FailedPrecondition, "environment", func(r *request) { r.ContainerConfigs[0].Envs = []*cri.KeyValue{{Key: "A", Value: []byte("b")}} }},
		"terminal":       {codes.FailedPrecondition, "terminal", func(r *request) { r.ContainerConfigs[0].Tty = true }},
		"mount":          {codes.FailedPrecondition, "mounts", func(r *request) { r.ContainerConfigs[0].Mounts = []*cri.Mount{{ContainerPath: "/m", HostPath: dir}} }},
		"device": {codes.FailedPrecondition, "devices", func(r *request) {
			r.ContainerConfigs[0].Devices = []*cri.Device{{HostPath: "/dev/null", ContainerPath: "/dev/mine", Permissions: "rw"}}
		}},
		"privileged":        {codes.FailedPrecondition, "privileged", func(r *request) { r.Config.Linux.SecurityContext.Privileged, security(r).Privileged = true, true }},
		"host PID":          {codes.FailedPrecondition, "hostPID", func(r *request) { security(r).NamespaceOptions.Pid = cri.NamespaceMode_NODE }},
		"shared PID":        {codes.FailedPrecondition, "shareProcessNamespace", func(r *request) { security(r).NamespaceOptions.Pid = cri.NamespaceMode_POD }},
		"host IPC":          {codes.FailedPrecondition, "hostIPC", func(r *request) { r.Config.Linux.SecurityContext.NamespaceOptions.Ipc = cri.NamespaceMode_NODE }},
		"host network":      {codes.FailedPrecondition, "hostNetwork", func(r *request) { r.Config.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE }},
		"pod that there is": {codes.AlreadyExists, "", func(r *request) { r.Config = p.config }},
	} {
		req := w.restoring(t, dir, c)
		req.Config.Metadata.Name += "-refused"
		refusal.change(req)
		_, err := w.tryRestore(t, req)
		t.Logf("%s: %v", name, err)
		wantCode(t, err, refusal.code, refusal.words)
		if refusal.code != codes.AlreadyExists {
			equal(t, "pods after "+name, w.podsNamed(t, req.Config.Metadata.Name), 0)
		}
	}
	_, err := shared(t).tryRestore(t, w.restoring(t, dir, c))
	wantCode(t, err, codes.Unimplemented, "runtime.restore")
	c.goesOnCounting(t)
}

// A restored process has the credentials and the filter of its images, whatever the spec beside them says: one that
// does not have those of the request is killed before it runs.
func TestRestoredProcessIsCompared_CVE_2026_92574(t *testing.T) {
	t.Parallel()
	w, ok := dumps(t)
	if !ok {
		return
	}
	p := w.run(t, "runc")
	c := p.start(t, "lines 1000000000 20ms", func(c *cri.ContainerConfig) {
		c.Linux.SecurityContext.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Unconfined}
	})
	c.says(t, "line 1")
	for name, attack := range map[string]struct {
		words  string
		spec   func(process, linux map[string]any)
		change func(*cri.LinuxContainerSecurityContext)
	}{
		"no_new_privs": {"no_new_privs", func(process, _ map[string]any) { process["noNewPrivileges"] = true },
			func(s *cri.LinuxContainerSecurityContext) { s.NoNewPrivs = true }},
		"capabilities": {"CapPrm", func(process, _ map[string]any) { process["capabilities"] = map[string]any{} },
			func(s *cri.LinuxContainerSecurityContext) {
				s.Capabilities = &cri.Capability{DropCapabilities: []string{"ALL"}}
			}},
	} {
		dir := p.checkpointed(t, c)
		resign(t, w.StateRoot(), dir, c.id+"/spec.dump", func(text []byte) []byte {
			var spec map[string]any
			must(t, json.Unmarshal(text, &spec))
			attack.spec(spec["process"].(map[string]any), spec["linux"].(map[string]any))
			text, err := json.Marshal(spec)
			must(t, err)
			return text
		})
		req := w.restoring(t, dir, c)
		attack.change(req.ContainerConfigs[0].Linux.SecurityContext)
		_, err := w.tryRestore(t, req)
		t.Logf("%s: %v", name, err)
		wantCode(t, err, codes.FailedPrecondition, attack.words, "restored process")
		equal(t, "pods after "+name, w.podsNamed(t, req.Config.Metadata.Name), 1) // the one that was dumped
	}
}

// Only what was signed for is restored, whoever can write to the directory.
func TestRestoreOfChangedCheckpoint(t *testing.T) {
	t.Parallel()
	w, ok := dumps(t)
	if !ok {
		return
	}
	p, c := w.counter(t)
	dir := p.checkpointed(t, c)
	outside := filepath.Join(w.dir(t), "pages")
	put(t, outside, "secret")
	pages := func(t *testing.T, dir string) string {
		t.Helper()
		found, err := filepath.Glob(filepath.Join(dir, c.id, "checkpoint", "pages-*.img"))
		must(t, err)
		return found[0]
	}
	for name, attack := range map[string]struct {
		code   codes.Code
		words  string
		change func(dir string) error
	}{
		"no signature": {codes.InvalidArgument, checkpoint.Signature, func(dir string) error { return os.Remove(filepath.Join(dir, checkpoint.Signature)) }},
		"wrong signature": {codes.PermissionDenied, "not signed", func(dir string) error {
			return os.WriteFile(filepath.Join(dir, checkpoint.Signature), []byte(strings.Repeat("A", 86)+"=="), 0o600)
		}},
		"changed manifest": {codes.PermissionDenied, "not signed", func(dir string) error {
			return os.WriteFile(filepath.Join(dir, checkpoint.Manifest), []byte(read(t, filepath.Join(dir, checkpoint.Manifest))+" "), 0o600)
		}},
		"another key": {codes.PermissionDenied, "not signed", func(dir string) error {
			resign(t, w.dir(t), dir, c.id+"/spec.dump", func(text []byte) []byte { return text })
			return nil
		}},
		"changed pages": {codes.PermissionDenied, "signed for", func(dir string) error {
			f, err := os.OpenFile(pages(t, dir), os.O_WRONLY, 0)
			must(t, err)
			defer f.Close()
			_, err = f.WriteAt([]byte("changed"), 0)
			return err
		}},
		"truncated pages": {codes.PermissionDenied, "signed for", func(dir string) error { return os.Truncate(pages(t, dir), 4096) }},
		"missing pages":   {codes.InvalidArgument, "files of its manifest", func(dir string) error { return os.Remove(pages(t, dir)) }},
		"additional file": {codes.InvalidArgument, "no file of its manifest", func(dir string) error {
			return os.WriteFile(filepath.Join(dir, c.id, "checkpoint", "more.img"), nil, 0o600)
		}},
		"link to a file": {codes.InvalidArgument, "", func(dir string) error {
			at := pages(t, dir)
			must(t, os.Remove(at))
			return os.Symlink(outside, at)
		}},
		"link to a directory": {codes.InvalidArgument, "", func(dir string) error {
			must(t, os.Rename(filepath.Join(dir, c.id), filepath.Join(w.dir(t), "moved")))
			return os.Symlink(filepath.Dir(outside), filepath.Join(dir, c.id))
		}},
		"named pipe": {codes.InvalidArgument, "", func(dir string) error {
			at := pages(t, dir)
			must(t, os.Remove(at))
			return unix.Mkfifo(at, 0o600)
		}},
	} {
		changed := w.dir(t)
		must(t, os.CopyFS(changed, os.DirFS(dir)))
		must(t, attack.change(changed))
		req := w.restoring(t, changed, c)
		_, err := w.tryRestore(t, req)
		t.Logf("%s: %v", name, err)
		wantCode(t, err, attack.code, attack.words)
		equal(t, "pods after "+name, w.podsNamed(t, req.Config.Metadata.Name), 1) // the one that was dumped
	}
}

// A container that is held outlives its server, and can be started, stopped and removed by the next one. When all
// of its programs are killed it ends, and leaves nothing.
func TestHeldContainerOutlivesServer(t *testing.T) {
	t.Parallel()
	if _, ok := dumps(t); !ok {
		return
	}
	options, err := withCriu(t.Context())
	must(t, err)
	w := spotless(t, options)
	must(t, w.settle(t.Context(), "runc"))
	p := w.run(t, "runc")
	c := p.start(t, "lines 1000000000 20ms")
	c.says(t, "line 5")
	dir := p.checkpointed(t, c)
	p.stop(t)
	var held []*container
	for i := range 3 {
		req := w.restoring(t, dir, c)
		req.Config.Metadata.Name += strconv.Itoa(i)
		_, all := w.restore(t, req)
		held = append(held, all...)
	}
	must(t, w.Crash(t.Context()))
	for _, c := range held {
		equal(t, "state after the crash", c.status(t).State, cri.ContainerState_CONTAINER_CREATED)
	}
	started, stopped, killed := held[0], held[1], held[2]
	started.start(t)
	started.number(t)
	stopped.stop(t, scene.LimitSeconds)
	equal(t, "exit code", stopped.wait(t).ExitCode, 137)
	must(t, w.Crash(t.Context()))
	equal(t, "state of the started one", started.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
	started.remove(t)
	must(t, w.Kill())
	w.killHolders(t, killed)
	must(t, w.Start(t.Context()))
	killed.wait(t)
	_, err = w.Runtime().StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: killed.id})
	wantCode(t, err, codes.FailedPrecondition, "")
}

// killHolders kills the monitor of a container that is held, and everything below it but the container: first what
// is deepest. runc puts criu, and thereby the program that holds, into the cgroup of the container.
func (w *world) killHolders(t *testing.T, c *container) {
	t.Helper()
	children := map[int][]int{}
	own, err := os.Readlink("/proc/self/ns/pid")
	must(t, err)
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	must(t, err)
	for _, file := range stats {
		text, _ := os.ReadFile(file)
		fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
		if len(fields) < 2 {
			continue // it has ended
		}
		pid, err := strconv.Atoi(strings.Split(file, "/")[2])
		must(t, err)
		parent, err := strconv.Atoi(fields[1])
		must(t, err)
		children[parent] = append(children[parent], pid)
	}
	var below func(pid int) []int
	below = func(pid int) (all []int) {
		for _, child := range children[pid] {
			all = append(all, below(child)...)
		}
		if in, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid)); err == nil && in == own {
			all = append(all, pid)
		}
		return all
	}
	var victims []int
	for _, monitor := range w.monitors(t, c.id) {
		victims = append(victims, below(monitor)...)
	}
	if len(victims) < 4 { // monitor, runtime, criu, and the program that holds it
		t.Errorf("the container is held by %v", victims)
	}
	for _, pid := range victims {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
}
