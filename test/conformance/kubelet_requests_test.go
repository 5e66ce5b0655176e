package main_test

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/scene"
)

// recording is what a kubelet of some version sends for a simple pod, derived
// from its source (pkg/kubelet/kuberuntime). $NODE, $CGROUPS, $IMAGE and $UID
// stand for values that differ each time.
type recording struct {
	API            string
	Pod, Container json.RawMessage
}

// replay plays the kubelet of a recording.
type replay struct {
	w         *scene.World
	api       string
	pod       *cri.PodSandboxConfig
	container *cri.ContainerConfig
}

func (k *replay) call(t *testing.T, method string, req, reply proto.Message) {
	t.Helper()
	if err := k.w.Conn().Invoke(t.Context(), "/runtime."+k.api+"."+method, req, reply); err != nil {
		t.Fatalf("%s: %v", method, err)
	}
}

// load reads a recording and makes the files and directories that the kubelet
// makes before it creates a container.
func load(t *testing.T, w *scene.World, version, handler string) *replay {
	t.Helper()
	uid := strings.ToLower(strings.ReplaceAll("5b0c4f6e-"+version+"-"+handler, ".", ""))
	text := strings.NewReplacer("$NODE", w.Path(), "$CGROUPS", w.CgroupParent(), "$IMAGE", w.Pull(t, images.Probe), "$UID", uid).
		Replace(scene.Read(t, filepath.Join("testdata", "kubelet-"+version+".json")))
	var r recording
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		t.Fatal(err)
	}
	k := &replay{w: w, api: r.API, pod: new(cri.PodSandboxConfig), container: new(cri.ContainerConfig)}
	for raw, message := range map[*json.RawMessage]proto.Message{&r.Pod: k.pod, &r.Container: k.container} {
		if err := protojson.Unmarshal(*raw, message); err != nil {
			t.Fatal(err)
		}
	}
	k.container.Linux.Resources.HugepageLimits = nil // one for each size on the node; the recorded node had others
	for _, size := range cgroup.HugePageSizes(os.DirFS("/")) {
		k.container.Linux.Resources.HugepageLimits = append(k.container.Linux.Resources.HugepageLimits, &cri.HugepageLimit{PageSize: size})
	}
	for _, m := range k.container.Mounts {
		made := m.HostPath
		if isFile := m.ContainerPath == "/etc/hosts" || m.ContainerPath == "/dev/termination-log"; isFile {
			made = filepath.Dir(made)
		}
		if err := os.MkdirAll(made, 0o755); err != nil {
			t.Fatal(err)
		}
		if made != m.HostPath {
			scene.Write(t, m.HostPath, "from the kubelet\n")
		}
	}
	if err := os.MkdirAll(filepath.Join(k.pod.LogDirectory, "web"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // the pod's cgroup and directories are the kubelet's
		for _, dir := range slices.Backward(inventory.Cgroups(k.pod.Linux.CgroupParent)) {
			os.Remove(dir)
			os.Remove(filepath.Dir(dir))
		}
		os.RemoveAll(w.Path("pods", uid))
	})
	return k
}

// TestRequestsOfKubelets replays the requests of kubelets in their order, and
// checks the answers as the kubelets do.
func TestRequestsOfKubelets(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	for i, version := range []string{"1.18", "1.22", "1.34", "1.37"} {
		t.Run(version, func(t *testing.T) {
			handler := scene.Handlers[i%2] // which does not matter
			k := load(t, w, version, handler)
			k.greets(t)
			p := k.runsPod(t, handler)
			c := k.runsContainer(t, p)
			k.relists(t, p, c)
			k.looksInside(t, c)
			k.ends(t, p, c)
		})
	}
}

// greets sends the first requests after the connection.
func (k *replay) greets(t *testing.T) {
	t.Helper()
	var v cri.VersionResponse
	k.call(t, "RuntimeService/Version", &cri.VersionRequest{Version: "0.1.0"}, &v)
	scene.Equal(t, "version", v.Version, "0.1.0")
	scene.Equal(t, "API version", v.RuntimeApiVersion, k.api)
	var s cri.StatusResponse
	k.call(t, "RuntimeService/Status", &cri.StatusRequest{}, &s)
	for _, want := range []string{"RuntimeReady", "NetworkReady"} {
		if !slices.ContainsFunc(s.GetStatus().GetConditions(), func(c *cri.RuntimeCondition) bool { return c.Type == want && c.Status }) {
			t.Errorf("the condition %s is not met: %v", want, s.Status)
		}
	}
	if k.api == "v1" {
		k.call(t, "RuntimeService/RuntimeConfig", &cri.RuntimeConfigRequest{}, &cri.RuntimeConfigResponse{})
	}
}

