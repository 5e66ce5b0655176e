package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/wait"
)

const (
	logs = "/var/log/pods"
	unit = "crius.service"

	// count logs numbers, which shows gaps and restarts.
	count = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.2; done"
	// repeat answers every line of its input.
	repeat = "while read line; do echo heard $line; done"
	// leave exits as soon as a file appears.
	leave = "until [ -e /tmp/leave ]; do sleep 0.1; done; exit 7"
)

// containers are those of every pod, by name.
var containers = map[string]string{
	"count": count, "repeat": repeat, "leave": leave,
	"stop": fmt.Sprintf("trap 'exit %d' TERM; sleep 1000 & wait", stopped),
}

// upgrader upgrades the package of a node on which pods run.
type upgrader struct {
	client
	pods map[string]*upgradedPod // by name
}

// client runs pods through CRI and reports promises about them.
type client struct {
	o       options
	conn    *grpc.ClientConn
	runtime cri.RuntimeServiceClient
	images  cri.ImageServiceClient
	report
}

// connect returns a client of the server; the caller closes its connection.
func connect(o options) (client, error) {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	return client{o, conn, cri.NewRuntimeServiceClient(conn), cri.NewImageServiceClient(conn), report{mode: o.Mode}}, err
}

// upgradedPod is a pod that lives through the upgrade.
type upgradedPod struct {
	config     *cri.PodSandboxConfig
	id         string
	containers map[string]string // name to id
	pids       map[string]string // container name to the pid of its process
	sessions   map[string]*kubelet.Session
}

// upgrade runs pods on the previous package, installs the current one under
// them, restarts the service, and reports which promises were kept.
func upgrade(ctx context.Context, o options) error {
	if err := errors.Join(installPackage("previous.deb"), configure(o, "")); err != nil {
		return err
	}
	c, err := connect(o)
	if err != nil {
		return err
	}
	defer c.conn.Close()
	u := &upgrader{client: c, pods: map[string]*upgradedPod{}}
	before, err := take(o)
	if err != nil {
		return err
	}
	if err := u.startPods(ctx); err != nil {
		return err
	}
	if err := errors.Join(u.installUnderThem(ctx), u.restartUnderThem(ctx), u.removePods(ctx)); err != nil {
		return err
	}
	server := fmt.Sprintf("process: %s /usr/bin/crius serve in cgroup /system.slice/%s", mainPID(), unit) // another one than before
	return errors.Join(u.write(), saveLeftovers(o, append(before, server)))
}

// each reports a promise about every pod.
func (u *upgrader) each(text string, kept func(p *upgradedPod) error) {
	for name, p := range u.pods {
		u.promise(name+" pod: "+text, kept(p))
	}
}

// startPods runs a plain pod and, if the runtime can, one with a user namespace.
func (u *upgrader) startPods(ctx context.Context) error {
	if _, err := u.images.PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: image}}); err != nil {
		return err
	}
	kinds := map[string]func(*cri.PodSandboxConfig){"plain": func(*cri.PodSandboxConfig) {}}
	status, err := u.runtime.Status(ctx, &cri.StatusRequest{})
	if err != nil {
		return err
	}
	if slices.ContainsFunc(status.RuntimeHandlers, func(h *cri.RuntimeHandler) bool {
		return h.Name == u.o.Handler && h.GetFeatures().GetUserNamespaces()
	}) {
		kinds["user namespace"] = func(c *cri.PodSandboxConfig) {
			ids := []*cri.IDMapping{{HostId: 100000, Length: 65536}}
			c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = &cri.UserNamespace{Mode: cri.NamespaceMode_POD, Uids: ids, Gids: ids}
		}
	}
	for name, change := range kinds {
		if u.pods[name], err = u.startPod(ctx, strings.ReplaceAll(name, " ", "-"), change); err != nil {
			return fmt.Errorf("%s pod: %w", name, err)
		}
	}
	return nil
}

func (u *upgrader) startPod(ctx context.Context, name string, change func(*cri.PodSandboxConfig)) (*upgradedPod, error) {
	id, config, err := u.runPod(ctx, name, change)
	if err != nil {
		return nil, err
	}
	p := &upgradedPod{config: config, id: id, containers: map[string]string{}, pids: map[string]string{}, sessions: map[string]*kubelet.Session{}}
	for name, script := range containers {
		if p.containers[name], err = u.startContainer(ctx, id, config, name, script); err != nil {
			return nil, fmt.Errorf("container %s: %w", name, err)
		}
		if p.pids[name], err = u.pid(ctx, p.containers[name]); err != nil {
			return nil, err
		}
	}
	return p, u.openSessions(ctx, p)
}

// runPod makes a pod without containers.
func (c *client) runPod(ctx context.Context, name string, change ...func(*cri.PodSandboxConfig)) (id string, config *cri.PodSandboxConfig, err error) {
	change = append([]func(*cri.PodSandboxConfig){func(p *cri.PodSandboxConfig) { p.Linux.CgroupParent = c.o.parent() }, kubelet.LogsBelow(logs)}, change...)
	config = kubelet.Pod(name, change...)
	sandbox, err := c.runtime.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: c.o.Handler})
	return sandbox.GetPodSandboxId(), config, err
}

