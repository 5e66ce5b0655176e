package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage"
)

func TestStatus(t *testing.T) {
	t.Parallel()
	n := start(t, func(_ *Config, s *Services) {
		s.Info = func(context.Context) map[string]string {
			return map[string]string{"config": "{}", "network": "{\"a\":\"\xff\"}"}
		}
	})
	resp, err := n.runtime.Status(t.Context(), &cri.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	want := &cri.StatusResponse{
		Status: &cri.RuntimeStatus{Conditions: []*cri.RuntimeCondition{
			{Type: "RuntimeReady", Status: true}, {Type: "NetworkReady", Status: true},
		}},
		RuntimeHandlers: []*cri.RuntimeHandler{{Name: ""}, {Name: "crun"}, {Name: "runc"}},
		Features:        &cri.RuntimeFeatures{SupplementalGroupsPolicy: true, UserNamespacesHostNetwork: true, MountOptions: true},
	}
	if !proto.Equal(resp, want) {
		t.Errorf("got %v, want %v", resp, want)
	}

	resp, err = n.runtime.Status(t.Context(), &cri.StatusRequest{Verbose: true})
	if err != nil || resp.Info["config"] != "{}" || resp.Info["network"] != "{\"a\":\"\uFFFD\"}" {
		t.Errorf("info %v, %v", resp.GetInfo(), err)
	}
}

// A node that cannot run pods must not accept any.
func TestStatusNotReady(t *testing.T) {
	t.Parallel()
	n := start(t)
	n.engine.runtimeErr = fmt.Errorf("handler runc: %w", fault.Unavailable)
	n.engine.networkErr = fmt.Errorf("no CNI configuration \xff%s: %w", strings.Repeat("x", 1<<20), fault.Unavailable)
	resp, err := n.runtime.Status(t.Context(), &cri.StatusRequest{Verbose: true})
	if err != nil {
		t.Fatal(err)
	}
	got := resp.Status.Conditions
	if got[0].Status || got[0].Reason != "RuntimeNotReady" || got[0].Message != "handler runc" {
		t.Errorf("runtime condition %v", got[0])
	}
	if got[1].Status || got[1].Reason != "NetworkPluginNotReady" || !strings.HasPrefix(got[1].Message, "no CNI configuration \uFFFD") || len(got[1].Message) > maxText {
		t.Errorf("network condition %.200v", got[1])
	}
	if len(resp.Info) != 0 {
		t.Errorf("info %v", resp.Info)
	}
}

// The text of a condition changes only with its cause: not with times,
// durations, process ids and ports in a plugin's message.
func TestConditionTextIsSteady(t *testing.T) {
	t.Parallel()
	var s steadyText
	for _, same := range [][]string{
		{`runc: exit status 1: time="2026-11-24T23:05:35Z" pid=811 after 59.8s`, `runc: exit status 1: time="2026-11-25T01:15:00.5+02:00" pid=4711 after 1m0.2s`},
		{"dial tcp 10.0.0.7:41812->10.96.0.1:443: timeout", "dial tcp 10.0.0.7:9->10.96.0.1:443: timeout"},
		{"no answer from [fd00::1]:443, object 0xc00012ab in .tmp-2112451876", "no answer from [fd00::1]:8443, object 0xc0ffee00 in .tmp-7"},
		{"no answer from peer", "no answer from peer"},
	} {
		for _, text := range same {
			if got := s.of(errors.New(text)); got != same[0] {
				t.Errorf("%q is told as %q, want %q", text, got, same[0])
			}
		}
	}
	if got := s.of(nil); got != "" {
		t.Errorf("no error is told as %q", got)
	}
	if got := s.of(errors.New("exit status 2")); got != "exit status 2" {
		t.Errorf("after it was well: %q", got)
	}
	if got := s.of(errors.New("killed by signal 9")); got != "killed by signal 9" {
		t.Errorf("another cause: %q", got)
	}
}

// A caller that stops waiting must not get the answer that the node is not
// ready.
func TestStatusOfImpatientCaller(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	api := &nodeAPI{status: &fakeEngine{statusErr: ctx.Err()}}
	if resp, err := api.Status(ctx, &cri.StatusRequest{}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, %v", resp, err)
	}
}

func TestRuntimeConfig(t *testing.T) {
	t.Parallel()
	n := start(t)
	resp, err := n.runtime.RuntimeConfig(t.Context(), &cri.RuntimeConfigRequest{})
	if err != nil || resp.Linux.CgroupDriver != cri.CgroupDriver_CGROUPFS {
		t.Errorf("got %v, %v", resp, err)
	}
}

func TestSemver(t *testing.T) {
	t.Parallel()
	for build, want := range map[string]string{
		"1.2.3": "1.2.3", "v1.2.3": "1.2.3", "v0.1.0-rc.1+dirty": "0.1.0-rc.1+dirty", "1.2.3-4-gabc1234": "1.2.3-4-gabc1234",
		"": "0.0.0", "abc1234": "0.0.0+abc1234", "(devel)": "0.0.0+-devel-", "1.2": "0.0.0+1-2", "01.2.3": "0.0.0+01-2-3",
		"1.2.3-é": "0.0.0+1-2-3--", "1.2.3\n": "0.0.0+1-2-3-",
	} {
		if got := Semver(build); got != want {
			t.Errorf("%q became %q, want %q", build, got, want)
		}
	}
}

func TestPodSandboxStatusRPC(t *testing.T) {
	t.Parallel()
	n := start(t)
	n.engine.sandboxes = append(n.engine.sandboxes, fullSandboxView())
	for _, verbose := range []bool{false, true} {
		resp, err := n.runtime.PodSandboxStatus(t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: idOf(1), Verbose: verbose})
		if err != nil {
			t.Fatal(err)
		}
		if !proto.Equal(resp.Status, sandboxStatus(fullSandboxView())) {
			t.Errorf("status %v", resp.Status)
		}
		if (len(resp.Info) != 0) != verbose {
			t.Errorf("verbose %v: info %v", verbose, resp.Info)
		}
	}
	_, err := n.runtime.PodSandboxStatus(t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: idOf(7)})
	wantCode(t, err, codes.NotFound)
}

