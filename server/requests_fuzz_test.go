package server

import (
	"errors"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/pod/view"
)

// fuzzRequest feeds a validator with arbitrary bytes: it does not change the
// request, it refuses with one of two codes in a short text that can be sent,
// and accepted holds for what it accepts.
func fuzzRequest[T any, M interface {
	*T
	proto.Message
}](f *testing.F, check func(M) error, accepted func(*testing.T, M), seeds ...M) {
	for _, seed := range append(seeds, new(T)) {
		raw, err := proto.Marshal(seed)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		req := M(new(T))
		if proto.Unmarshal(raw, req) != nil {
			t.Skip()
		}
		before := proto.CloneOf(req)
		err := check(req)
		if !proto.Equal(before, req) {
			t.Error("validation changed the request")
		}
		if err == nil {
			accepted(t, req)
			return
		}
		text := err.Error()
		if !errors.Is(err, fault.Invalid) && !errors.Is(err, fault.NotFound) || len(text) > 1000 || strings.HasPrefix(text, " ") || valid(text) != text {
			t.Errorf("refused with %q", text)
		}
	})
}

// wantID fails the test if an accepted id could leave a directory.
func wantID(t *testing.T, id string) {
	t.Helper()
	if id == "" || len(id) > 64 || filepath.Base(id) != id || strings.Trim(id, "0123456789abcdef") != "" {
		t.Errorf("id %q accepted", id)
	}
}

func wantResources(t *testing.T, r *cri.LinuxContainerResources) {
	t.Helper()
	if r.GetCpuPeriod() < 0 || r.GetCpuShares() < 0 || r.GetCpuQuota() < -1 || r.GetMemoryLimitInBytes() < -1 ||
		r.GetOomScoreAdj() < -1000 || r.GetOomScoreAdj() > 1000 {
		t.Errorf("accepted: %v", r)
	}
	for key, value := range r.GetUnified() {
		if filepath.Base(key) != key || strings.HasPrefix(key, ".") || strings.ContainsRune(key+value, 0) {
			t.Errorf("unified %q=%q accepted", key, value)
		}
	}
}

func FuzzUpdateContainerResources(f *testing.F) {
	resources := maximalContainerConfig().GetLinux().GetResources()
	fuzzRequest(f, checkUpdateContainerResources, func(t *testing.T, req *cri.UpdateContainerResourcesRequest) {
		wantID(t, req.GetContainerId())
		wantResources(t, req.GetLinux())
		if req.GetLinux() == nil {
			t.Error("no resources accepted")
		}
	},
		&cri.UpdateContainerResourcesRequest{ContainerId: idOf(1), Linux: resources, Annotations: map[string]string{"a": "b"}},
		&cri.UpdateContainerResourcesRequest{ContainerId: idOf(1), Linux: &cri.LinuxContainerResources{Unified: map[string]string{"../x.y": "1", ".": "2", "a.b": "\x00"}}},
		&cri.UpdateContainerResourcesRequest{ContainerId: "../x", Linux: &cri.LinuxContainerResources{CpuQuota: -2, OomScoreAdj: -1001}})
}

func FuzzUpdatePodSandboxResources(f *testing.F) {
	resources := maximalContainerConfig().GetLinux().GetResources()
	fuzzRequest(f, checkUpdatePodSandboxResources, func(t *testing.T, req *cri.UpdatePodSandboxResourcesRequest) {
		wantID(t, req.GetPodSandboxId())
		wantResources(t, req.GetOverhead())
		wantResources(t, req.GetResources())
	},
		&cri.UpdatePodSandboxResourcesRequest{PodSandboxId: idOf(1), Overhead: resources, Resources: resources},
		&cri.UpdatePodSandboxResourcesRequest{PodSandboxId: idOf(1), Resources: &cri.LinuxContainerResources{Unified: map[string]string{"/": ""}}})
}

