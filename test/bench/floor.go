package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/containernetworking/cni/libcni"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/test/kit/node"
)

// floorRole is the first argument of the process that does the floor's work: in
// its own cgroup, so that its cost can be measured.
const floorRole = "floor"

// ground is the input of the floor, written by one process for the other.
type ground struct {
	Dir     string // of its own
	Runtime string
	Config  string // config.json that crius made for the same container
	Lowers  string // of the root file system
	CNI     string // conflist
	Cgroup  string // parent of the containers
	Probe   []string
}

// floor is a target of raw commands: the CNI plugins, and the OCI runtime on a
// prepared bundle.
type floor struct {
	node *node.Node
	used accounting
	role *exec.Cmd

	mu      sync.Mutex
	in      io.WriteCloser
	number  int
	waiting map[int]chan floorAnswer
}

// floorRequest requests a phase of a pod's life from the other process.
type floorRequest struct {
	Number int
	Pod    string
	Phase  int
}

type floorAnswer struct {
	Number  int
	Seconds float64
	Error   string
}

// newFloor copies the container in a pod of like. That pod stays, because the
// copies use its IPC and UTS namespaces and its files.
func newFloor(ctx context.Context, like *server) (_ *floor, err error) {
	const model = "model"
	if _, err := up(ctx, like, model); err != nil {
		return nil, err
	}
	container := like.pod(model).container
	lowers, err := like.lowers(container)
	if err != nil {
		return nil, err
	}
	n, err := node.New(ctx, node.Options{})
	if err != nil {
		return nil, err
	}
	f := &floor{node: n, waiting: map[int]chan floorAnswer{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.close())
		}
	}()
	options, err := json.Marshal(ground{
		Dir: n.Path("floor"), Runtime: like.handler, Config: filepath.Join(like.bundle(container), "config.json"), Lowers: lowers,
		CNI: n.Path("cni", "net.d", "10-p.conflist"), Cgroup: n.CgroupParent(), Probe: like.probe,
	})
	if err != nil {
		return nil, err
	}
	if f.used, err = newAccounting("/" + n.ID); err != nil {
		return nil, err
	}
	f.role = exec.Command("/proc/self/exe", floorRole, string(options))
	f.role.Stderr = os.Stderr
	if f.in, err = f.role.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := f.role.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := n.Do(f.role.Start); err != nil {
		return nil, err
	}
	go f.listen(out)
	return f, f.used.enter(f.role.Process.Pid)
}

func (f *floor) name() string          { return "floor" }
func (f *floor) cpu() (float64, error) { return f.used.seconds() }
func (f *floor) where() *node.Node     { return f.node }

// prove runs a command in the pod, which fails unless the container is running.
func (f *floor) prove(ctx context.Context, pod string) error {
	_, err := f.do(ctx, pod, execSync)
	return err
}

func (f *floor) close() error {
	var errs []error
	if f.role != nil && f.role.Process != nil {
		errs = append(errs, f.in.Close(), f.role.Wait())
	}
	return errors.Join(append(errs, f.node.Close())...)
}

func (f *floor) listen(out io.Reader) {
	for answers := json.NewDecoder(out); ; {
		var a floorAnswer
		err := answers.Decode(&a)
		f.mu.Lock()
		if err != nil {
			for _, answer := range f.waiting {
				answer <- floorAnswer{Error: "the process of the floor has ended"}
			}
			f.mu.Unlock()
			return
		}
		f.waiting[a.Number] <- a
		delete(f.waiting, a.Number)
		f.mu.Unlock()
	}
}

func (f *floor) do(ctx context.Context, pod string, phase int) (float64, error) {
	answer := make(chan floorAnswer, 1)
	f.mu.Lock()
	f.number++
	f.waiting[f.number] = answer
	err := json.NewEncoder(f.in).Encode(floorRequest{f.number, pod, phase})
	f.mu.Unlock()
	if err != nil {
		return 0, err
	}
	select {
	case a := <-answer:
		if a.Error != "" {
			return a.Seconds, errors.New(a.Error)
		}
		return a.Seconds, nil
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
}

// floorWork is the work of the other process.
type floorWork struct {
	ground
	mu   sync.Mutex
	pods map[string]*floorPod
}

// serveFloor runs the other process.
func serveFloor(options string) error {
	g := floorWork{pods: map[string]*floorPod{}}
	if err := json.Unmarshal([]byte(options), &g.ground); err != nil {
		return err
	}
	// The containers' inits become children of this process when the runtime
	// exits.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return err
	}
	if err := os.MkdirAll(g.Dir, 0o755); err != nil {
		return err
	}
	var work sync.WaitGroup
	defer work.Wait()
	var mu sync.Mutex
	answers := json.NewEncoder(os.Stdout)
	for requests := json.NewDecoder(os.Stdin); ; {
		var r floorRequest
		if err := requests.Decode(&r); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		work.Go(func() {
			a := floorAnswer{Number: r.Number}
			var err error
			if a.Seconds, err = g.pass(r.Pod, r.Phase); err != nil {
				a.Error = err.Error()
			}
			mu.Lock()
			defer mu.Unlock()
			_ = answers.Encode(a)
		})
	}
}