func TestContainerStatusRPC(t *testing.T) {
	t.Parallel()
	n := start(t)
	n.engine.containers = append(n.engine.containers, fullContainerView())
	for _, spec := range []string{"", `{"ociVersion":"1.0.2"`} {
		if spec != "" {
			n.engine.spec = json.RawMessage(`{"ociVersion":"1.0.2"}`)
		}
		for _, verbose := range []bool{false, true} {
			resp, err := n.runtime.ContainerStatus(t.Context(), &cri.ContainerStatusRequest{ContainerId: idOf(2)[:63], Verbose: verbose})
			if err != nil {
				t.Fatal(err)
			}
			if !proto.Equal(resp.Status, containerStatus(fullContainerView())) {
				t.Errorf("status %v", resp.Status)
			}
			if (len(resp.Info) != 0) != verbose || verbose && !strings.Contains(resp.Info["info"], spec) {
				t.Errorf("verbose %v: info %v", verbose, resp.Info)
			}
		}
	}
	_, err := n.runtime.ContainerStatus(t.Context(), &cri.ContainerStatusRequest{ContainerId: idOf(7)})
	wantCode(t, err, codes.NotFound)
}

// CRI 1.36: one image has one identifier wherever it is mentioned.
func TestOneImageIdentifier(t *testing.T) {
	t.Parallel()
	n := start(t)
	n.engine.containers = append(n.engine.containers, fullContainerView())
	ctx := t.Context()
	pull, err1 := n.image.PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: "registry.example/web:1"}})
	image, err2 := n.image.ImageStatus(ctx, &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: "registry.example/web:1"}})
	images, err3 := n.image.ListImages(ctx, &cri.ListImagesRequest{})
	container, err4 := n.runtime.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: idOf(2)})
	containers, err5 := n.runtime.ListContainers(ctx, &cri.ListContainersRequest{})
	for _, err := range []error{err1, err2, err3, err4, err5} {
		if err != nil {
			t.Fatal(err)
		}
	}
	ids := []string{
		pull.ImageRef, image.Image.Id, images.Images[0].Id,
		container.Status.ImageId, containers.Containers[0].ImageId,
		containers.Containers[0].ImageRef, // by which kubelets before 1.30 know the images in use (cri-o#7143)
	}
	if ids[0] != idOf(9) || len(slices.Compact(ids)) != 1 {
		t.Errorf("identifiers %v", ids)
	}
	// Beside it, for humans and scanners, the name with a digest.
	if ref := container.Status.ImageRef; ref != fullContainerView().ImageRef {
		t.Errorf("reference %s", ref)
	}
}