func FuzzExecSync(f *testing.F) {
	check := func(req *cri.ExecSyncRequest) error {
		timeout, err := checkExecSync(req)
		if err == nil && timeout < 0 {
			return errors.New("a timeout is in the past")
		}
		return err
	}
	fuzzRequest(f, check, func(t *testing.T, req *cri.ExecSyncRequest) {
		wantID(t, req.GetContainerId())
		if len(req.GetCmd()) == 0 || req.GetCmd()[0] == "" || strings.ContainsRune(strings.Join(req.GetCmd(), ""), 0) {
			t.Errorf("command %q accepted", req.GetCmd())
		}
	},
		&cri.ExecSyncRequest{ContainerId: idOf(1), Cmd: []string{"sh", "-c", "exit 1"}, Timeout: 1},
		&cri.ExecSyncRequest{ContainerId: idOf(1), Cmd: []string{"a\x00b"}, Timeout: 1<<63 - 1},
		&cri.ExecSyncRequest{ContainerId: "x", Cmd: []string{""}, Timeout: -1})
}

func FuzzExec(f *testing.F) {
	fuzzRequest(f, checkExec, func(t *testing.T, req *cri.ExecRequest) {
		wantID(t, req.GetContainerId())
		if len(req.GetCmd()) == 0 || req.GetCmd()[0] == "" || req.GetTty() && req.GetStderr() || !req.GetStdin() && !req.GetStdout() && !req.GetStderr() {
			t.Errorf("accepted: %v", req)
		}
	},
		&cri.ExecRequest{ContainerId: idOf(1), Cmd: []string{"sh"}, Tty: true, Stdin: true, Stdout: true},
		&cri.ExecRequest{ContainerId: idOf(1)[:5], Cmd: []string{"sh"}, Tty: true, Stderr: true},
		&cri.ExecRequest{ContainerId: strings.Repeat("é", 1000), Cmd: []string{"sh"}, Stdout: true})
}

func FuzzAttach(f *testing.F) {
	fuzzRequest(f, checkAttach, func(t *testing.T, req *cri.AttachRequest) {
		wantID(t, req.GetContainerId())
		if req.GetTty() && req.GetStderr() || !req.GetStdin() && !req.GetStdout() && !req.GetStderr() {
			t.Errorf("accepted: %v", req)
		}
	},
		&cri.AttachRequest{ContainerId: idOf(1), Stdin: true, Stdout: true, Stderr: true},
		&cri.AttachRequest{ContainerId: "\x00", Stdout: true})
}

func FuzzPortForward(f *testing.F) {
	fuzzRequest(f, checkPortForward, func(t *testing.T, req *cri.PortForwardRequest) {
		wantID(t, req.GetPodSandboxId())
		for _, port := range req.GetPort() {
			if int32(uint16(port)) != port || port == 0 || len(req.GetPort()) > maxForwardPorts {
				t.Errorf("ports %v accepted", req.GetPort())
			}
		}
	},
		&cri.PortForwardRequest{PodSandboxId: idOf(1), Port: []int32{80, 65535}},
		&cri.PortForwardRequest{PodSandboxId: idOf(1), Port: []int32{0, -1, 65536}},
		&cri.PortForwardRequest{PodSandboxId: idOf(1), Port: make([]int32, maxForwardPorts+1)})
}

// A filter selects a subset of the unfiltered list, and each of its conditions
// holds for that subset.
func FuzzContainerFilter(f *testing.F) {
	view := &view.Container{ID: idOf(1), SandboxID: idOf(2), State: cri.ContainerState_CONTAINER_RUNNING,
		Config: &cri.ContainerConfig{Labels: map[string]string{"app": "web", "": "empty"}}}
	running := &cri.ContainerStateValue{State: cri.ContainerState_CONTAINER_RUNNING}
	check := func(filter *cri.ContainerFilter) error { return in("filter", wellFormed(filter)) }
	fuzzRequest(f, check, func(t *testing.T, filter *cri.ContainerFilter) {
		selected := strings.HasPrefix(view.ID, filter.GetId()) && strings.HasPrefix(view.SandboxID, filter.GetPodSandboxId()) &&
			(filter.GetState() == nil || filter.GetState().GetState() == view.State)
		for key, value := range filter.GetLabelSelector() {
			label, labelled := view.Config.GetLabels()[key]
			selected = selected && labelled && label == value
		}
		if containerMatches(filter, view) != selected || !containerMatches(nil, view) {
			t.Errorf("%v selects: %v", filter, !selected)
		}
	},
		&cri.ContainerFilter{Id: idOf(1)[:8], PodSandboxId: idOf(2), State: running, LabelSelector: map[string]string{"app": "web"}},
		&cri.ContainerFilter{State: &cri.ContainerStateValue{State: 77}},
		&cri.ContainerFilter{LabelSelector: map[string]string{"": "", "none": ""}})
}

