package pod

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/network/hostport"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/limits"
	"github.com/crius-run/crius/oci/stdio"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/storage"
	"github.com/crius-run/crius/storage/registry/source"
	"github.com/crius-run/crius/test/kit/wait"
)

// node is a machine in memory: what containers, mounts and networks exist. It
// outlives the engine, as a machine outlives its server, and fails on demand.
type node struct {
	mu    sync.Mutex
	fail  map[string]error         // by step: what it answers, without an effect
	half  map[string]bool          // by step: fails after its effect
	block map[string]chan struct{} // by step: waits for this or its context
	calls []string

	cannotDump error // what tasks answer to MayCheckpoint

	tasks    map[string]*fakeTask
	rootfs   map[string]bool
	networks map[string]bool
	exposed  map[string]bool // pods to which host ports lead
	ports    map[string]bool // and those to which they should
	defects  []storage.Defect
	damage   map[string][]network.Damage // by pod
	leased   []network.Lease
	layers   map[string]storage.FsUsage
	unknown  bool // the handler is not configured
	root     string
	sandbox  bool     // its pods live in sandboxes
	allowed  []string // annotations that the handler allows
	profile  string   // content of each pulled seccomp profile
}

func newNode() *node {
	return &node{
		fail:     map[string]error{},
		half:     map[string]bool{},
		block:    map[string]chan struct{}{},
		tasks:    map[string]*fakeTask{},
		rootfs:   map[string]bool{},
		networks: map[string]bool{},
		exposed:  map[string]bool{},
		ports:    map[string]bool{},
		damage:   map[string][]network.Damage{},
	}
}

var errInjected = errors.New("injected")