func TestImageRPCs(t *testing.T) {
	t.Parallel()
	n := start(t)
	ctx := t.Context()
	for _, c := range []struct {
		ref  string
		want int
	}{{"", 1}, {"registry.example/web:1", 1}, {idOf(9), 1}, {"other", 0}} {
		resp, err := n.image.ListImages(ctx, &cri.ListImagesRequest{Filter: &cri.ImageFilter{Image: &cri.ImageSpec{Image: c.ref}}})
		if err != nil || len(resp.Images) != c.want {
			t.Errorf("%q: %d images, want %d (%v)", c.ref, len(resp.GetImages()), c.want, err)
		}
	}
	_, err := n.image.ListImages(ctx, &cri.ListImagesRequest{Filter: &cri.ImageFilter{Image: &cri.ImageSpec{ImageRef: "a\x00b"}}})
	wantCode(t, err, codes.InvalidArgument)
	absent, err := n.image.ImageStatus(ctx, &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: "other"}, Verbose: true})
	if err != nil || absent.Image != nil || len(absent.Info) != 0 {
		t.Errorf("absent image: %v, %v", absent, err)
	}
	present, err := n.image.ImageStatus(ctx, &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: idOf(9)}, Verbose: true})
	if err != nil || !proto.Equal(present.Image, toImage(someImage())) || !strings.Contains(present.Info["info"], `"imageSpec"`) {
		t.Errorf("image: %v, %v", present, err)
	}
	short, err := n.image.ImageStatus(ctx, &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: idOf(9)}})
	if err != nil || !proto.Equal(short.Image, present.Image) || len(short.Info) != 0 {
		t.Errorf("not verbose: %v, %v", short, err)
	}
	annotated := someImage()
	annotated.Annotations = map[string]string{"org.opencontainers.image.source": "https://example.com"}
	n.images.images = []*storage.Image{annotated}
	status, err := n.image.ImageStatus(ctx, &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: idOf(9)}})
	if err != nil || !maps.Equal(status.Image.GetSpec().GetAnnotations(), annotated.Annotations) {
		t.Errorf("with annotations: %v, %v", status, err)
	}
	list, err := n.image.ListImages(ctx, &cri.ListImagesRequest{})
	if err != nil || list.Images[0].Spec != nil {
		t.Errorf("annotations in a list: %v, %v", list, err)
	}
	n.images.hook = func(_ context.Context, verb string) error {
		if verb == "Spec" { // removed after the lookup
			return fault.NotFound
		}
		return nil
	}
	gone, err := n.image.ImageStatus(ctx, &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: idOf(9)}, Verbose: true})
	if err != nil || gone.Image != nil || len(gone.Info) != 0 {
		t.Errorf("image removed meanwhile: %v, %v", gone, err)
	}
	info, err := n.image.ImageFsInfo(ctx, &cri.ImageFsInfoRequest{})
	if err != nil || len(info.ImageFilesystems) != 1 || len(info.ContainerFilesystems) != 1 {
		t.Fatalf("file systems: %v, %v", info, err)
	}
	wantFilled(t, info)
	if info.ImageFilesystems[0].FsId.Mountpoint != "/img" || info.ContainerFilesystems[0].FsId.Mountpoint != "/ctr" {
		t.Errorf("file systems: %v", info)
	}

	n.images.failing(fmt.Errorf("store: %w", fault.Exhausted))
	for _, err := range []error{
		second(n.image.ListImages(ctx, &cri.ListImagesRequest{})),
		second(n.image.ListImages(ctx, &cri.ListImagesRequest{Filter: &cri.ImageFilter{Image: &cri.ImageSpec{Image: "web"}}})),
		second(n.image.ImageStatus(ctx, &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: "web"}})),
		second(n.image.ImageFsInfo(ctx, &cri.ImageFsInfoRequest{})),
	} {
		wantCode(t, err, codes.ResourceExhausted)
	}
}

