package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/opencontainers/go-digest"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/race"
	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/claim"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/program"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// requested returns the handlers that are tested only on request, by -handler. Those of gVisor,
// which take minutes to build and hide the addresses of their pods, are there only if they are
// the one.
func requested(handler string) []string {
	all := []string{tools.RuncShim, tools.Kata, tools.Kata1, tools.KataCLI}
	if handler == tools.Gvisor || handler == tools.GvisorShim {
		all = append(all, handler)
	}
	return all
}

// config makes crius forward host ports itself, so that these steps are tested
// too, and puts a stand-in before each runtime.
const config = `[network]
host_ports = "crius"

[pod]
mounts_files = ['{{.Path "mounts.conf"}}']

[runtime]
criu = %q
restore = true

[runtime.handlers.runc]
path = "{{.Path "runc" "runtime"}}"

[runtime.handlers.crun]
path = "{{.Path "crun" "runtime"}}"
`

// world is a node whose server asks at every point, with a pod for each handler
// that must not be affected.
type world struct {
	*scene.World
	gate       *gate
	plugin     *attendant
	bystanders []*bystander
	base       *inventory.Snapshot
	layers     []string
	profile    digest.Digest // of a seccomp profile in the registry
	pods       int           // made so far; names are never used twice
}

// programs are the programs of every world.
type programs struct {
	server    string
	criu      string
	failing   []byte
	requested []string
	handlers  string // configuration of the requested ones
}

func build(ctx context.Context, handler string) (p programs, err error) {
	if _, err := claim.Sweep(); err != nil { // left by a run that was killed
		return p, err
	}
	failing, err := tools.Failing(ctx)
	if err == nil {
		p.failing, err = os.ReadFile(failing)
	}
	if err != nil {
		return p, err
	}
	p.requested = requested(handler)
	for _, handler := range p.requested {
		config, err := tools.Handler(ctx, handler)
		if err != nil {
			return p, err
		}
		p.handlers += config
	}
	if p.criu, err = tools.Criu(ctx); err != nil && !errors.Is(err, tools.ErrNoCriu) {
		return p, err
	}
	p.server, err = tools.PointsServer(ctx, race.Enabled)
	return p, err
}

func newWorld(ctx context.Context, p programs) (_ *world, err error) {
	w := &world{}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	if w.gate, err = newGate(); err != nil {
		return nil, err
	}
	w.World, err = scene.New(ctx, node.Options{Config: fmt.Sprintf(config, p.criu) + p.handlers, Server: p.server, Env: []string{tools.PointsVariable + "=" + w.gate.socket()}})
	if err != nil {
		return nil, err
	}
	w.plugin = newAttendant(context.WithoutCancel(ctx), w.Path("nri.sock"))
	if err := w.plugin.await(ctx); err != nil {
		return nil, err
	}
	return w, w.furnish(ctx, p)
}

func (w *world) close() error {
	var errs []error
	if w.plugin != nil {
		w.plugin.close()
	}
	if w.World != nil {
		errs = append(errs, w.World.Close())
	}
	if w.gate != nil {
		errs = append(errs, w.gate.close())
	}
	return errors.Join(errs...)
}

// furnish gives the node everything that it must still have at the end of every
// case.
func (w *world) furnish(ctx context.Context, p programs) error {
	for name, real := range map[string]string{"runc/runtime": "runc", "crun/runtime": "crun", "cni/bin/bridge": "/usr/lib/cni/bridge"} {
		if err := standIn(w.Path(name), real, p.failing); err != nil {
			return err
		}
	}
	if err := w.Write("mounts.conf", `{{.Path "mounts.conf"}}:/run/secrets/mounts.conf`); err != nil {
		return err
	}
	extra, err := images.Build(nil, image.Text("etc/extra", "a layer of its own"))
	if err != nil {
		return err
	}
	w.Registry.Push("extra", "latest", extra)
	model, err := image.Files{"config.json": "{}", "weights/part-1": "weights", "weights/part-2": "weights"}.Build()
	if err != nil {
		return err
	}
	w.Registry.Push("model", "latest", model)
	if w.profile, err = pushProfile(w.Registry); err != nil {
		return err
	}
	if err := w.Settle(ctx, append(slices.Clone(p.requested), scene.Handlers...)...); err != nil {
		return err
	}
	for _, handler := range scene.Handlers {
		b, err := w.newBystander(ctx, handler)
		if err != nil {
			return fmt.Errorf("bystander: %w", err)
		}
		w.bystanders = append(w.bystanders, b)
	}
	first := w.stage(scene.Handlers[0])
	if err := errors.Join(first.pull(ctx), first.removeImages(ctx)); err != nil { // the first deletion makes directories that stay
		return err
	}
	w.layers = w.layerFiles()
	w.base, err = w.Stock(ctx)
	return err
}

// standIn puts the program of test/failing in front of a real one.
func standIn(path, real string, failing []byte) error {
	real, err := exec.LookPath(real)
	if err != nil {
		return err
	}
	dir := filepath.Dir(path)
	if err := os.MkdirAll(filepath.Join(dir, "faults"), 0o755); err != nil {
		return err
	}
	if err := program.Write(path, failing); err != nil {
		return err
	}
	return os.Symlink(real, filepath.Join(dir, "real"))
}