// step runs effect unless the step is to fail or hang.
func (n *node) step(ctx context.Context, name string, effect func()) error {
	n.mu.Lock()
	n.calls = append(n.calls, name)
	wait, err, half := n.block[name], n.fail[name], n.half[name]
	n.mu.Unlock()
	if wait != nil {
		select {
		case <-wait:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	if err != nil && !half {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	effect()
	return err
}

func (n *node) set(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f()
}

func (n *node) count(step string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	count := 0
	for _, call := range n.calls {
		if call == step {
			count++
		}
	}
	return count
}

// left lists what exists on the machine.
func (n *node) left() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var left []string
	for id := range n.tasks {
		left = append(left, "task "+id)
	}
	for id := range n.rootfs {
		left = append(left, "rootfs "+id)
	}
	for id := range n.networks {
		left = append(left, "network "+id)
	}
	for id := range n.exposed {
		left = append(left, "host ports "+id)
	}
	slices.Sort(left)
	return left
}

// Images

type fakeImages struct{ *node }

func (f fakeImages) Image(ctx context.Context, ref string) (*storage.Image, error) {
	if err := f.step(ctx, "find image", func() {}); err != nil {
		return nil, cmp.Or(ctx.Err(), err) // libraries do not report the cause
	}
	if ref == "artifact" {
		return &storage.Image{ID: "4567", Config: &imagespec.ImageConfig{}, Files: []source.File{{Path: "file"}}}, nil
	}
	if ref != "image" {
		return nil, fmt.Errorf("image %q: %w", ref, fault.NotFound)
	}
	return &storage.Image{ID: "0123", Config: &imagespec.ImageConfig{Cmd: []string{"/bin/true"}}}, nil
}

func (f fakeImages) Pull(ctx context.Context, req storage.PullRequest) (*storage.Image, error) {
	return &storage.Image{ID: req.Image}, f.step(ctx, "pull", func() {})
}

func (f fakeImages) Admit(ctx context.Context, use storage.Use) error {
	return f.step(ctx, "admit "+use.Namespace+" "+use.Name, func() {})
}

func (f fakeImages) MountRootfs(ctx context.Context, r storage.Rootfs) error {
	return f.step(ctx, "mount", func() {
		f.rootfs[r.ID] = true
		if !r.ReadOnly {
			_ = os.MkdirAll(r.Upper(), 0o700) // for a checkpoint
		}
	})
}

func (f fakeImages) RemoveRootfs(ctx context.Context, r storage.Rootfs) error {
	return f.step(ctx, "remove rootfs", func() { delete(f.rootfs, r.ID) })
}

func (f fakeImages) Remove(ctx context.Context, _ string) error {
	return f.step(ctx, "remove image", func() {})
}

func (f fakeImages) Adopt(_ context.Context, live []storage.Rootfs) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	known := map[string]bool{}
	for _, r := range live {
		known[r.ID] = true
	}
	maps.DeleteFunc(f.rootfs, func(id string, _ bool) bool { return !known[id] })
	f.calls = append(f.calls, "adopt")
	return f.fail["adopt"]
}

type fakeProfiles struct{ *node }

func (f fakeProfiles) Pull(ctx context.Context, req storage.PullRequest, check func([]byte) error) (cached bool, err error) {
	err = f.step(ctx, "pull profile "+req.Image, func() {})
	if err == nil {
		err = check([]byte(f.profile))
	}
	return false, err
}

func (f fakeProfiles) Content(ctx context.Context, use storage.ProfileUse) ([]byte, error) {
	return []byte(f.profile), f.step(ctx, "read profile "+use.Namespace+" "+use.Ref, func() {})
}

func (f fakeProfiles) List() []storage.Profile { return []storage.Profile{{Digest: "sha256:1"}} }

func (f fakeProfiles) Remove(ctx context.Context, digest string) error {
	return f.step(ctx, "remove profile "+digest, func() {})
}

func (f fakeImages) CheckMapping(string) error { return nil }
func (f fakeImages) WritableSize() (storage.FsSize, error) {
	return storage.FsSize{Device: "/dev/sda1", Bytes: 1}, nil
}

func (f fakeImages) WritableUsage(_ context.Context, id string) (usage storage.FsUsage, ok bool) {
	f.set(func() { usage, ok = f.layers[id] })
	return usage, ok
}

func (f fakeImages) Verify(_ context.Context, live []storage.Rootfs) (found []storage.Defect, _ error) {
	f.set(func() {
		for _, d := range f.defects {
			if d.Rootfs == "" || slices.ContainsFunc(live, func(r storage.Rootfs) bool { return r.ID == d.Rootfs }) {
				found = append(found, d)
			}
		}
	})
	return found, nil
}

func (f fakeImages) Ready(ctx context.Context) error { return f.step(ctx, "store ready", func() {}) }

// Network

type fakeNetwork struct{ *node }

func (f fakeNetwork) Plan(network.Pod) (*network.Attachment, error) {
	return &network.Attachment{Network: "fake", Interface: "eth0"}, f.step(context.Background(), "plan", func() {})
}

func (f fakeNetwork) Attach(ctx context.Context, p network.Pod, plan *network.Attachment) (*network.Attachment, error) {
	err := f.step(ctx, "attach", func() { f.networks[p.ID] = true })
	if err != nil {
		return nil, err
	}
	done := *plan
	done.IPs = []string{"10.0.0.1", "fd00::1"}
	for _, m := range p.PortMappings {
		done.HostPorts = append(done.HostPorts, hostport.Mapping{HostPort: uint16(m.HostPort), ContainerPort: uint16(m.ContainerPort), Protocol: "tcp"})
	}
	return &done, nil
}

func (f fakeNetwork) Expose(ctx context.Context, p network.Pod, _ *network.Attachment) error {
	return f.step(ctx, "expose", func() { f.exposed[p.ID], f.ports[p.ID] = true, true })
}

func (f fakeNetwork) Load(live map[string]*network.Attachment) {
	f.set(func() {
		clear(f.ports) // another program, which knows nothing else
		f.claim(live)
	})
}

func (f fakeNetwork) claim(live map[string]*network.Attachment) {
	for id, a := range live {
		if len(a.HostPorts) > 0 {
			f.ports[id] = true
		}
	}
}

func (f fakeNetwork) VerifyHostPorts(context.Context) (wrong []string, _ error) {
	f.set(func() {
		if !maps.Equal(f.ports, f.exposed) {
			wrong = []string{fmt.Sprintf("ports lead to %v, not to %v", f.exposed, f.ports)}
		}
	})
	return wrong, nil
}

func (f fakeNetwork) Verify(pods []network.Attached) map[string][]network.Damage {
	found := map[string][]network.Damage{}
	f.set(func() {
		for _, p := range pods {
			found[p.ID] = f.damage[p.ID]
		}
	})
	return found
}

func (f fakeNetwork) Leases([]string, []*network.Attachment) (leases []network.Lease, _ []string, _ error) {
	err := f.step(context.Background(), "leases", func() { leases = slices.Clone(f.leased) })
	return leases, nil, err
}

func (f fakeNetwork) Reclaim(ctx context.Context, p network.Pod, _ []network.Lease, _ []string) error {
	return f.step(ctx, "reclaim", func() {
		delete(f.networks, p.ID)
		f.leased = slices.DeleteFunc(f.leased, func(l network.Lease) bool { return l.Owner == p.ID })
	})
}

func (f fakeNetwork) Restore(ctx context.Context, live map[string]*network.Attachment) error {
	return f.step(ctx, "restore", func() {
		if live != nil { // the start of a server
			clear(f.ports)
		}
		f.claim(live)
		f.exposed = maps.Clone(f.ports)
	})
}

func (f fakeNetwork) Detach(ctx context.Context, p network.Pod, _ *network.Attachment) error {
	return f.step(ctx, "detach", func() {
		delete(f.networks, p.ID)
		delete(f.exposed, p.ID)
		delete(f.ports, p.ID)
	})
}

// Collect gives back the networks of pods of ours that are not live.
func (f fakeNetwork) Collect(ctx context.Context, _ []string, live network.Live) error {
	attached, err := live.Attached()
	return errors.Join(err, f.step(ctx, "collect", func() {
		maps.DeleteFunc(f.networks, func(id string, _ bool) bool { return attached[id] == "" && live.Ours(id) })
	}))
}

func (f fakeNetwork) Unlock(ctx context.Context, _ string) error {
	return f.step(ctx, "unlock", func() {})
}

func (f fakeNetwork) Ready(ctx context.Context) error { return f.step(ctx, "network ready", func() {}) }
func (fakeNetwork) Grace() error                      { return nil }
func (f fakeNetwork) SetPodCIDR(string) error         { return nil }

// Runtime

type fakeRuntimes struct{ *node }

func (f fakeRuntimes) Get(name string) (oci.Runtime, error) {
	unknown := false
	f.set(func() { unknown = f.unknown })
	if name != "" && name != "fake" || unknown {
		return nil, fmt.Errorf("handler %q: %w", name, fault.NotFound)
	}
	return fakeRuntime(f), nil
}

func (f fakeRuntimes) Bind(name string, _ oci.Origin) (oci.Runtime, error) { return f.Get(name) }

func (f fakeRuntimes) All() iter.Seq2[string, oci.Runtime] {
	return maps.All(map[string]oci.Runtime{"fake": fakeRuntime(f)})
}

func (fakeRuntimes) Names() []string { return []string{"fake"} }
func (fakeRuntimes) Default() string { return "fake" }
func (fakeRuntimes) Version() uint64 { return 0 }

func (f fakeRuntimes) Ready(ctx context.Context) error {
	return f.step(ctx, "runtime ready", func() {})
}

func (f fakeRuntimes) MonitorReady() error {
	return f.step(context.Background(), "monitor ready", func() {})
}

type fakeRuntime struct{ *node }

func (f fakeRuntime) Handler() oci.Handler {
	return oci.Handler{Root: f.root, AllowedAnnotations: f.allowed}
}

// StateFiles has a directory for each container.
func (f fakeRuntime) StateFiles() (oci.StateFiles, error) {
	entries, err := os.ReadDir(f.root)
	files := oci.StateFiles{}
	for _, entry := range entries {
		files[entry.Name()] = []string{filepath.Join(f.root, entry.Name())}
	}
	return files, err
}

func (fakeRuntime) List(context.Context) ([]string, error) { return nil, nil }

func (f fakeRuntime) Probe(ctx context.Context) (*oci.Abilities, error) {
	sandbox := false
	f.set(func() { sandbox = f.sandbox })
	return &oci.Abilities{Sandboxed: sandbox}, f.step(ctx, "probe", func() {})
}

func (f fakeRuntime) Create(ctx context.Context, ref oci.Ref, spec *specs.Spec, _ oci.IO) (oci.Task, error) {
	var task *fakeTask
	err := f.step(ctx, "create", func() {
		task = &fakeTask{node: f.node, id: ref.ID, sandbox: ref.Holder, exitFile: ref.ExitFile, spec: spec, dead: make(chan struct{}), lost: make(chan struct{})}
		f.tasks[ref.ID] = task
	})
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(spec)
	if err == nil && ref.Dir != "" {
		err = os.WriteFile(filepath.Join(ref.Dir, "config.json"), text, 0o600)
	}
	return task, err
}

func (fakeRuntime) MayRestore(context.Context) error { return nil }

func (f fakeRuntime) Restore(ctx context.Context, ref oci.Ref, spec *specs.Spec, io oci.IO, _ oci.Restored) (oci.Task, error) {
	if err := f.step(ctx, "restore task", func() {}); err != nil {
		return nil, err
	}
	return f.Create(ctx, ref, spec, io)
}

func (f fakeRuntime) Load(ctx context.Context, ref oci.Ref) (oci.Task, error) {
	var task *fakeTask
	err := f.step(ctx, "load", func() { task = f.tasks[ref.ID] })
	if err == nil && task == nil {
		err = fmt.Errorf("task %s: %w", ref.ID, fault.NotFound)
	}
	return task, err
}

// Unreachable takes signals, and never ends.
func (f fakeRuntime) Unreachable(ref oci.Ref) oci.Task {
	var task *fakeTask
	f.set(func() { task = f.tasks[ref.ID] })
	return &unreachableTask{task}
}

type unreachableTask struct{ *fakeTask }

func (*unreachableTask) Exited() <-chan struct{} { return nil }
func (t *unreachableTask) PID() int {
	if t.fakeTask == nil {
		return 0
	}
	return t.fakeTask.PID()
}

func (f fakeRuntime) EndLeftovers(ctx context.Context, ref oci.Ref) error {
	return f.step(ctx, "end leftovers "+ref.ID, func() {})
}

func (f fakeRuntime) Delete(ctx context.Context, ref oci.Ref) error {
	return f.step(ctx, "delete", func() {
		if task := f.tasks[ref.ID]; task != nil {
			task.die(137)
			delete(f.tasks, ref.ID)
		}
	})
}

// fakeTask dies of SIGKILL, and of SIGTERM unless it is stubborn.
type fakeTask struct {
	*node
	id       string
	sandbox  string // of the Ref
	updates  []limits.Update
	exitFile string
	spec     *specs.Spec
	started  bool
	held     bool // its commands
	frozen   bool
	signals  []unix.Signal
	stubborn,
	immortal bool
	logged atomic.Uint64
	log    conmon.LogTrouble
	news   chan struct{} // closed when log changes

	dead chan struct{}
	lost chan struct{}
	exit conmon.Exit
}

// die wants node.mu held.
func (t *fakeTask) die(code int32) {
	select {
	case <-t.dead:
	default:
		t.exit = conmon.Exit{Code: code, FinishedAt: time.Now().Round(0).UTC()}
		_ = conmon.WriteExit(t.exitFile, t.exit) // nobody wants it where the directory has gone
		close(t.dead)
	}
}

func (t *fakeTask) PID() int {
	select {
	case <-t.dead:
		return 0
	default:
		return os.Getpid()
	}
}

func (t *fakeTask) PIDNamespace() (*os.File, error) { return os.Open("/proc/self/ns/pid") }

func (t *fakeTask) Start(ctx context.Context) error {
	return t.step(ctx, "start", func() { t.started = true })
}

func (t *fakeTask) Started(ctx context.Context) (started bool, err error) {
	err = t.step(ctx, "state", func() { started = t.started })
	return started, err
}

func (t *fakeTask) Usage(context.Context) (cgroup.Usage, error) {
	if t.sandbox == "" {
		return cgroup.Usage{}, fault.Unimplemented
	}
	return cgroup.Usage{Time: time.Now(), CPU: &cgroup.CPU{Total: 4711}}, nil
}

func (t *fakeTask) Forward(ctx context.Context, port uint16) (oci.Stream, error) {
	return nil, errors.Join(fault.Unavailable, t.step(ctx, fmt.Sprintf("forward %d", port), func() {}))
}

func (t *fakeTask) Signal(ctx context.Context, sig unix.Signal) error {
	return t.step(ctx, "signal", func() {
		t.signals = append(t.signals, sig)
		if !t.stubborn {
			t.die(128 + int32(sig))
		}
	})
}

func (t *fakeTask) Kill(ctx context.Context) error {
	return t.step(ctx, "kill", func() {
		if !t.immortal {
			t.die(137)
		}
	})
}

func (t *fakeTask) Exec(ctx context.Context, args []string, _ time.Duration) (*oci.ExecResult, error) {
	return &oci.ExecResult{Stdout: []byte(args[0])}, t.step(ctx, "exec", func() {})
}

func (t *fakeTask) Open(ctx context.Context, c oci.Command) (*stdio.Session, error) {
	return nil, errors.Join(errors.New("no session in memory"), t.step(ctx, "open", func() {}))
}

func (t *fakeTask) Attach(ctx context.Context, _ conmon.Streams) (*stdio.Session, error) {
	return nil, errors.Join(errors.New("no session in memory"), t.step(ctx, "attach", func() {}))
}

func (t *fakeTask) Update(ctx context.Context, u limits.Update) error {
	return t.step(ctx, "update", func() { t.updates = append(t.updates, u) })
}

func (t *fakeTask) ReopenLog(ctx context.Context) error {
	return t.step(ctx, "reopen", func() {})
}

func (t *fakeTask) Exited() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.lost != nil {
		select {
		case <-t.lost:
			return t.lost
		default:
		}
	}
	return t.dead
}

