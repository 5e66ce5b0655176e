package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/kubelet"
)

// loadPolicy is the context of the process that installs the package's module.
// It may not write into the pipe from which this program reads dpkg's output.
const loadPolicy = "system_u:system_r:load_policy_t:s0"

// SELinux's directories.
const (
	seLinuxEnforce = "/sys/fs/selinux/enforce"
	auditLog       = "/var/log/audit/audit.log"
	labelAttribute = "security.selinux"
)

// enforcing reports whether the kernel enforces an SELinux policy.
func enforcing() bool {
	mode, err := os.ReadFile(seLinuxEnforce)
	return err == nil && strings.TrimSpace(string(mode)) == "1"
}

// seLinuxPromises checks crius's promises for a node where SELinux enforces,
// with each handler, and the denials: only what a pod was made for that tries
// to reach another one's files. It returns what is wrong.
func seLinuxPromises(ctx context.Context) (wrong []string, err error) {
	if _, err := os.Stat(seLinuxEnforce); err != nil {
		return nil, nil
	}
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	s := &seLinuxNode{strangers: []string{loadPolicy}, runtime: cri.NewRuntimeServiceClient(conn), images: cri.NewImageServiceClient(conn)}
	if !enforcing() {
		s.wrong = append(s.wrong, "SELinux does not enforce")
	}
	if _, err := s.images.PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: image}}); err != nil {
		return nil, err
	}
	status, err := s.runtime.Status(ctx, &cri.StatusRequest{})
	if err != nil {
		return nil, err
	}
	for _, h := range status.RuntimeHandlers {
		if h.Name == "runc" || h.Name == "crun" {
			s.handler = h.Name
			s.look(ctx, h.GetFeatures().GetUserNamespaces())
		}
	}
	return append(s.wrong, s.denials()...), nil
}

// seLinuxNode is a node whose promises are checked.
type seLinuxNode struct {
	runtime   cri.RuntimeServiceClient
	images    cri.ImageServiceClient
	handler   string
	strangers []string // contexts of processes that try forbidden accesses
	wrong     []string
}

// labelled is a pod with one container, and the container's context.
type labelled struct{ pod, container, context string }

func (s *seLinuxNode) fault(about string, err error) {
	if err != nil {
		s.wrong = append(s.wrong, fmt.Sprintf("%s: %s: %v", s.handler, about, err))
	}
	fmt.Println("selinux:", s.handler+":", about+":", err)
}

