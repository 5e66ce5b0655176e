package main

import (
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
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/testkit/kubelet"
	"github.com/crius-run/crius/internal/testkit/node"
	"github.com/crius-run/crius/test/images"
)

// server is any server of CRI, in a node of its own.
type server struct {
	label   string
	node    *node.Node // crius does not run on it if the server is another one
	conn    *grpc.ClientConn
	handler string
	used    accounting
	end     func() error
	shims   shims // containerd's, which end with the node
}

func (s *server) name() string          { return s.label }
func (s *server) cpu() (float64, error) { return s.used.seconds() }

func (s *server) close() error {
	var errs []error
	if s.end != nil {
		errs = append(errs, s.end())
	}
	errs = append(errs, s.node.Close())
	if s.shims.dir != "" {
		errs = append(errs, s.shims.remove())
	}
	return errors.Join(errs...)
}

// pod is a request as a kubelet makes it.
func (s *server) pod(name string) *cri.PodSandboxConfig {
	return kubelet.Pod(name, kubelet.LogsBelow(s.node.Path("logs")), func(c *cri.PodSandboxConfig) {
		c.Linux.CgroupParent = s.node.CgroupParent()
	})
}

// up runs a pod with a container that sleeps.
func (s *server) up(ctx context.Context, name string) (pod, container string, l life, err error) {
	r, config := cri.NewRuntimeServiceClient(s.conn), s.pod(name)
	began := time.Now()
	ran, err := r.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: s.handler})
	if err != nil {
		return "", "", l, err
	}
	run := time.Now()
	c, err := r.CreateContainer(ctx, &cri.CreateContainerRequest{
		PodSandboxId: ran.PodSandboxId, SandboxConfig: config,
		Config: kubelet.Container("c", images.Probe, []string{"sleep"}),
	})
	if err != nil {
		return "", "", l, err
	}
	created := time.Now()
	if _, err := r.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: c.ContainerId}); err != nil {
		return "", "", l, err
	}
	started := time.Now()
	l[runPodSandbox], l[createContainer] = run.Sub(began).Seconds(), created.Sub(run).Seconds()
	l[startContainer], l[podUp] = started.Sub(created).Seconds(), started.Sub(began).Seconds()
	return ran.PodSandboxId, c.ContainerId, l, nil
}

func (s *server) live(ctx context.Context, name string) (life, error) {
	pod, container, l, err := s.up(ctx, name)
	if err != nil {
		return l, err
	}
	r := cri.NewRuntimeServiceClient(s.conn)
	for _, step := range []struct {
		phase int
		do    func() error
	}{
		{execSync, func() error {
			_, err := r.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: container, Cmd: probeCommand, Timeout: 30})
			return err
		}},
		{containerDown, func() error {
			if _, err := r.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: container}); err != nil {
				return err
			}
			_, err := r.RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: container})
			return err
		}},
		{podDown, func() error {
			if _, err := r.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: pod}); err != nil {
				return err
			}
			_, err := r.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: pod})
			return err
		}},
	} {
		began := time.Now()
		if err := step.do(); err != nil {
			return l, fmt.Errorf("%s: %w", phases[step.phase], err)
		}
		l[step.phase] = time.Since(began).Seconds()
	}
	return l, nil
}

// probeCommand is what an exec probe runs: next to nothing.
var probeCommand = []string{"/probe", "exit", "0"}

// newCrius runs crius as an operator would, not as a test does.
func newCrius(ctx context.Context, handler string) (_ *server, err error) {
	n, err := node.New(ctx, node.Options{Config: `log_level = "info"`})
	if err != nil {
		return nil, err
	}
	s := &server{label: "crius", node: n, conn: n.Conn(), handler: handler}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if err := n.Start(ctx); err != nil {
		return nil, err
	}
	return s, s.ready(ctx, n.PID())
}

// ready accounts for the server and gives it the image.
func (s *server) ready(ctx context.Context, pid int) (err error) {
	if s.used, err = newAccounting("/" + s.node.ID); err != nil {
		return err
	}
	if err := s.used.enter(pid); err != nil {
		return err
	}
	built, err := images.Build(nil)
	if err != nil {
		return err
	}
	s.node.Registry.Push("probe", "latest", built)
	_, err = cri.NewImageServiceClient(s.conn).PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: images.Probe}})
	return err
}

const containerdTOML = `version = 2
root = "{{.Path "ctd"}}"
state = "{{.Path "ctdrun"}}"

[grpc]
address = "{{.Path "ctd.sock"}}"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "` + images.Probe + `"
disable_apparmor = true
restrict_oom_score_adj = true

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
	others, err := noteShims(shimSockets, containerdSocket)
	if err != nil {
		return nil, err
	}
	n, err := node.New(ctx, node.Options{})
	if err != nil {
		return nil, err
	}
	s := &server{label: "containerd", node: n, handler: handler, shims: others}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if err := n.Write("containerd.toml", containerdTOML); err != nil {
		return nil, err
	}
	log, err := os.Create(n.Path("containerd.log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command("containerd", "--config", n.Path("containerd.toml"))
	cmd.Stdout, cmd.Stderr = log, log
	if err := n.Do(cmd.Start); err != nil {
		return nil, fmt.Errorf("%w: install Debian's containerd", err)
	}
	s.end = func() error {
		return errors.Join(s.conn.Close(), cmd.Process.Signal(syscall.SIGTERM), ended(cmd.Wait()))
	}
	s.conn, err = grpc.NewClient("unix://"+n.Path("ctd.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	wait, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for { // until its CRI plugin is there
		_, err := cri.NewRuntimeServiceClient(s.conn).Version(wait, &cri.VersionRequest{}, grpc.WaitForReady(true))
		if err == nil {
			break
		}
		if wait.Err() != nil {
			text, _ := os.ReadFile(log.Name())
			return nil, fmt.Errorf("it does not answer: %w\n%s", err, text[max(0, len(text)-2000):])
		}
	}
	return s, s.ready(ctx, cmd.Process.Pid)
}

// ended is no error if a process ended because it was told to.
func ended(err error) error {
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() <= 1 {
		return nil
	}
	return err
}

// bundle is the directory of one of crius's containers.
func (s *server) bundle(container string) string {
	return filepath.Join(s.node.RunRoot(), "containers", container)
}

// lowers are the layers of the root file system of one of crius's containers,
// as the kernel knows them.
func (s *server) lowers(container string) (string, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if fields[4] != filepath.Join(s.bundle(container), "rootfs") {
			continue
		}
		var layers []string
		for option := range strings.SplitSeq(fields[len(fields)-1], ",") {
			if key, layer, _ := strings.Cut(option, "="); key == "lowerdir" || key == "lowerdir+" {
				layers = append(layers, layer)
			}
		}
		return strings.Join(layers, ":"), nil
	}
	return "", fmt.Errorf("container %s has no root file system", container)
}