func (t *fakeTask) Exit() (conmon.Exit, error) {
	select {
	case <-t.dead:
		return t.exit, nil
	default:
		return conmon.Exit{}, conmon.ErrLost
	}
}

func (t *fakeTask) Close() {}

// Logged grows by a byte whenever somebody asks, and twice as much is discarded.
func (t *fakeTask) Logged(context.Context) conmon.LogCount {
	n := t.logged.Add(1)
	return conmon.LogCount{Written: n, Discarded: 2 * n, JournalLost: 3 * n}
}

func (t *fakeTask) LogTrouble() (conmon.LogTrouble, <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.news == nil {
		t.news = make(chan struct{})
	}
	return t.log, t.news
}

// report changes what LogTrouble returns.
func (t *fakeTask) report(now conmon.LogTrouble) {
	t.set(func() {
		t.log = now
		if t.news != nil {
			close(t.news)
			t.news = nil
		}
	})
}

func (t *fakeTask) MayCheckpoint(context.Context) (err error) {
	t.set(func() { err = t.cannotDump })
	return err
}

func (t *fakeTask) DumpsSandbox() bool { return false }

func (t *fakeTask) Hold(ctx context.Context) (func(), error) {
	held := true
	err := t.step(ctx, "hold", func() { held, t.held = t.held, true })
	if err == nil && held {
		err = fmt.Errorf("the commands are held already: %w", fault.Unavailable)
	}
	return func() { t.set(func() { t.held = false }) }, err
}