// runsPod starts the sandbox and checks, as the kubelet does, that it is
// usable: ready, in the requested network mode, with an address.
func (k *replay) runsPod(t *testing.T, handler string) *scene.Pod {
	t.Helper()
	var run cri.RunPodSandboxResponse
	k.call(t, "RuntimeService/RunPodSandbox", &cri.RunPodSandboxRequest{Config: k.pod, RuntimeHandler: handler}, &run)
	p := k.w.Adopt(t, handler, run.PodSandboxId, k.pod)
	var resp cri.PodSandboxStatusResponse
	k.call(t, "RuntimeService/PodSandboxStatus", &cri.PodSandboxStatusRequest{PodSandboxId: p.ID}, &resp)
	s := resp.Status
	scene.Equal(t, "state of the pod", s.State, cri.PodSandboxState_SANDBOX_READY)
	scene.Equal(t, "network mode", s.GetLinux().GetNamespaces().GetOptions().GetNetwork(), cri.NamespaceMode_POD)
	if s.GetNetwork().GetIp() == "" {
		t.Error("the pod has no address, so the kubelet makes another one")
	}
	if !proto.Equal(s.Metadata, k.pod.Metadata) || !maps.Equal(s.Labels, k.pod.Labels) || !maps.Equal(s.Annotations, k.pod.Annotations) {
		t.Errorf("metadata, labels or annotations of the pod are altered: %v", s)
	}
	return p
}

func (k *replay) runsContainer(t *testing.T, p *scene.Pod) *scene.Container {
	t.Helper()
	var image cri.ImageStatusResponse
	k.call(t, "ImageService/ImageStatus", &cri.ImageStatusRequest{Image: k.container.Image}, &image)
	if image.Image == nil || image.Image.Username != "" || image.Image.GetUid().GetValue() != 0 { // which the kubelet treats as root
		t.Errorf("ImageStatus says %v", image.Image)
	}
	var created cri.CreateContainerResponse
	k.call(t, "RuntimeService/CreateContainer", &cri.CreateContainerRequest{PodSandboxId: p.ID, Config: k.container, SandboxConfig: k.pod}, &created)
	c := p.Adopt(created.ContainerId, k.container)
	k.call(t, "RuntimeService/StartContainer", &cri.StartContainerRequest{ContainerId: c.ID}, &cri.StartContainerResponse{})
	c.Says(t, "ready")
	return c
}

// relists sends the kubelet's requests of every second, and reads what it
// reads: the restart count and the hash of an annotation, the path of the log.
func (k *replay) relists(t *testing.T, p *scene.Pod, c *scene.Container) {
	t.Helper()
	var pods cri.ListPodSandboxResponse
	k.call(t, "RuntimeService/ListPodSandbox", &cri.ListPodSandboxRequest{Filter: &cri.PodSandboxFilter{
		State:         &cri.PodSandboxStateValue{State: cri.PodSandboxState_SANDBOX_READY},
		LabelSelector: map[string]string{"io.kubernetes.pod.uid": k.pod.Metadata.Uid},
	}}, &pods)
	if len(pods.Items) != 1 || pods.Items[0].Id != p.ID || !maps.Equal(pods.Items[0].Labels, k.pod.Labels) ||
		!maps.Equal(pods.Items[0].Annotations, k.pod.Annotations) || pods.Items[0].CreatedAt == 0 {
		t.Errorf("ListPodSandbox says %v", pods.Items)
	}
	var list cri.ListContainersResponse
	k.call(t, "RuntimeService/ListContainers", &cri.ListContainersRequest{Filter: &cri.ContainerFilter{
		LabelSelector: map[string]string{"io.kubernetes.pod.uid": k.pod.Metadata.Uid},
	}}, &list)
	if len(list.Containers) != 1 || list.Containers[0].Id != c.ID || list.Containers[0].PodSandboxId != p.ID ||
		!maps.Equal(list.Containers[0].Labels, k.container.Labels) || !maps.Equal(list.Containers[0].Annotations, k.container.Annotations) {
		t.Errorf("ListContainers says %v", list.Containers)
	}
	var resp cri.ContainerStatusResponse
	k.call(t, "RuntimeService/ContainerStatus", &cri.ContainerStatusRequest{ContainerId: c.ID}, &resp)
	s := resp.Status
	scene.Equal(t, "state of the container", s.State, cri.ContainerState_CONTAINER_RUNNING)
	scene.Equal(t, "log path", s.LogPath, filepath.Join(k.pod.LogDirectory, k.container.LogPath))
	if !proto.Equal(s.Metadata, k.container.Metadata) || !maps.Equal(s.Labels, k.container.Labels) || !maps.Equal(s.Annotations, k.container.Annotations) {
		t.Errorf("metadata, labels or annotations of the container are altered: %v", s)
	}
	if s.CreatedAt == 0 || s.StartedAt < s.CreatedAt || s.ImageRef == "" || s.GetImage().GetImage() == "" {
		t.Errorf("the kubelet cannot do without times and image: %v", s)
	}
	scene.Equal(t, "number of mounts", len(s.Mounts), len(k.container.Mounts))
	if k.api == "v1" { // compared by in-place resize
		want := k.container.Linux.Resources
		got := s.GetResources().GetLinux()
		for what, pair := range map[string][2]int64{
			"CPU quota": {got.GetCpuQuota(), want.CpuQuota}, "CPU period": {got.GetCpuPeriod(), want.CpuPeriod},
			"CPU shares": {got.GetCpuShares(), want.CpuShares}, "memory": {got.GetMemoryLimitInBytes(), want.MemoryLimitInBytes},
		} {
			scene.Equal(t, what+" in the status", pair[0], pair[1])
		}
	}
}

