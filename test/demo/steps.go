package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

const greeting = "Hello from a pod run by crius!"

// demo is the state that one step leaves for the next.
type demo struct {
	handler     string
	node        *node.Node
	empty       *inventory.Snapshot // before the first pod
	pod         *cri.PodSandboxConfig
	podID, ip   string
	web, client string // container ids
	before      []proto.Message
}

func (d *demo) makeNode(ctx context.Context) (string, error) {
	n, err := node.New(ctx, node.Options{Runtimes: []string{d.handler}})
	if err != nil {
		return "", err
	}
	d.node = n
	return fmt.Sprintf("everything lies below %s; its network is a namespace of its own", n.Dir), nil
}

func (d *demo) serveImage(context.Context) (string, error) {
	built, err := images.Build(nil)
	if err != nil {
		return "", err
	}
	d.node.Registry.Push("probe", "latest", built)
	size := 0
	for _, blob := range built.Blobs {
		size += len(blob)
	}
	return fmt.Sprintf("%s, %.1f MB compressed, at %s\n%s", images.Probe, float64(size)/1e6, d.node.Registry.Addr(), built.Digest()), nil
}

func (d *demo) start(ctx context.Context) (string, error) {
	if err := d.node.Start(ctx); err != nil {
		return "", err
	}
	v, err := d.node.Runtime().Version(ctx, &cri.VersionRequest{})
	if err != nil {
		return "", err
	}
	s, err := d.node.Runtime().Status(ctx, &cri.StatusRequest{})
	if err != nil {
		return "", err
	}
	said := fmt.Sprintf("%s %s serves CRI %s on %s", v.RuntimeName, v.RuntimeVersion, v.RuntimeApiVersion, d.node.Socket())
	for _, c := range s.Status.Conditions {
		said += fmt.Sprintf("\n%s: %v %s", c.Type, c.Status, c.Message)
		if !c.Status && (c.Type == "RuntimeReady" || c.Type == "NetworkReady") {
			return said, fmt.Errorf("%s is false: %s", c.Type, c.Message)
		}
	}
	d.empty, err = d.node.Stock(ctx)
	return said, err
}

func (d *demo) pull(ctx context.Context) (string, error) {
	resp, err := d.node.Images().PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: images.Probe}})
	if err != nil {
		return "", err
	}
	return "image " + resp.ImageRef, nil
}

func (d *demo) runPod(ctx context.Context) (string, error) {
	d.pod = kubelet.Pod("demo", kubelet.LogsBelow(d.node.Path("logs")))
	resp, err := d.node.Runtime().RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: d.pod, RuntimeHandler: d.handler})
	if err != nil {
		return "", err
	}
	d.podID = resp.PodSandboxId
	s, err := d.node.Runtime().PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: d.podID})
	if err != nil {
		return "", err
	}
	d.ip = s.Status.Network.GetIp()
	if d.ip == "" {
		return "", errors.New("the pod has no address")
	}
	said := fmt.Sprintf("pod %s\naddress %s", d.podID, d.ip)
	for _, more := range s.Status.Network.AdditionalIps {
		said += " and " + more.Ip
	}
	return said, nil
}

func (d *demo) startWeb(ctx context.Context) (_ string, err error) {
	d.web, err = d.startContainer(ctx, "web", "serve", ":8080", greeting)
	return "container " + d.web, err
}

func (d *demo) startClient(ctx context.Context) (_ string, err error) {
	d.client, err = d.startContainer(ctx, "client", "get", "http://127.0.0.1:8080/", ";", "sleep")
	return "container " + d.client, err
}

func (d *demo) startContainer(ctx context.Context, name string, args ...string) (string, error) {
	resp, err := d.node.Runtime().CreateContainer(ctx, &cri.CreateContainerRequest{
		PodSandboxId: d.podID, SandboxConfig: d.pod, Config: kubelet.Container(name, images.Probe, args),
	})
	if err != nil {
		return "", err
	}
	_, err = d.node.Runtime().StartContainer(ctx, &cri.StartContainerRequest{ContainerId: resp.ContainerId})
	return resp.ContainerId, err
}

func (d *demo) ask(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, wait.Limit)
	defer cancel()
	answer, err := d.node.Get(ctx, d.ip+":8080", "/")
	if err == nil && strings.TrimSpace(answer) != greeting {
		err = fmt.Errorf("the answer is %q", answer)
	}
	return answer, err
}