func (t *fakeTask) Pause(ctx context.Context) error {
	return t.step(ctx, "pause", func() { t.frozen = true })
}

// Dump writes one image.
func (t *fakeTask) Dump(ctx context.Context, d oci.Dump) error {
	if err := t.step(ctx, "dump", func() {}); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(d.Images, "inventory.img"), []byte("image"), 0o600)
}

func (t *fakeTask) EndDump(ctx context.Context, _ string) error {
	if t == nil {
		return nil
	}
	return t.step(ctx, "end dump", func() { t.frozen = false })
}

func (t *fakeTask) EndAbandoned(context.Context) func(context.Context) error { return nil }

// Engines and requests

type bench struct {
	*testing.T
	node *node
	cfg  Options
	boot string
	hook trace.Hook

	recoverTime time.Duration
}

func newBench(t *testing.T) *bench {
	t.Helper()
	temp := func(parent string) string {
		dir, err := os.MkdirTemp(parent, "")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := os.RemoveAll(dir); err != nil {
				t.Error(err)
			}
		})
		return dir
	}
	dir := temp("/tmp") // t.TempDir is too long for sockets
	cfg := Options{Config: DefaultConfig()}
	cfg.StateDir = temp("/dev/shm") + "/state" // where fsync costs nothing
	cfg.RunDir, cfg.NamespacesDir = dir+"/r", dir+"/ns"
	cfg.CgroupDriver, cfg.PauseProgram = "cgroupfs", "/proc/self/exe"
	return &bench{T: t, node: newNode(), cfg: cfg, recoverTime: wait.Limit} // also if the machine pauses
}