// pass times a phase. A pod is prepared before the first phase, and cleaned up
// after the last.
func (g *floorWork) pass(pod string, phase int) (seconds float64, err error) {
	g.mu.Lock()
	p := g.pods[pod]
	g.mu.Unlock()
	if phase == runPodSandbox {
		if p, err = g.prepare(pod); err != nil {
			return 0, err
		}
		g.mu.Lock()
		g.pods[pod] = p
		g.mu.Unlock()
	}
	if p == nil {
		return 0, fmt.Errorf("there is no pod %s", pod)
	}
	began := time.Now()
	err = p.do(phase)
	seconds = time.Since(began).Seconds()
	if phase == podDown && err == nil {
		err = p.cleanUp()
		g.mu.Lock()
		delete(g.pods, pod)
		g.mu.Unlock()
	}
	return seconds, err
}

// floorPod is a prepared pod of the floor.
type floorPod struct {
	ground
	id, dir string
	netns   ns.Spec
	cni     *libcni.CNIConfig
	plugins *libcni.NetworkConfigList
	attach  *libcni.RuntimeConf
}

// prepare makes the bundle, the root file system and an empty network
// namespace.
func (g ground) prepare(name string) (*floorPod, error) {
	p := &floorPod{ground: g, id: "floor-" + name, dir: filepath.Join(g.Dir, name)}
	for _, dir := range []string{"rootfs", "upper", "work"} {
		if err := os.MkdirAll(filepath.Join(p.dir, dir), 0o755); err != nil {
			return nil, err
		}
	}
	options := "lowerdir=" + g.Lowers + ",upperdir=" + filepath.Join(p.dir, "upper") + ",workdir=" + filepath.Join(p.dir, "work")
	if err := unix.Mount("overlay", filepath.Join(p.dir, "rootfs"), "overlay", 0, options); err != nil {
		return nil, fmt.Errorf("mount root file system: %w", err)
	}
	p.netns = ns.Spec{Dir: filepath.Join(g.Dir, "ns"), Name: p.id, Net: true}
	if _, err := ns.Create(p.netns); err != nil {
		return nil, err
	}
	var err error
	if p.plugins, err = libcni.ConfListFromFile(g.CNI); err != nil {
		return nil, err
	}
	p.cni = libcni.NewCNIConfigWithCacheDir([]string{"/usr/lib/cni"}, filepath.Join(p.dir, "cni"), nil)
	p.attach = &libcni.RuntimeConf{ContainerID: p.id, NetNS: p.netns.Paths().Net, IfName: "eth0"}
	return p, p.writeConfig()
}

// writeConfig writes the model's configuration, except for what must be the
// pod's own.
func (p *floorPod) writeConfig() error {
	text, err := os.ReadFile(p.Config)
	if err != nil {
		return err
	}
	var spec specs.Spec
	if err := json.Unmarshal(text, &spec); err != nil {
		return err
	}
	spec.Root.Path = filepath.Join(p.dir, "rootfs")
	spec.Linux.CgroupsPath = filepath.Join(p.Cgroup, p.id)
	for i := range spec.Linux.Namespaces {
		if n := &spec.Linux.Namespaces[i]; n.Type == specs.NetworkNamespace {
			n.Path = p.netns.Paths().Net
		}
	}
	if text, err = json.Marshal(&spec); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(p.dir, "config.json"), text, 0o600)
}

func (p *floorPod) do(phase int) error {
	ctx := context.Background()
	switch phase {
	case runPodSandbox:
		return insist(func() error {
			_, err := p.cni.AddNetworkList(ctx, p.plugins, p.attach)
			if err == nil || !interrupted(err) {
				return err
			}
			if left := p.detach(ctx); left != nil {
				return fmt.Errorf("cannot detach a pod whose plugin was interrupted: %w", left)
			}
			return err
		})
	case createContainer:
		return p.runtime("create", "--bundle", p.dir, "--pid-file", filepath.Join(p.dir, "pid"), p.id)
	case startContainer:
		return p.runtime("start", p.id)
	case execSync:
		return p.runtime(append([]string{"exec", p.id}, p.Probe...)...)
	case containerDown:
		return p.kill()
	case podDown:
		return p.detach(ctx)
	}
	return fmt.Errorf("there is no phase %d", phase)
}

func (p *floorPod) detach(ctx context.Context) error {
	return insist(func() error { return p.cni.DelNetworkList(ctx, p.plugins, p.attach) })
}

func (p *floorPod) runtime(args ...string) error {
	cmd := exec.Command(p.Runtime, append([]string{"--root", filepath.Join(p.Dir, "runtime")}, args...)...)
	// Not a pipe: the container would hold it open.
	log, err := os.CreateTemp(p.dir, "log")
	if err != nil {
		return err
	}
	defer func() { log.Close(); _ = os.Remove(log.Name()) }()
	cmd.Stderr = log
	if err := cmd.Run(); err != nil {
		text, _ := os.ReadFile(log.Name())
		return fmt.Errorf("%s %s: %w: %s", p.Runtime, args[0], err, text)
	}
	return nil
}

// kill ends the container and has the runtime delete it.
func (p *floorPod) kill() error {
	text, err := os.ReadFile(filepath.Join(p.dir, "pid"))
	if err != nil {
		return err
	}
	var pid int
	if _, err := fmt.Sscan(string(text), &pid); err != nil {
		return err
	}
	if err := p.runtime("kill", p.id, "KILL"); err != nil {
		return err
	}
	for {
		_, err := unix.Wait4(pid, nil, 0, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("wait for the container: %w", err)
		}
		return p.runtime("delete", p.id)
	}
}

func (p *floorPod) cleanUp() error {
	return errors.Join(ns.Remove(p.netns), unix.Unmount(filepath.Join(p.dir, "rootfs"), 0), os.RemoveAll(p.dir))
}