// look checks one handler.
func (s *seLinuxNode) look(ctx context.Context, userNamespaces bool) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Minute)
	defer cancel()
	volume := filepath.Join("/var/lib/volumes", s.handler)
	s.fault("volume", errors.Join(os.MkdirAll(volume, 0o777), os.Chmod(volume, 0o777)))
	mount := func(relabel bool) func(*cri.ContainerConfig) {
		return func(c *cri.ContainerConfig) {
			c.Mounts = append(c.Mounts, &cri.Mount{HostPath: volume, ContainerPath: "/volume", SelinuxRelabel: relabel})
		}
	}
	imageVolume := func(c *cri.ContainerConfig) {
		c.Mounts = append(c.Mounts, &cri.Mount{Image: &cri.ImageSpec{Image: image}, ContainerPath: "/image", Readonly: true})
	}
	own, ok := s.start(ctx, "own", nil, mount(true), imageVolume)
	if ok {
		s.expect(ctx, own, "a plain container is confined", "cat /proc/1/attr/current", ":container_t:s0:c")
		s.expect(ctx, own, "exec has the container's context", "cat /proc/self/attr/current", own.context)
		s.expect(ctx, own, "/dev/shm can be written", "echo x >/dev/shm/file && cat /dev/shm/file", "x")
		s.expect(ctx, own, "the root file system can be written", "echo x >/file && cat /file", "x")
		s.expect(ctx, own, "files of the pod can be read", "cat /etc/resolv.conf /etc/hostname", "own")
		s.expect(ctx, own, "a relabelled volume can be written", "echo secret >/volume/file && cat /volume/file", "secret")
		s.expect(ctx, own, "an image volume can be read and executed", "/image/bin/busybox echo hello", "hello")
		s.fault("the volume has the container's level", sameLevel(volume, own.context))
		s.fault("what the container made has its level", sameLevel(filepath.Join(volume, "file"), own.context))
	}
	if stranger, started := s.start(ctx, "stranger", nil, mount(false)); started {
		s.strangers = append(s.strangers, stranger.context)
		s.fault("pods have levels of their own", differentLevels(stranger.context, own.context))
		s.expect(ctx, stranger, "another pod cannot read the volume", "cat /volume/file 2>&1; true", "ermission denied")
		s.expect(ctx, stranger, "another pod cannot write the volume", "touch /volume/other 2>&1; true", "ermission denied")
		s.remove(ctx, stranger)
	}
	privileged := func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.Privileged = true }
	if p, started := s.start(ctx, "privileged", privileged, func(c *cri.ContainerConfig) { c.Linux.SecurityContext.Privileged = true }, mount(false), hostPaths); started {
		s.expect(ctx, p, "a privileged container is spc_t", "cat /proc/self/attr/current", ":spc_t:")
		s.expect(ctx, p, "a privileged container reads any volume", "cat /volume/file", "secret")
		s.expect(ctx, p, "files, sockets and devices of the node can be volumes", "cat /host/etc/hostname && test -S /host/socket && test -c /host/null && echo there", "there")
		s.remove(ctx, p)
	}
	if p, started := s.start(ctx, "host-network", kubelet.HostNetwork); started {
		s.expect(ctx, p, "a container on the node's network is spc_t", "cat /proc/self/attr/current", ":spc_t:")
		s.remove(ctx, p)
	}
	shared := func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_POD }
	if p, started := s.start(ctx, "shared-pid", shared, func(c *cri.ContainerConfig) {
		c.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_POD
	}); started {
		s.expect(ctx, p, "the infra container has the pod's context", "cat /proc/1/attr/current", p.context)
		s.remove(ctx, p)
	}
	chosen := &cri.SELinuxOption{Level: "s0:c5,c6"}
	if p, started := s.start(ctx, "chosen", func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.SelinuxOptions = chosen },
		func(c *cri.ContainerConfig) { c.Linux.SecurityContext.SelinuxOptions = chosen }); started {
		s.expect(ctx, p, "a pod gets the level that it asks for", "cat /proc/self/attr/current", ":container_t:s0:c5,c6")
		s.expect(ctx, p, "it reads its files", "cat /etc/resolv.conf /etc/hostname", "chosen")
		s.remove(ctx, p)
	}
	nonsense := func(c *cri.PodSandboxConfig) {
		c.Linux.SecurityContext.SelinuxOptions = &cri.SELinuxOption{Level: "s0,c4,c5"}
	}
	_, err := s.try(ctx, "nonsense", nonsense, nil)
	if status.Code(err) != codes.InvalidArgument {
		s.fault("a level that the policy does not have is refused", fmt.Errorf("with %w", err))
	}
	if userNamespaces {
		ids := []*cri.IDMapping{{HostId: 100000, Length: 65536}}
		options := &cri.UserNamespace{Mode: cri.NamespaceMode_POD, Uids: ids, Gids: ids}
		if p, started := s.start(ctx, "user-namespace", func(c *cri.PodSandboxConfig) {
			c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = options
		}, func(c *cri.ContainerConfig) { c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = options }, imageVolume); started {
			s.expect(ctx, p, "a container in a user namespace is confined", "cat /proc/self/attr/current", ":container_t:s0:c")
			s.expect(ctx, p, "it has user IDs of its own", "cat /proc/self/uid_map", "100000")
			s.expect(ctx, p, "it writes its files", "echo x >/dev/shm/file && echo x >/file && cat /etc/resolv.conf /etc/hostname", "user-namespace")
			s.expect(ctx, p, "it executes an image volume", "/image/bin/busybox echo hello", "hello")
			s.remove(ctx, p)
		}
	} else {
		fmt.Println("selinux:", s.handler+": has no user namespaces")
	}
	if ok {
		s.remove(ctx, own)
	}
}