// timeless runs a test by a clock of its own, which jumps to the next instant at
// which something is due: what waits for nothing but time does not wait.
func timeless(t *testing.T, test func(t *testing.T, b *bench)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.recoverTime = recoverTime
		t.Cleanup(func() { time.Sleep(time.Hour) }) // records are synced after their engine has closed
		test(t, b)
	})
}

// engine starts a server on the bench.
func (b *bench) engine() *Engine {
	b.Helper()
	e := b.unrecovered()
	if err := e.Recover(b.Context()); err != nil {
		b.Fatal(err)
	}
	return e
}

// unrecovered is a server that has not looked at its records yet.
func (b *bench) unrecovered() *Engine {
	b.Helper()
	e, err := New(b.Context(), b.cfg, Deps{
		Images: fakeImages{b.node}, Profiles: fakeProfiles{b.node}, Network: fakeNetwork{b.node}, Runtimes: fakeRuntimes{b.node}, Trace: &trace.Tracer{Hook: b.hook},
	})
	if err != nil {
		b.Fatal(err)
	}
	e.recoverTime = b.recoverTime
	if b.boot != "" {
		e.planner().Boot, e.audit.Boot, e.tuner.Boot = b.boot, b.boot, b.boot
	}
	b.Cleanup(func() { b.close(e) })
	return e
}