// startContainer runs a script in a container of a pod.
func (c *client) startContainer(ctx context.Context, pod string, in *cri.PodSandboxConfig, name, script string) (id string, err error) {
	config := kubelet.Container(name, image, nil, func(c *cri.ContainerConfig) {
		c.Command, c.Stdin = []string{"sh", "-c", script}, true
		c.Linux.SecurityContext.NamespaceOptions = in.Linux.SecurityContext.NamespaceOptions
	})
	created, err := c.runtime.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: config, SandboxConfig: in})
	if err != nil {
		return "", err
	}
	_, err = c.runtime.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: created.ContainerId})
	return created.ContainerId, err
}

// openSessions attaches to one container and runs a command in another.
func (u *upgrader) openSessions(ctx context.Context, p *upgradedPod) error {
	attach, err := u.runtime.Attach(ctx, &cri.AttachRequest{ContainerId: p.containers["repeat"], Stdin: true, Stdout: true})
	if err != nil {
		return err
	}
	exec, err := u.runtime.Exec(ctx, &cri.ExecRequest{ContainerId: p.containers["count"], Cmd: []string{"sh", "-c", repeat}, Stdin: true, Stdout: true})
	if err != nil {
		return err
	}
	wants := kubelet.Wants{Stdin: true, Stdout: true}
	p.sessions["attach"] = kubelet.Streams{}.Open(ctx, attach.Url, wants)
	p.sessions["exec"] = kubelet.Streams{WebSocket: true}.Open(ctx, exec.Url, wants)
	return p.sessionsAnswer("before")
}

// sessionsAnswer types a word into each session and waits for the answer.
func (p *upgradedPod) sessionsAnswer(word string) error {
	for kind, s := range p.sessions {
		if err := s.Type(word + "\n"); err != nil {
			return fmt.Errorf("%s: %w", kind, err)
		}
		if !wait.Until(context.Background(), func() bool { return strings.Contains(s.Stdout.String(), "heard "+word+"\n") }) {
			return fmt.Errorf("%s: no answer to %q, only %q", kind, word, s.Stdout.String())
		}
	}
	return nil
}

// installUnderThem installs the current package. It must not affect the server.
func (u *upgrader) installUnderThem(ctx context.Context) error {
	server, before := mainPID(), modes()
	if err := installPackage("crius.deb"); err != nil {
		return err
	}
	u.promise("the package does not restart the server", same(mainPID(), server))
	u.promise("the package leaves modes and owners of directories and sockets", same(modes(), before))
	u.each("exec and attach go on after the package is installed", func(p *upgradedPod) error { return p.sessionsAnswer("installed") })
	u.each("the previous server runs another container", func(p *upgradedPod) error { return u.another(ctx, p, "before-restart") })
	return nil
}

// restartUnderThem restarts the service with the current version while a
// container exits.
func (u *upgrader) restartUnderThem(ctx context.Context) error {
	old, err := u.runtime.Version(ctx, &cri.VersionRequest{})
	if err != nil {
		return err
	}
	if err := command("systemctl", "stop", unit); err != nil {
		return err
	}
	for _, p := range u.pods {
		file := filepath.Join("/proc", p.pids["leave"], "root/tmp/leave")
		if err := os.WriteFile(file, nil, 0o666); err != nil {
			return err
		}
		u.promise("a container exits without a server", gone(p.pids["leave"]))
	}
	if err := command("systemctl", "start", unit); err != nil {
		return err
	}
	current, err := u.runtime.Version(ctx, &cri.VersionRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return err
	}
	u.promise("the current version is in force", different(current.RuntimeVersion, old.RuntimeVersion))
	u.each("processes and states are the same", func(p *upgradedPod) error { return u.unchanged(ctx, p) })
	u.each("the exit code of a container that exited meanwhile is known", func(p *upgradedPod) error {
		return u.exited(ctx, p.containers["leave"], 7)
	})
	u.each("sessions with the previous server have ended", func(p *upgradedPod) error {
		for kind, s := range p.sessions {
			if !wait.Until(ctx, func() bool { return isClosed(s.Done()) }) {
				return fmt.Errorf("%s goes on", kind)
			}
		}
		return nil
	})
	u.each("exec and attach can be begun again", func(p *upgradedPod) error { return u.openSessions(ctx, p) })
	u.each("the current server runs another container", func(p *upgradedPod) error { return u.another(ctx, p, "after-restart") })
	u.each("the log has no gap", func(p *upgradedPod) error { return p.counts() })
	u.each("the stop signal arrives", func(p *upgradedPod) error {
		_, err := u.runtime.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: p.containers["stop"], Timeout: 60})
		return errors.Join(err, u.exited(ctx, p.containers["stop"], stopped))
	})
	return nil
}