// What a kubelet puts into the node's status, by which installers choose what to do. Kubelets
// accept only semantic versions.
func TestIdentity(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, version, crius, want string }{
		{NameCrius, "", "v0.3.1", "crius://0.3.1"},
		{NameCrius, "", "", "crius://0.0.0"},
		{NameCRIO, "", "v0.3.1", "cri-o://1.37.0+crius.0.3.1"},
		{NameContainerd, "", "v0.0.0-12-g6b2e4ed", "containerd://2.4.0+crius.0.0.0-12-g6b2e4ed"},
		{NameContainerd, "", "6b2e4ed", "containerd://2.4.0+crius.0.0.0.6b2e4ed"},
		{NameContainerd, "1.7.29", "v0.3.1", "containerd://1.7.29"},
	} {
		n := start(t, func(cfg *Config, s *Services) {
			cfg.RuntimeName, cfg.RuntimeVersion, s.Version = c.name, c.version, c.crius
		})
		v, err := n.runtime.Version(t.Context(), &cri.VersionRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if got := v.GetRuntimeName() + "://" + v.GetRuntimeVersion(); got != c.want || !IsVersion(v.GetRuntimeVersion()) {
			t.Errorf("%+v: %s", c, got)
		}
	}
}

// installers choose by the node's status as their documentation and code say, re-enacted.
var installers = map[string]func(status string) (what string){
	// kata-deploy: by grep, the distributions of containerd first.
	"kata-deploy": func(status string) string {
		switch {
		case strings.Contains(status, "containerd") && strings.Contains(status, "-k3s"):
			return "k3s"
		case strings.Contains(status, "cri-o"):
			return "/etc/crio/crio.conf.d, restart crio"
		case strings.HasPrefix(status, "containerd"):
			return "/etc/containerd, restart containerd"
		}
		return "unsupported runtime"
	},
	// GPU operator: what stands at the beginning; without a known one its default runtime.
	"gpu-operator": func(status string) string {
		for _, known := range []string{"docker", "containerd", "cri-o"} {
			if strings.HasPrefix(status, known) {
				return known
			}
		}
		return "default"
	},
	// Agents cut the scheme off the ids of containers.
	"agents": func(status string) string {
		for _, scheme := range []string{"docker://", "containerd://", "cri-o://"} {
			if strings.HasPrefix(status, scheme) {
				return "id"
			}
		}
		return "scheme and id"
	},
}

func TestInstallersKnowTheIdentity(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]map[string]string{
		NameCrius:      {"kata-deploy": "unsupported runtime", "gpu-operator": "default", "agents": "scheme and id"},
		NameCRIO:       {"kata-deploy": "/etc/crio/crio.conf.d, restart crio", "gpu-operator": "cri-o", "agents": "id"},
		NameContainerd: {"kata-deploy": "/etc/containerd, restart containerd", "gpu-operator": "containerd", "agents": "id"},
	} {
		_, version := Config{RuntimeName: name}.Identity("v0.3.1")
		for installer, does := range installers {
			if got := does(name + "://" + version); got != want[installer] {
				t.Errorf("%s with %s: %s, want %s", installer, name, got, want[installer])
			}
		}
	}
}
