package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/tools"
)

// containerdMetrics is where it tells them, in its node's network.
const containerdMetrics = "127.0.0.1:1338"

// containerdTime is how long it may take until it answers. Beside 1000 containers
// it needs more than a minute on a busy machine.
const containerdTime = 5 * time.Minute

// A containerdKind is a containerd that crius is measured beside.
type containerdKind struct {
	program func(ctx context.Context) (string, error)
	config  string // a template of its containerd.toml
}

// containerdKinds are what the flag -containerd chooses from.
var containerdKinds = map[string]containerdKind{
	"current": {tools.Containerd, currentTOML},
	"debian":  {func(context.Context) (string, error) { return "/usr/bin/containerd", nil }, debianTOML},
}

// peer is the one that this run measures.
var peer = containerdKinds["current"]

// peerOf is the peer for a handler, and its name in tables. Debian's crun does not take
// the version of the runtime specification that a current containerd writes.
func peerOf(handler string) (kind containerdKind, name string) {
	if handler == "crun" {
		return containerdKinds["debian"], "containerd (Debian's)"
	}
	return peer, "containerd"
}

// currentTOML is in the format of containerd 2.
const currentTOML = `version = 3
root = "{{.Path "ctd"}}"
state = "{{.Path "ctdrun"}}"

[grpc]
address = "{{.Path "ctd.sock"}}"

[metrics]
address = "` + containerdMetrics + `"

[plugins."io.containerd.internal.v1.opt"]
path = "{{.Path "ctdopt"}}"

[plugins."io.containerd.nri.v1.nri"]
disable = true

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "` + pauseImage + `"

[plugins."io.containerd.cri.v1.images".registry]
config_path = "{{.Path "ctdhosts"}}"

[plugins."io.containerd.cri.v1.runtime"]
disable_apparmor = true
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["/usr/lib/cni"]
conf_dir = "{{.Path "cni" "net.d"}}"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.crun]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.crun.options]
BinaryName = "/usr/bin/crun"
`

// currentHosts is the hosts.toml of the node's registry.
const currentHosts = `server = "http://` + node.RegistryAddress + `"

[host."http://` + node.RegistryAddress + `"]
capabilities = ["pull", "resolve"]
`

// debianTOML is in the format of containerd 1.
const debianTOML = `version = 2
root = "{{.Path "ctd"}}"
state = "{{.Path "ctdrun"}}"

[grpc]
address = "{{.Path "ctd.sock"}}"

[metrics]
address = "` + containerdMetrics + `"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "` + pauseImage + `"
disable_apparmor = true
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{{.Path "cni" "net.d"}}"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.crun]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.crun.options]
BinaryName = "/usr/bin/crun"

[plugins."io.containerd.grpc.v1.cri".registry.mirrors."` + node.RegistryHost + `"]
endpoint = ["http://` + node.RegistryAddress + `"]
`

// newContainerd runs the peer in a node of its own: network, CNI configuration and
// registry are those that crius has in another one.
func newContainerd(ctx context.Context, handler string) (_ *server, err error) {
	kind, label := peerOf(handler)
	program, err := kind.program(ctx)
	if err != nil {
		return nil, err
	}
	others, err := noteShims(shimSockets, containerdSocket, program)
	if err != nil {
		return nil, err
	}
	n, err := node.New(ctx, node.Options{})
	if err != nil {
		return nil, err
	}
	s := newServer(label, n, handler)
	s.shims = others
	s.metrics = func(ctx context.Context) (string, error) { return n.Get(ctx, containerdMetrics, "/v1/metrics") }
	daemon := &containerd{node: n, path: program}
	s.program = daemon
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if err := errors.Join(
		n.Write("containerd.toml", kind.config),
		n.Write(filepath.Join("ctdhosts", node.RegistryHost, "hosts.toml"), currentHosts),
	); err != nil {
		return nil, err
	}
	if s.conn, err = node.Connect(n.Path("ctd.sock")); err != nil {
		return nil, err
	}
	daemon.conn = s.conn
	pause, err := buildPause(ctx, n.Path("tmp"))
	if err != nil {
		return nil, err
	}
	n.Registry.Push("pause", "latest", pause)
	if err := s.start(ctx); err != nil {
		return nil, err
	}
	return s, s.pull(ctx, pauseImage, pause)
}

// cniResults is where the plugins' results are kept that containerd has asked for,
// wherever it has its state.
const cniResults = "/var/lib/cni/results"

// forgetResults removes those of the pods of a node, which is no more, that
// containerd could not remove.
func forgetResults(results, nodeDir string) error {
	files, err := filepath.Glob(filepath.Join(results, "*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err == nil && bytes.Contains(text, []byte(nodeDir+"/")) { // its network namespace
			errs = append(errs, os.Remove(file))
		}
	}
	return errors.Join(errs...)
}

// containerd is the program. Only one goroutine may start and end it.
type containerd struct {
	node *node.Node
	path string
	conn *grpc.ClientConn
	cmd  *exec.Cmd // nil while it does not run
}

func (d *containerd) PID() int {
	if d.cmd == nil {
		return 0
	}
	return d.cmd.Process.Pid
}

func (d *containerd) Start(ctx context.Context) error {
	log, err := os.OpenFile(d.node.Path("containerd.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(d.path, "--config", d.node.Path("containerd.toml"))
	cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(d.path)+":"+os.Getenv("PATH")) // its shim
	cmd.Stdout, cmd.Stderr = log, log
	if err := d.node.Do(cmd.Start); err != nil {
		return fmt.Errorf("start containerd: %w", err)
	}
	d.cmd = cmd
	ctx, cancel := context.WithTimeout(ctx, containerdTime)
	defer cancel()
	for { // until its CRI plugin is there
		_, err := cri.NewRuntimeServiceClient(d.conn).Status(ctx, &cri.StatusRequest{}, grpc.WaitForReady(true))
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			text, _ := os.ReadFile(log.Name())
			return fmt.Errorf("it does not answer: %w\n%s", err, text[max(0, len(text)-2000):])
		}
	}
}

func (d *containerd) Stop() error { return d.end(syscall.SIGTERM) }
func (d *containerd) Kill() error { return d.end(syscall.SIGKILL) }

// end is no error if the program ended because it was told to.
func (d *containerd) end(how syscall.Signal) error {
	if d.cmd == nil {
		return nil
	}
	err := d.cmd.Process.Signal(how)
	waited := d.cmd.Wait()
	d.cmd = nil
	if exit, ok := errors.AsType[*exec.ExitError](waited); ok && exit.ExitCode() <= 1 {
		waited = nil
	}
	return errors.Join(err, waited)
}