// looksInside compares the container with the request.
func (k *replay) looksInside(t *testing.T, c *scene.Container) {
	t.Helper()
	f := c.Facts(t)
	scene.Equal(t, "hostname", f.Hostname, "web-0")
	scene.Equal(t, "seccomp", f.Seccomp, 2)
	scene.Equal(t, "oom_score_adj", c.Procfs(t, "oom_score_adj"), "996")
	if !slices.Contains(f.Groups, 2000) {
		t.Errorf("the groups are %v", f.Groups)
	}
	for _, e := range k.container.Envs {
		if got, _ := f.Getenv(e.Key); got != string(e.Value) {
			t.Errorf("%s is %q", e.Key, got)
		}
	}
	scene.Equal(t, "/etc/hosts", c.Exec(t, "cat /etc/hosts"), "from the kubelet\n")
	lines := slices.Sorted(strings.Lines(c.Exec(t, "cat /etc/resolv.conf")))
	scene.Equal(t, "/etc/resolv.conf", strings.Join(lines, ""),
		"nameserver 10.96.0.10\noptions ndots:5\nsearch shop.svc.cluster.local svc.cluster.local cluster.local\n")
	c.Exec(t, "write /cache/f x")
	c.Refuses(t, "write /var/run/secrets/kubernetes.io/serviceaccount/f x", "read-only file system")
	c.Holds(t, scene.MemoryLimit, "67108864", "67108864")
	c.Holds(t, scene.CPUQuota, "20000", "20000 100000")
	c.Holds(t, scene.HugePages, "0", "0")
	if dir, _ := c.CgroupDir(t, "memory"); !strings.Contains(dir, k.pod.Linux.CgroupParent+"/") {
		t.Errorf("the container's cgroup is %s, not below %s", dir, k.pod.Linux.CgroupParent)
	}
}

// ends deletes the pod as the kubelet does: the preStop hook, the container
// with its grace period, the sandbox, then the rest of both.
func (k *replay) ends(t *testing.T, p *scene.Pod, c *scene.Container) {
	t.Helper()
	var hook cri.ExecSyncResponse
	k.call(t, "RuntimeService/ExecSync", &cri.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"/probe", "echo", "stopping"}, Timeout: 30}, &hook)
	scene.Equal(t, "output of the hook", string(hook.Stdout), "stopping\n")
	k.call(t, "RuntimeService/StopContainer", &cri.StopContainerRequest{ContainerId: c.ID, Timeout: 30}, &cri.StopContainerResponse{})
	s := c.Status(t)
	scene.Equal(t, "reason", s.Reason, "Completed")
	for _, m := range k.container.Mounts {
		if m.ContainerPath == "/dev/termination-log" {
			scene.Equal(t, "termination message", scene.Read(t, m.HostPath), "bye")
		}
	}
	for range 2 {
		k.call(t, "RuntimeService/StopPodSandbox", &cri.StopPodSandboxRequest{PodSandboxId: p.ID}, &cri.StopPodSandboxResponse{})
	}
	k.call(t, "RuntimeService/RemoveContainer", &cri.RemoveContainerRequest{ContainerId: c.ID}, &cri.RemoveContainerResponse{})
	k.call(t, "RuntimeService/RemovePodSandbox", &cri.RemovePodSandboxRequest{PodSandboxId: p.ID}, &cri.RemovePodSandboxResponse{})
	var list cri.ListPodSandboxResponse
	k.call(t, "RuntimeService/ListPodSandbox", &cri.ListPodSandboxRequest{Filter: &cri.PodSandboxFilter{Id: p.ID}}, &list)
	scene.Equal(t, "pods of that id after the end", len(list.Items), 0)
}