// hostPaths adds the typical volumes of node agents.
func hostPaths(c *cri.ContainerConfig) {
	for container, host := range map[string]string{
		"/host/etc": "/etc", "/host/log": "/var/log", "/host/shm": "/dev/shm", "/host/socket": "/run/dbus/system_bus_socket", "/host/null": "/dev/null",
	} {
		c.Mounts = append(c.Mounts, &cri.Mount{HostPath: host, ContainerPath: container})
	}
}

// start starts a pod with a container that waits to be stopped.
func (s *seLinuxNode) start(ctx context.Context, name string, pod func(*cri.PodSandboxConfig), container ...func(*cri.ContainerConfig)) (labelled, bool) {
	p, err := s.try(ctx, name, pod, container)
	s.fault("a pod starts: "+name, err)
	return p, err == nil
}

func (s *seLinuxNode) try(ctx context.Context, name string, change func(*cri.PodSandboxConfig), changes []func(*cri.ContainerConfig)) (labelled, error) {
	pod := kubelet.Pod(name, kubelet.LogsBelow(logs))
	if change != nil {
		change(pod)
	}
	sandbox, err := s.runtime.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: pod, RuntimeHandler: s.handler})
	if err != nil {
		return labelled{}, err
	}
	p := labelled{pod: sandbox.PodSandboxId}
	config := kubelet.Container(name, image, nil, func(c *cri.ContainerConfig) {
		c.Command = []string{"sh", "-c", fmt.Sprintf("echo started; trap 'exit %d' TERM; sleep 1000 & wait", stopped)}
	})
	for _, f := range changes {
		f(config)
	}
	created, err := s.runtime.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: p.pod, Config: config, SandboxConfig: pod})
	if err == nil {
		p.container = created.ContainerId
		_, err = s.runtime.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: p.container})
	}
	if err == nil {
		p.context, err = s.exec(ctx, p, "cat /proc/1/attr/current")
		p.context = strings.Trim(p.context, "\x00\n")
	}
	if err != nil {
		_, removed := s.runtime.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.pod})
		err = errors.Join(err, removed)
	}
	return p, err
}

func (s *seLinuxNode) exec(ctx context.Context, p labelled, script string) (string, error) {
	answer, err := s.runtime.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: p.container, Cmd: []string{"sh", "-c", script}, Timeout: 120})
	if err != nil {
		return "", err
	}
	output := string(answer.Stdout) + string(answer.Stderr)
	if answer.ExitCode != 0 {
		return output, fmt.Errorf("exit code %d: %s", answer.ExitCode, output)
	}
	return output, nil
}

// expect runs a script that must succeed and whose output must contain
// something.
func (s *seLinuxNode) expect(ctx context.Context, p labelled, about, script, want string) {
	output, err := s.exec(ctx, p, script)
	if err == nil && !strings.Contains(output, want) {
		err = fmt.Errorf("%q, want %q", output, want)
	}
	s.fault(about, err)
}

// remove stops a container by its signal, and removes it with its pod.
func (s *seLinuxNode) remove(ctx context.Context, p labelled) {
	_, err := s.runtime.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: p.container, Timeout: 120})
	if err == nil {
		var status *cri.ContainerStatusResponse
		if status, err = s.runtime.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: p.container}); err == nil && status.Status.ExitCode != stopped {
			err = fmt.Errorf("exit code %d, want %d", status.Status.ExitCode, stopped)
		}
	}
	_, removed := s.runtime.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.pod})
	s.fault("stop and remove", errors.Join(err, removed))
}

// level returns the level of a context, user:role:type:level.
func level(context string) string {
	if parts := strings.SplitN(context, ":", 4); len(parts) == 4 {
		return parts[3]
	}
	return ""
}

func differentLevels(a, b string) error {
	if level(a) == level(b) {
		return fmt.Errorf("both are %s", a)
	}
	return nil
}

// sameLevel checks that a file has the label of container files at the level of
// a process.
func sameLevel(path, process string) error {
	out, err := exec.Command("stat", "--format=%C", path).Output()
	if label := strings.TrimSpace(string(out)); err == nil && (!strings.Contains(label, ":container_file_t:") || level(label) != level(process)) {
		err = fmt.Errorf("it has %s, the container %s", label, process)
	}
	return err
}
