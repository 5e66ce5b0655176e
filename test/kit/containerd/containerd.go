// Package containerd runs containerd on a node of package node, in place of
// crius.
package containerd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/tools"
)

// Metrics is the address of containerd's metrics, in its node's network.
const Metrics = "127.0.0.1:1338"

// startLimit is how long containerd may take to answer. With 1000 containers it
// needs more than a minute on a busy machine.
const startLimit = 5 * time.Minute

// A Kind is a containerd with which crius is compared.
type Kind struct {
	Program func(ctx context.Context) (string, error) // its path
	config  string                                    // a template of its containerd.toml
}

// Kinds are a current containerd, which is built once, and Debian's.
var Kinds = map[string]Kind{
	"current": {tools.Containerd, currentTOML},
	"debian":  {func(context.Context) (string, error) { return exec.LookPath("containerd") }, debianTOML},
}

// currentTOML is in the format of containerd 2.
const currentTOML = `version = 3
root = "{{.Path "ctd"}}"
state = "{{.Path "ctdrun"}}"

[grpc]
address = "{{.Path "ctd.sock"}}"

[metrics]
address = "` + Metrics + `"

[plugins."io.containerd.internal.v1.opt"]
path = "{{.Path "ctdopt"}}"

[plugins."io.containerd.nri.v1.nri"]
disable = true

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "` + PauseImage + `"

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
BinaryName = "crun"
`

// currentHosts is the hosts.toml of every registry: only the node's exists.
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
address = "` + Metrics + `"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "` + PauseImage + `"
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
BinaryName = "crun"

[plugins."io.containerd.grpc.v1.cri".registry.mirrors."` + node.RegistryHost + `"]
endpoint = ["http://` + node.RegistryAddress + `"]
`

// Containerd is a containerd on its own node, on which crius does not run. Only
// one goroutine may start and end it.
type Containerd struct {
	*node.Node
	Pause *image.Artifact // what the node's registry serves as PauseImage

	path  string
	shims shims
	conn  *grpc.ClientConn
	cmd   *exec.Cmd // nil while it is not running
}

// PauseImage keeps a containerd pod running, in place of the default one, which
// needs the internet. It is as small.
const PauseImage = node.RegistryHost + "/pause:latest"

const pauseSource = `#include <unistd.h>
int main(void) { for (;;) pause(); }
`

// New makes a node with a containerd, whose network, CNI configuration and
// registry are like those of a node with crius, but does not start it. The
// options are the node's.
func New(ctx context.Context, kind Kind, o node.Options) (_ *Containerd, err error) {
	program, err := kind.Program(ctx)
	if err != nil {
		return nil, err
	}
	others, err := noteShims(shimSockets, machineSocket, program)
	if err != nil {
		return nil, err
	}
	n, err := node.New(ctx, o)
	if err != nil {
		return nil, errors.Join(err, others.remove())
	}
	c := &Containerd{Node: n, path: program, shims: others}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Close())
		}
	}()
	if err := errors.Join(
		n.Write("containerd.toml", kind.config),
		n.Write("ctdhosts/_default/hosts.toml", currentHosts),
	); err != nil {
		return nil, err
	}
	if c.conn, err = node.Connect(c.Socket()); err != nil {
		return nil, err
	}
	if c.Pause, err = buildPause(ctx); err != nil {
		return nil, err
	}
	n.Registry.Push("pause", "latest", c.Pause)
	return c, nil
}

// Socket returns the path at which it serves CRI.
func (c *Containerd) Socket() string { return c.Path("ctd.sock") }

// Conn returns a connection to it, which survives a restart.
func (c *Containerd) Conn() *grpc.ClientConn { return c.conn }

// Close ends it and its node, and removes what it leaves elsewhere.
func (c *Containerd) Close() error {
	errs := []error{c.Stop()}
	if c.conn != nil {
		errs = append(errs, c.conn.Close())
	}
	return errors.Join(append(errs, c.Node.Close(), c.shims.remove(), forgetResults(cniResults, c.Dir))...)
}

// PauseProgram returns the program of the pause image, and builds it if it is
// missing: the machine of `make node-bench` gets it from the host, and has no
// compiler.
func PauseProgram(ctx context.Context) (path string, err error) {
	repo, err := tools.Repository()
	if err != nil {
		return "", err
	}
	path = filepath.Join(repo, ".cache", "testkit", "pause")
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	built := fmt.Sprintf("%s.%d", path, os.Getpid())
	cmd := exec.CommandContext(ctx, "gcc", "-Os", "-s", "-static", "-x", "c", "-o", built, "-")
	cmd.Stdin, cmd.WaitDelay = strings.NewReader(pauseSource), time.Second
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("gcc: %w: %s", err, out)
	}
	return path, os.Rename(built, path)
}

func buildPause(ctx context.Context) (*image.Artifact, error) {
	program, err := PauseProgram(ctx)
	if err != nil {
		return nil, err
	}
	file, err := image.HostFile("pause", program, 0o755)
	if err != nil {
		return nil, err
	}
	layer, err := image.NewLayer(file)
	if err != nil {
		return nil, err
	}
	img := image.Image{Layers: []image.Layer{layer}}
	img.Config.Entrypoint = []string{"/pause"}
	return img.Build()
}

// cniResults is where CNI keeps the results of plugins for containerd, wherever
// containerd has its state.
const cniResults = "/var/lib/cni/results"

// forgetResults removes the results for pods of a node that is gone, if
// containerd could not remove them.
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

// PID returns its pid, 0 while it is not running.
func (c *Containerd) PID() int {
	if c.cmd == nil {
		return 0
	}
	return c.cmd.Process.Pid
}

// Start starts it and returns once it answers.
func (c *Containerd) Start(ctx context.Context) error {
	log, err := os.OpenFile(c.Path("containerd.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(c.path, "--config", c.Path("containerd.toml"))
	cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(c.path)+":"+os.Getenv("PATH")) // its shim
	cmd.Stdout, cmd.Stderr = log, log
	if err := c.Do(cmd.Start); err != nil {
		return fmt.Errorf("start containerd: %w", err)
	}
	c.cmd = cmd
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	for { // until its CRI plugin answers
		_, err := cri.NewRuntimeServiceClient(c.conn).Status(ctx, &cri.StatusRequest{}, grpc.WaitForReady(true))
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			text, _ := os.ReadFile(log.Name())
			return fmt.Errorf("it does not answer: %w\n%s", err, text[max(0, len(text)-2000):])
		}
	}
}

// Stop ends it with SIGTERM.
func (c *Containerd) Stop() error { return c.end(syscall.SIGTERM) }

// Kill ends it with SIGKILL.
func (c *Containerd) Kill() error { return c.end(syscall.SIGKILL) }

// end ignores the error of a program that ended because of the signal.
func (c *Containerd) end(how syscall.Signal) error {
	if c.cmd == nil {
		return nil
	}
	err := c.cmd.Process.Signal(how)
	waited := c.cmd.Wait()
	c.cmd = nil
	if exit, ok := errors.AsType[*exec.ExitError](waited); ok && exit.ExitCode() <= 1 {
		waited = nil
	}
	return errors.Join(err, waited)
}