func (b *bench) close(e *Engine) {
	b.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), wait.Limit)
	defer cancel()
	select {
	case <-e.background.Closing().Done():
	default:
		if err := e.Close(ctx); err != nil {
			b.Error(err)
		}
	}
}

// nothingLeft fails the test if a pod left anything anywhere.
func (b *bench) nothingLeft() {
	b.Helper()
	if left := b.node.left(); len(left) > 0 {
		b.Errorf("left on the machine: %v", left)
	}
	for _, dir := range []string{
		b.cfg.StateDir + "/pods", b.cfg.StateDir + "/containers", b.cfg.RunDir + "/pods", b.cfg.RunDir + "/containers",
		b.cfg.NamespacesDir + "/netns", b.cfg.NamespacesDir + "/ipcns", b.cfg.NamespacesDir + "/utsns",
	} {
		entries, err := os.ReadDir(dir)
		if err != nil && !os.IsNotExist(err) {
			b.Error(err)
		}
		for _, entry := range entries {
			b.Errorf("left in %s: %s", dir, entry.Name())
		}
	}
}

func podConfig(name string) *cri.PodSandboxConfig {
	return &cri.PodSandboxConfig{
		Metadata: &cri.PodSandboxMetadata{Name: name, Namespace: "default", Uid: "uid-" + name},
		Hostname: name,
		Labels:   map[string]string{"app": name},
		Linux: &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{
			NamespaceOptions: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER},
		}},
	}
}

func containerConfig(name string) *cri.ContainerConfig {
	return &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: name},
		Image:    &cri.ImageSpec{Image: "image"},
		Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{
			NamespaceOptions: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER},
		}},
	}
}

func (b *bench) run(e *Engine, name string) string {
	b.Helper()
	id, err := e.RunSandbox(b.Context(), "", podConfig(name))
	if err != nil {
		b.Fatal(err)
	}
	return id
}

func (b *bench) create(e *Engine, pod, name string) string {
	b.Helper()
	id, err := e.CreateContainer(b.Context(), pod, containerConfig(name), nil)
	if err != nil {
		b.Fatal(err)
	}
	return id
}

func (b *bench) start(e *Engine, pod, name string) string {
	b.Helper()
	id := b.create(e, pod, name)
	if err := e.StartContainer(b.Context(), id); err != nil {
		b.Fatal(err)
	}
	return id
}

func (b *bench) remove(e *Engine, pod string) {
	b.Helper()
	if err := e.RemoveSandbox(b.Context(), pod); err != nil {
		b.Fatal(err)
	}
}

// waitState waits until container id is seen in state.
func (b *bench) waitState(e *Engine, id string, state cri.ContainerState) *view.Container {
	b.Helper()
	var v *view.Container
	wait.For(b, "the container to be "+state.String(), func() (is bool) {
		var err error
		if v, err = e.Container(id); err != nil {
			b.Fatal(err)
		}
		return v.State == state
	})
	return v
}

// awaitCalls waits until the node has been asked for a step n times.
func (b *bench) awaitCalls(step string, n int) {
	b.Helper()
	wait.For(b, fmt.Sprintf("%d calls of %q", n, step), func() bool { return b.node.count(step) >= n })
}

// awaitCleanups waits until e has no cleanup left to retry.
func (b *bench) awaitCleanups(e *Engine) {
	b.Helper()
	wait.For(b, "all cleanups to succeed", func() bool { return e.cleanups.Len() == 0 })
}

func (b *bench) task(id string) *fakeTask {
	b.Helper()
	b.node.mu.Lock()
	defer b.node.mu.Unlock()
	task := b.node.tasks[id]
	if task == nil {
		b.Fatalf("no task %s", id)
	}
	return task
}