// extraImage is an image that no container of the node uses.
const extraImage = node.RegistryHost + "/extra:latest"

// artifact is an artifact that no container of the node uses.
const artifact = node.RegistryHost + "/model:latest"

// layerFiles returns the traces of images and artifacts: layers, jobs of pulls,
// temporary files. Unfinished downloads are kept for the next pull.
func (w *world) layerFiles() []string {
	var all []string
	for _, pattern := range []string{"img/overlay/*", "img/overlay-images/*", "img/overlay-layers/.tmp-*", "img/overlay-containers/.tmp-*", "img/crius-pulls/*", "img/crius-artifacts/*/*", "img/crius-profiles/*/*", "tmp/crius-pull-*"} {
		files, _ := filepath.Glob(w.Path(pattern)) // the pattern is well-formed
		all = append(all, files...)
	}
	return all
}

// clean waits until the node has exactly what it had at the beginning.
func (w *world) clean(ctx context.Context) error {
	if err := w.Clean(ctx, w.base, wait.Limit); err != nil {
		return err
	}
	var now []string
	missing := func(in, from []string) []string {
		return slices.DeleteFunc(slices.Clone(in), func(file string) bool { return slices.Contains(from, file) })
	}
	if !wait.Until(ctx, func() bool { now = w.layerFiles(); return slices.Equal(now, w.layers) }) {
		return fmt.Errorf("files of images are left over: %q, or gone: %q", missing(now, w.layers), missing(w.layers, now))
	}
	return nil
}

// sound returns what must not be in the server's log.
func (w *world) sound() error {
	if faults := w.Faults(); len(faults) > 0 {
		return fmt.Errorf("the server's log has %d faults; the first:\n%s", len(faults), faults[0])
	}
	return nil
}

// complaints returns the last warnings and errors in the server's log.
func (w *world) complaints() string {
	const most = 12
	var bad []string
	for line := range strings.Lines(w.LogTail(400)) {
		if strings.Contains(line, "level=WARN") || strings.Contains(line, "level=ERROR") {
			bad = append(bad, line)
		}
	}
	return strings.Join(bad[max(0, len(bad)-most):], "")
}

// bystander is a container that is unrelated to the disturbed ones.
type bystander struct {
	w        *world
	id, pod  string
	log      string
	lastSize int64
}

func (w *world) newBystander(ctx context.Context, handler string) (*bystander, error) {
	config := kubelet.Pod("bystander-"+handler, kubelet.LogsBelow(w.Path("logs")))
	p, err := w.Runtime().RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: handler})
	if err != nil {
		return nil, err
	}
	container := kubelet.Container("bystander", images.Probe, scene.Steps("lines 1000000000 50ms"))
	c, err := w.Runtime().CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: p.PodSandboxId, Config: container, SandboxConfig: config})
	if err != nil {
		return nil, err
	}
	if _, err := w.Runtime().StartContainer(ctx, &cri.StartContainerRequest{ContainerId: c.ContainerId}); err != nil {
		return nil, err
	}
	return &bystander{w: w, id: c.ContainerId, pod: p.PodSandboxId, log: filepath.Join(config.LogDirectory, container.LogPath)}, nil
}

// check returns an error unless the container still runs, answers and writes.
func (b *bystander) check(ctx context.Context) error {
	s, err := b.w.Runtime().ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: b.id})
	if err != nil {
		return fmt.Errorf("bystander: %w", err)
	}
	if s.Status.State != cri.ContainerState_CONTAINER_RUNNING {
		return fmt.Errorf("bystander is %v: %s", s.Status.State, s.Status.Message)
	}
	answer, err := b.w.Runtime().ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: b.id, Cmd: []string{"/probe", "echo", "alive"}, Timeout: scene.LimitSeconds})
	if err != nil {
		return fmt.Errorf("bystander: exec: %w", err)
	}
	if string(answer.Stdout) != "alive\n" {
		return fmt.Errorf("bystander answers %q and %q", answer.Stdout, answer.Stderr)
	}
	last := b.lastSize
	if !wait.Until(ctx, func() bool {
		var info os.FileInfo
		if info, err = os.Stat(b.log); err == nil {
			b.lastSize = info.Size()
		}
		return err != nil || b.lastSize > last
	}) {
		return errors.New("bystander's log does not go on")
	}
	return err
}

// checkTeardown stops the bystanders and checks that nothing is missing in their
// output, over everything that was done to the server.
func (w *world) checkTeardown(ctx context.Context) error {
	for _, b := range w.bystanders {
		if _, err := w.Runtime().StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: b.pod}); err != nil {
			return fmt.Errorf("bystander: %w", err)
		}
		if err := b.whole(); err != nil {
			return err
		}
	}
	return nil
}

// whole checks that nothing is missing in the bystander's output.
func (b *bystander) whole() error {
	n := 0
	return kubelet.ScanLog(b.log, func(r kubelet.LogRecord) error {
		n++
		if want := "line " + strconv.Itoa(n); r.Content != want {
			return fmt.Errorf("bystander's log has %q in the place of %q", r.Content, want)
		}
		return nil
	})
}