func (d *demo) logs(ctx context.Context) (string, error) {
	file := filepath.Join(d.pod.LogDirectory, "client", "0.log")
	var records []kubelet.LogRecord
	var err error
	answered := wait.Until(ctx, func() bool { // the client may still be waiting for the web server
		records, err = kubelet.ReadLog(file)
		return err != nil && !errors.Is(err, kubelet.ErrUnfinished) ||
			strings.Contains(kubelet.Text(records, "stdout"), greeting)
	})
	if err != nil && !errors.Is(err, kubelet.ErrUnfinished) {
		return "", err
	}
	if !answered {
		return "", errors.New("the client got no answer from the web server")
	}
	var said strings.Builder
	for _, name := range []string{"web", "client"} {
		data, err := os.ReadFile(filepath.Join(d.pod.LogDirectory, name, "0.log"))
		if err != nil {
			return "", err
		}
		fmt.Fprintf(&said, "%s:\n%s", name, data)
	}
	return said.String(), nil
}

func (d *demo) exec(ctx context.Context) (string, error) {
	resp, err := d.node.Runtime().ExecSync(ctx, &cri.ExecSyncRequest{
		ContainerId: d.client, Cmd: []string{"/probe", "ls", "/"},
	})
	if err != nil {
		return "", err
	}
	if resp.ExitCode != 0 {
		return "", fmt.Errorf("ls / ended with code %d: %s", resp.ExitCode, resp.Stderr)
	}
	return "ls /: " + strings.Join(strings.Fields(string(resp.Stdout)), " "), nil
}

func (d *demo) kill(ctx context.Context) (_ string, err error) {
	if d.before, err = d.everything(ctx); err != nil {
		return "", err
	}
	pid := d.node.PID()
	if err := d.node.Kill(); err != nil {
		return "", err
	}
	answer, err := d.ask(ctx)
	return fmt.Sprintf("process %d is gone; the pod answers: %s", pid, answer), err
}

func (d *demo) restart(ctx context.Context) (string, error) {
	if err := d.node.Start(ctx); err != nil {
		return "", err
	}
	now, err := d.everything(ctx)
	if err != nil {
		return "", err
	}
	for i, want := range d.before {
		if !proto.Equal(now[i], want) {
			return "", fmt.Errorf("before: %v\nnow: %v", want, now[i])
		}
	}
	return "lists and states are equal to those before; " + fmt.Sprintf("process %d", d.node.PID()), nil
}

// everything returns what CRI reports about the pod and its containers.
func (d *demo) everything(ctx context.Context) ([]proto.Message, error) {
	r := d.node.Runtime()
	pod, err := r.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: d.podID})
	if err != nil {
		return nil, err
	}
	out := []proto.Message{pod.Status}
	for _, id := range []string{d.web, d.client} {
		c, err := r.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: id})
		if err != nil {
			return nil, err
		}
		out = append(out, c.Status)
	}
	pods, err := r.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return nil, err
	}
	return append(out, pods), nil
}

func (d *demo) remove(ctx context.Context) (string, error) {
	r := d.node.Runtime()
	if _, err := r.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: d.podID}); err != nil {
		return "", err
	}
	if _, err := r.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: d.podID}); err != nil {
		return "", err
	}
	_, err := d.node.Images().RemoveImage(ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: images.Probe}})
	return "the pod, its containers and the image are removed", err
}

func (d *demo) stop(context.Context) (string, error) {
	if err := d.node.Stop(); err != nil {
		return "", err
	}
	if faults := d.node.Faults(); len(faults) > 0 {
		return "", errors.New(faults[0])
	}
	return "it ended with code 0", nil
}

// count looks before the node is cleaned up: for everything with an id of the
// pod or its containers, and for everything new since the server's start except
// empty directories and cgroups that the next pod uses again.
func (d *demo) count(context.Context) (string, error) {
	now, err := d.node.Inventory()
	if err != nil {
		return "", err
	}
	left := now.About(d.podID, d.web, d.client)
	for _, line := range inventory.Diff(d.empty, now).Added {
		if !d.standing(line) {
			left = append(left, line)
		}
	}
	if len(left) > 0 {
		return "", errors.New("left over:\n" + inventory.Brief("", left))
	}
	return "processes 0, mounts 0, namespaces 0, cgroups 0, interfaces 0, firewall rules 0, addresses 0, files 0", nil
}

// standing reports whether a line is about the node's own directories and
// parent cgroups, or about what crun keeps.
func (d *demo) standing(line string) bool {
	kind, what, _ := strings.Cut(line, ": ")
	switch kind {
	case "cgroup":
		_, below, _ := strings.Cut(what, "/"+d.node.ID)
		return below == "" || below == "/pods" || below == "/monitors"
	case "file":
		// A current crun compiles seccomp filters once for all containers.
		filters := filepath.Join(d.node.RunRoot(), "runtime", "crun", ".cache") + "/"
		return strings.HasSuffix(what, "(d---------)") || strings.HasPrefix(what, filters)
	}
	return false
}