func FuzzSandboxFilter(f *testing.F) {
	view := &view.Sandbox{ID: idOf(1), State: cri.PodSandboxState_SANDBOX_READY,
		Config: &cri.PodSandboxConfig{Labels: map[string]string{"app": "web"}}}
	check := func(filter *cri.PodSandboxFilter) error { return in("filter", wellFormed(filter)) }
	fuzzRequest(f, check, func(t *testing.T, filter *cri.PodSandboxFilter) {
		selected := strings.HasPrefix(view.ID, filter.GetId()) && (filter.GetState() == nil || filter.GetState().GetState() == view.State)
		for key, value := range filter.GetLabelSelector() {
			label, labelled := view.Config.GetLabels()[key]
			selected = selected && labelled && label == value
		}
		if sandboxMatches(filter, view) != selected || !sandboxMatches(nil, view) {
			t.Errorf("%v selects: %v", filter, !selected)
		}
	},
		&cri.PodSandboxFilter{Id: idOf(1)[:8], State: &cri.PodSandboxStateValue{}, LabelSelector: map[string]string{"app": "web"}},
		&cri.PodSandboxFilter{State: &cri.PodSandboxStateValue{State: -1}})
}

// A requested image has a name without blanks, of bounded length.
func FuzzImageSpec(f *testing.F) {
	fuzzRequest(f, checkImage, func(t *testing.T, spec *cri.ImageSpec) {
		for _, name := range []string{spec.GetImage(), spec.GetUserSpecifiedImage(), spec.GetImageRef()} {
			if len(name) > maxImage || strings.ContainsFunc(name, isBlank) {
				t.Errorf("%q accepted", name)
			}
		}
	},
		&cri.ImageSpec{Image: "registry.example:5000/a/b:1", UserSpecifiedImage: "b", Annotations: map[string]string{"a": "b"}},
		&cri.ImageSpec{Image: " ", ImageRef: strings.Repeat("a", maxImage+1)},
		&cri.ImageSpec{Image: "a\u2028b"})
}

// Accepted pod address ranges are one or two, without surrounding text.
func FuzzCheckPodCIDR(f *testing.F) {
	check := func(req *cri.UpdateRuntimeConfigRequest) error {
		return in("pod_cidr", checkPodCIDR(req.GetRuntimeConfig().GetNetworkConfig().GetPodCidr()))
	}
	var seeds []*cri.UpdateRuntimeConfigRequest
	for _, cidr := range []string{"10.85.0.0/24", "10.85.0.0/24,fd00::/64", "10.0.0.0/8,,", "fe80::1%eth0/64", "::/0,::/0,::/0", strings.Repeat("1", 2000)} {
		seeds = append(seeds, &cri.UpdateRuntimeConfigRequest{RuntimeConfig: &cri.RuntimeConfig{NetworkConfig: &cri.NetworkConfig{PodCidr: cidr}}})
	}
	fuzzRequest(f, check, func(t *testing.T, req *cri.UpdateRuntimeConfigRequest) {
		list := strings.Split(req.GetRuntimeConfig().GetNetworkConfig().GetPodCidr(), ",")
		for _, cidr := range list {
			if p, err := netip.ParsePrefix(cidr); err != nil || p.Addr().Zone() != "" || len(list) > 2 {
				t.Errorf("%q accepted", list)
			}
		}
	}, seeds...)
}