// another runs one more container in a pod, and a command in it.
func (u *upgrader) another(ctx context.Context, p *upgradedPod, name string) error {
	id, err := u.startContainer(ctx, p.id, p.config, name, "sleep 1000")
	if err != nil {
		return err
	}
	answer, err := u.runtime.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"echo", "here"}, Timeout: 60})
	if err != nil {
		return err
	}
	return same(string(answer.Stdout), "here\n")
}

// unchanged checks that the pod and its containers are as they were.
func (u *upgrader) unchanged(ctx context.Context, p *upgradedPod) error {
	status, err := u.runtime.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: p.id})
	if err != nil {
		return err
	}
	errs := []error{same(status.Status.State, cri.PodSandboxState_SANDBOX_READY)}
	for name, id := range p.containers {
		if name == "leave" {
			continue
		}
		pid, err := u.pid(ctx, id)
		errs = append(errs, err, same(name+" "+pid, name+" "+p.pids[name]))
	}
	return errors.Join(errs...)
}

// pid returns the pid of a running container's process on the node.
func (c *client) pid(ctx context.Context, id string) (string, error) {
	r, err := c.runtime.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: id, Verbose: true})
	if err != nil {
		return "", err
	}
	if err := same(r.Status.State, cri.ContainerState_CONTAINER_RUNNING); err != nil {
		return "", err
	}
	var info struct{ PID int }
	if err := json.Unmarshal([]byte(r.Info["info"]), &info); err != nil || info.PID == 0 {
		return "", fmt.Errorf("no pid in %q: %w", r.Info["info"], err)
	}
	return strconv.Itoa(info.PID), nil
}

// exited checks that a container has exited with a code.
func (c *client) exited(ctx context.Context, id string, code int32) error {
	var status *cri.ContainerStatus
	var err error
	wait.Until(ctx, func() bool {
		var r *cri.ContainerStatusResponse
		r, err = c.runtime.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: id})
		status = r.GetStatus()
		return err != nil || status.State == cri.ContainerState_CONTAINER_EXITED
	})
	if err != nil {
		return err
	}
	return same(fmt.Sprint(status.State, " ", status.ExitCode), fmt.Sprint(cri.ContainerState_CONTAINER_EXITED, " ", code))
}

// counts checks that the log contains each number once, and continues.
func (p *upgradedPod) counts() error {
	first, err := counts(filepath.Join(p.config.LogDirectory, "count", "0.log"))
	return errors.Join(err, same(first, 1))
}

// counts checks that a log contains each number from its first one on once, and
// continues.
func counts(file string) (first int, err error) {
	lines := func() ([]string, error) {
		records, err := kubelet.ReadLog(file)
		return strings.Fields(kubelet.Text(records, "stdout")), err
	}
	all, err := lines()
	if err != nil {
		return 0, err
	}
	if !wait.Until(context.Background(), func() bool { now, err := lines(); return err == nil && len(now) > len(all)+1 }) {
		return 0, fmt.Errorf("no more after %d numbers", len(all))
	}
	if all, err = lines(); err != nil {
		return 0, err
	}
	return consecutive(all)
}

// consecutive checks that each number follows the one before it.
func consecutive(numbers []string) (first int, err error) {
	if first, err = strconv.Atoi(numbers[0]); err != nil {
		return 0, err
	}
	for i, number := range numbers {
		if number != strconv.Itoa(first+i) {
			return 0, fmt.Errorf("number %d after %d is %q", i, first, number)
		}
	}
	return first, nil
}

func (u *upgrader) removePods(ctx context.Context) error {
	for _, p := range u.pods {
		if _, err := u.runtime.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.id}); err != nil {
			return err
		}
		if err := os.RemoveAll(p.config.LogDirectory); err != nil {
			return err
		}
	}
	_, err := u.images.RemoveImage(ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: image}})
	return err
}

// mainPID returns the server's pid, from systemd.
func mainPID() string {
	out, err := exec.Command("systemctl", "show", "--value", "--property=MainPID", unit).Output()
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(out))
}

// modes returns mode and owner of what the package and the server both make.
func modes() string {
	var all strings.Builder
	for _, path := range []string{"/run/crius", "/run/crius/containers", "/run/crius/pods", socket, "/var/lib/crius", "/etc/crius", "/etc/crius/crius.toml.d"} {
		out, err := exec.Command("stat", "--format=%n %A %U:%G", path).CombinedOutput()
		fmt.Fprint(&all, string(out))
		if err != nil {
			fmt.Fprintln(&all, err)
		}
	}
	return all.String()
}

// gone checks that a process ends.
func gone(pid string) error {
	if !wait.Until(context.Background(), func() bool { _, err := os.Stat("/proc/" + pid); return errors.Is(err, fs.ErrNotExist) }) {
		return fmt.Errorf("process %s goes on", pid)
	}
	return nil
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func same[T comparable](got, want T) error {
	if got != want {
		return fmt.Errorf("got %v, want %v", got, want)
	}
	return nil
}

func different[T comparable](got, old T) error {
	if got == old {
		return fmt.Errorf("got %v, as before", got)
	}
	return nil
}
