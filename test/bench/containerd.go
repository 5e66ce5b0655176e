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
)

// containerdMetrics is where it tells them, in its node's network.
const containerdMetrics = "127.0.0.1:1338"

// containerdTime is how long it may take until it answers. Beside 1000 containers
// it needs more than a minute on a busy machine.
const containerdTime = 5 * time.Minute

const containerdTOML = `version = 2
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

// newContainerd runs Debian's containerd in a node of its own: network, CNI
// configuration and registry are those that crius has in another one.
func newContainerd(ctx context.Context, handler string) (_ *server, err error) {
	others, err := noteShims(shimSockets, containerdSocket, containerdProgram)
	if err != nil {
		return nil, err
	}
	n, err := node.New(ctx, node.Options{})
	if err != nil {
		return nil, err
	}
	s := newServer("containerd", n, handler)
	s.shims = others
	s.metrics = func(ctx context.Context) (string, error) { return n.Get(ctx, containerdMetrics, "/v1/metrics") }
	daemon := &containerd{node: n}
	s.program = daemon
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if err := n.Write("containerd.toml", containerdTOML); err != nil {
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
	cmd := exec.Command(containerdProgram, "--config", d.node.Path("containerd.toml"))
	cmd.Stdout, cmd.Stderr = log, log
	if err := d.node.Do(cmd.Start); err != nil {
		return fmt.Errorf("%w: install Debian's containerd", err)
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
