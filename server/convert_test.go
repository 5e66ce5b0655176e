package server

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/storage"
	"github.com/crius-run/crius/storage/registry/source"
	"github.com/crius-run/crius/storage/registry/verifier"
)

func fullSandboxView() *view.Sandbox {
	return &view.Sandbox{
		ID:        idOf(1),
		Handler:   "crun",
		Asked:     "crun",
		Config:    maximalSandboxConfig(),
		State:     cri.PodSandboxState_SANDBOX_NOTREADY,
		CreatedAt: time.Unix(1, 2),
		IPs:       []string{"10.0.0.1", "fd00::1", "10.1.0.1"},
		NetNS:     "/run/netns/crius-1",
		PID:       11,
	}
}

func fullContainerView() *view.Container {
	return &view.Container{
		ID:         idOf(2),
		SandboxID:  idOf(1),
		Handler:    "crun",
		Config:     maximalContainerConfig(),
		ImageID:    idOf(9),
		ImageRef:   "registry.example/web@sha256:" + idOf(9),
		State:      cri.ContainerState_CONTAINER_EXITED,
		CreatedAt:  time.Unix(1, 1),
		StartedAt:  time.Unix(2, 2),
		FinishedAt: time.Unix(3, 3),
		ExitCode:   137,
		Reason:     "OOMKilled",
		Message:    "memory",
		PID:        22,
		LogPath:    "/var/log/pods/ns_web_1/web/0.log",
		Mounts:     []*cri.Mount{filled(&cri.Mount{})},
		Resources:  filled(&cri.ContainerResources{}),
		User:       filled(&cri.ContainerUser{}),
		StopSignal: cri.Signal_SIGNAL_SIGRTMINPLUS1,
		Bundle:     "/run/crius/containers/2",
	}
}

func TestSandboxStatus(t *testing.T) {
	t.Parallel()
	v := fullSandboxView()
	got := sandboxStatus(v)
	wantFilled(t, got,
		"linux.namespaces.options.cgroupns_options",    // of containers only
		"linux.namespaces.options.userns_options.mode", // POD is 0
		"linux.namespaces.options.userns_options.uids.container_id",
		"linux.namespaces.options.userns_options.gids.container_id")
	want := &cri.PodSandboxStatus{
		Id:        v.ID,
		Metadata:  v.Config.Metadata,
		State:     cri.PodSandboxState_SANDBOX_NOTREADY,
		CreatedAt: 1_000_000_002,
		Network: &cri.PodSandboxNetworkStatus{
			Ip: "10.0.0.1", AdditionalIps: []*cri.PodIP{{Ip: "fd00::1"}, {Ip: "10.1.0.1"}},
		},
		Linux:          &cri.LinuxPodSandboxStatus{Namespaces: &cri.Namespace{Options: v.Config.Linux.SecurityContext.NamespaceOptions}},
		Labels:         v.Config.Labels,
		Annotations:    v.Config.Annotations,
		RuntimeHandler: "crun",
	}
	if !proto.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// A pod in the host's network has no address; one of a minimal request has no
// options. Clients read the enclosing messages without a check.
func TestSandboxStatusOfBareView(t *testing.T) {
	t.Parallel()
	got := sandboxStatus(&view.Sandbox{ID: idOf(1), Config: &cri.PodSandboxConfig{}})
	if got.Network == nil || got.Network.Ip != "" || got.Linux.Namespaces.Options == nil {
		t.Errorf("got %v", got)
	}
}

func TestSandboxItem(t *testing.T) {
	t.Parallel()
	v := fullSandboxView()
	got := &cri.PodSandbox{}
	fillSandbox(got, v)
	wantFilled(t, got)
	want := &cri.PodSandbox{
		Id: v.ID, Metadata: v.Config.Metadata, State: v.State, CreatedAt: 1_000_000_002,
		Labels: v.Config.Labels, Annotations: v.Config.Annotations, RuntimeHandler: "crun",
	}
	if !proto.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestContainerStatus(t *testing.T) {
	t.Parallel()
	v := fullContainerView()
	got := containerStatus(v)
	wantFilled(t, got, "image.runtime_handler")
	want := &cri.ContainerStatus{
		Id:          v.ID,
		Metadata:    v.Config.Metadata,
		State:       cri.ContainerState_CONTAINER_EXITED,
		CreatedAt:   1_000_000_001,
		StartedAt:   2_000_000_002,
		FinishedAt:  3_000_000_003,
		ExitCode:    137,
		Image:       userImage(v.Config.Image),
		ImageRef:    "registry.example/web@sha256:" + idOf(9),
		Reason:      "OOMKilled",
		Message:     "memory",
		Labels:      v.Config.Labels,
		Annotations: v.Config.Annotations,
		Mounts:      v.Mounts,
		LogPath:     "/var/log/pods/ns_web_1/web/0.log",
		Resources:   v.Resources,
		ImageId:     idOf(9),
		User:        v.User,
		StopSignal:  cri.Signal_SIGNAL_SIGRTMINPLUS1,
	}
	if !proto.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// Whatever the view still holds, a container that has not exited has no exit.
func TestContainerStatusBeforeExit(t *testing.T) {
	t.Parallel()
	for _, state := range []cri.ContainerState{
		cri.ContainerState_CONTAINER_CREATED, cri.ContainerState_CONTAINER_RUNNING, cri.ContainerState_CONTAINER_UNKNOWN,
	} {
		v := fullContainerView()
		v.State = state
		v.StartedAt = time.Time{}
		got := containerStatus(v)
		if got.StartedAt != 0 || got.FinishedAt != 0 || got.ExitCode != 0 || got.Reason != "" || got.Message != "" {
			t.Errorf("%v: got %v", state, got)
		}
	}
}

// A running container says what is wrong with its log, and no other one does.
func TestLogTroubleInTheStatus(t *testing.T) {
	t.Parallel()
	for state, want := range map[cri.ContainerState]string{
		cri.ContainerState_CONTAINER_CREATED: "", cri.ContainerState_CONTAINER_RUNNING: "LogBlocked", cri.ContainerState_CONTAINER_EXITED: "OOMKilled",
	} {
		v := fullContainerView()
		v.State, v.LogReason, v.LogMessage = state, "LogBlocked", "no space"
		if got := containerStatus(v); got.Reason != want || (got.Message == "no space") != (want == v.LogReason) {
			t.Errorf("%v: got %v", state, got)
		}
	}
}

func TestContainerItem(t *testing.T) {
	t.Parallel()
	v := fullContainerView()
	got := &cri.Container{}
	fillContainer(got, v)
	wantFilled(t, got, "image.runtime_handler")
	want := &cri.Container{
		Id: v.ID, PodSandboxId: v.SandboxID, Metadata: v.Config.Metadata, Image: userImage(v.Config.Image),
		ImageRef: idOf(9), State: v.State, CreatedAt: 1_000_000_001,
		Labels: v.Config.Labels, Annotations: v.Config.Annotations, ImageId: idOf(9),
	}
	if !proto.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// The kubelet creates by id and shows status.image to the user. Its garbage
// collection looks for the handler of containers' images among those of the
// listed images.
func TestUserImage(t *testing.T) {
	t.Parallel()
	byID := filled(&cri.ImageSpec{})
	byID.Image, byID.UserSpecifiedImage = idOf(9), "web:1"
	want := proto.CloneOf(byID)
	want.Image, want.RuntimeHandler = "web:1", ""
	if got := userImage(byID); !proto.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	wantFilled(t, userImage(byID), "runtime_handler")
	if got := toImage(someImage()).GetSpec().GetRuntimeHandler(); got != "" {
		t.Errorf("images are listed for the handler %q, and containers for none", got)
	}
	if byID.Image != idOf(9) {
		t.Error("the view was changed")
	}
	byName := &cri.ImageSpec{Image: "web:1"}
	if got := userImage(byName); got != byName {
		t.Errorf("got %v", got)
	}
	ofHandler := &cri.ImageSpec{Image: "web:1", RuntimeHandler: "kata"}
	if got := userImage(ofHandler); !proto.Equal(got, byName) {
		t.Errorf("got %v", got)
	}
}

func TestImage(t *testing.T) {
	t.Parallel()
	i := someImage()
	got := toImage(i)
	wantFilled(t, got, "username", "spec")
	want := &cri.Image{
		Id: idOf(9), RepoTags: i.RepoTags, RepoDigests: i.RepoDigests, Size: 7, Uid: &cri.Int64Value{Value: 1000}, Pinned: true,
	}
	if !proto.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := toImage(&storage.Image{Config: &imagespec.ImageConfig{}}); got.Size == 0 {
		t.Error("size must be > 0")
	}
}

// CVE-2024-40635, CVE-2026-46680: a user that is not a plain id must not pass
// the kubelet's runAsNonRoot check as a number.
func TestImageUser_CVE_2024_40635_CVE_2026_46680(t *testing.T) {
	t.Parallel()
	for user, uid := range map[string]int64{
		"": 0, "0": 0, "0:0": 0, ":5": 0, "1000": 1000, "1000:wheel": 1000, "2147483647": 1<<31 - 1,
	} {
		got, name := imageUser(&storage.Image{Config: &imagespec.ImageConfig{User: user}})
		if got == nil || got.Value != uid || name != "" {
			t.Errorf("%q: got %v and %q, want %d", user, got, name, uid)
		}
	}
	for user, want := range map[string]string{
		"www-data": "www-data", "www-data:1004": "www-data",
		"2147483648": "2147483648", "4294967296": "4294967296", "-1": "-1", "+0": "+0", "0x0": "0x0", "00": "00", "01": "01",
		" 0": " 0", "1e3": "1e3", "1_000": "1_000", "٣": "٣", "a\xffb": "a\uFFFDb",
		strings.Repeat("1", 70):    strings.Repeat("1", 70),
		strings.Repeat("a", 1<<20): strings.Repeat("a", maxUsername),
	} {
		uid, name := imageUser(&storage.Image{Config: &imagespec.ImageConfig{User: user}})
		if uid != nil || name != want {
			t.Errorf("%.40q: got %v and %.40q, want the name", user, uid, name)
		}
	}
}

func TestFsUsage(t *testing.T) {
	t.Parallel()
	got := fsUsage(storage.FsUsage{Mountpoint: "/a", UsedBytes: 1, InodesUsed: 2, Timestamp: time.Unix(0, 3)})
	wantFilled(t, got)
	want := &cri.FilesystemUsage{
		Timestamp: 3, FsId: &cri.FilesystemIdentifier{Mountpoint: "/a"},
		UsedBytes: &cri.UInt64Value{Value: 1}, InodesUsed: &cri.UInt64Value{Value: 2},
	}
	if !proto.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// cri-o#5606, containerd#13454: one string that was not UTF-8 made every List
// fail. Anything that a kernel, a plugin or an image may say can be encoded.
func TestHostileStringsCanBeEncoded(t *testing.T) {
	t.Parallel()
	const hostile = "a\xff\xfe\x00b\xc3"
	sandbox := fullSandboxView()
	sandbox.IPs = []string{hostile, hostile}
	sandbox.NetNS = hostile
	container := fullContainerView()
	container.Reason, container.Message, container.LogPath, container.Bundle = hostile, hostile, hostile, hostile
	container.Mounts = []*cri.Mount{
		{HostPath: "/fine", ContainerPath: "/fine"}, {HostPath: hostile, ContainerPath: hostile}, {HostPath: "/fine2", Readonly: true},
	}
	image := &storage.Image{
		ID: idOf(1), RepoTags: []string{"fine", hostile}, RepoDigests: []string{hostile},
		Config: &imagespec.ImageConfig{User: hostile},
	}
	sandboxDoc, err1 := sandboxInfo(sandbox, json.RawMessage(`{"hostname":"`+"\xff"+`"}`))
	containerDoc, err2 := containerInfo(container, json.RawMessage(`{"hostname":"`+"\xff"+`"}`))
	imageDoc, err3 := imageInfo(&imagespec.Image{Author: hostile, Config: imagespec.ImageConfig{Labels: map[string]string{hostile: hostile}}}, []verifier.Verdict{{Name: hostile, Said: hostile}})
	if err1 != nil || err2 != nil || err3 != nil {
		t.Fatal(err1, err2, err3)
	}
	for _, m := range []proto.Message{
		&cri.PodSandboxStatusResponse{Status: sandboxStatus(sandbox), Info: sandboxDoc},
		&cri.ContainerStatusResponse{Status: containerStatus(container), Info: containerDoc},
		&cri.ImageStatusResponse{Image: toImage(image), Info: imageDoc},
		&cri.ImageFsInfoResponse{ImageFilesystems: []*cri.FilesystemUsage{fsUsage(storage.FsUsage{Mountpoint: hostile})}},
		&cri.StatusResponse{Info: validMap(map[string]string{hostile: hostile, "config": "{}"})},
	} {
		if _, err := proto.Marshal(m); err != nil {
			t.Errorf("%T: %v", m, err)
		}
	}
	mounts := containerStatus(container).Mounts
	if mounts[0].HostPath != "/fine" || mounts[1].HostPath != "a\uFFFD\x00b\uFFFD" || !mounts[2].Readonly {
		t.Errorf("mounts %v", mounts)
	}
	if container.Mounts[1].HostPath != hostile {
		t.Error("the view was changed")
	}
}

func TestVerboseInfo(t *testing.T) {
	t.Parallel()
	decode := func(info map[string]string, err error) map[string]any {
		t.Helper()
		if err != nil || len(info) != 1 {
			t.Fatalf("info %v, %v", info, err)
		}
		var doc map[string]any
		if err := json.Unmarshal([]byte(info["info"]), &doc); err != nil {
			t.Fatal(err)
		}
		return doc
	}
	container := decode(containerInfo(fullContainerView(), json.RawMessage(`{"ociVersion":"1.0.2"}`)))
	if container["pid"] != 22.0 || container["sandboxID"] != idOf(1) || container["runtimeHandler"] != "crun" ||
		container["bundle"] != "/run/crius/containers/2" || container["runtimeSpec"].(map[string]any)["ociVersion"] != "1.0.2" ||
		container["config"].(map[string]any)["log_path"] != "web/0.log" {
		t.Errorf("container info %v", container)
	}
	for _, broken := range []string{"", "{", "null", "\xff"} {
		doc, pod := decode(containerInfo(fullContainerView(), json.RawMessage(broken))), decode(sandboxInfo(fullSandboxView(), json.RawMessage(broken)))
		if doc["runtimeSpec"] != nil || doc["privileged"] != true || pod["runtimeSpec"] != nil {
			t.Errorf("runtime spec %q became %v and %v", broken, doc["runtimeSpec"], pod["runtimeSpec"])
		}
	}
	sandbox := decode(sandboxInfo(fullSandboxView(), json.RawMessage(`{"hostname":"web"}`)))
	if sandbox["pid"] != 11.0 || sandbox["runtimeSpec"].(map[string]any)["hostname"] != "web" || sandbox["netNamespace"] != "/run/netns/crius-1" || sandbox["runtimeHandler"] != "crun" ||
		sandbox["config"].(map[string]any)["log_directory"] != "/var/log/pods/ns_web_1/" {
		t.Errorf("pod info %v", sandbox)
	}
	artifact := decode(artifactInfo(&storage.Image{Files: []source.File{{Path: "dir/weights", Digest: "sha256:00", Size: 7}}}, nil))
	if files := artifact["artifactFiles"].([]any); !reflect.DeepEqual(files[0], map[string]any{"path": "dir/weights", "digest": "sha256:00", "size": 7.0}) {
		t.Errorf("artifact info %v", artifact)
	}
	image := decode(imageInfo(&imagespec.Image{Config: *someImage().Config, Author: "me"}, []verifier.Verdict{{Name: "a:1", Accepted: true, Said: "own: signed"}}))
	if spec := image["imageSpec"].(map[string]any); spec["config"].(map[string]any)["User"] != "1000" || spec["author"] != "me" {
		t.Errorf("image info %v", image)
	}
	if v := image["verifiers"].([]any)[0].(map[string]any); v["name"] != "a:1" || v["accepted"] != true || v["verdict"] != "own: signed" {
		t.Errorf("image info %v", image)
	}
	if _, has := artifact["verifiers"]; has {
		t.Errorf("artifact info %v", artifact)
	}
}

func TestClip(t *testing.T) {
	t.Parallel()
	if got := clip("kept"); got != "kept" {
		t.Errorf("got %q", got)
	}
	for _, text := range []string{
		"begin" + strings.Repeat("x", 1<<20) + "end",
		"begin" + strings.Repeat("é", 1<<20) + "end",
		"begin" + strings.Repeat("\xff-", 1<<20) + "end",
		"begin" + strings.Repeat("\xff-", maxText/4) + "end",
	} {
		got := clip(text)
		if len(got) > maxText || !utf8.ValidString(got) || !strings.HasPrefix(got, "begin") || !strings.HasSuffix(got, "end") {
			t.Errorf("clipped to %d bytes, %.20q ... %.20q", len(got), got, got[len(got)-20:])
		}
	}
}

func TestNanos(t *testing.T) {
	t.Parallel()
	if got := nanos(time.Time{}); got != 0 {
		t.Errorf("no time is %d", got)
	}
}

// Whatever a runtime or an image says can be sent.
func FuzzTextOfContainers(f *testing.F) {
	f.Add("1000:1000")
	f.Add("\xff")
	f.Add(strings.Repeat("é", maxText))
	f.Fuzz(func(t *testing.T, text string) {
		image := toImage(&storage.Image{ID: idOf(1), RepoTags: []string{text}, Config: &imagespec.ImageConfig{User: text}})
		if (image.Uid == nil) == (image.Username == "") {
			t.Errorf("%q is both or neither of %v and %q", text, image.Uid, image.Username)
		}
		status := &cri.ContainerStatus{Message: clip(text), Reason: valid(text), LogPath: brief(text)}
		for _, m := range []proto.Message{image, status} {
			if _, err := proto.Marshal(m); err != nil {
				t.Errorf("%q: %v", text, err)
			}
		}
		if len(clip(text)) > maxText {
			t.Errorf("clipped to %d bytes", len(clip(text)))
		}
	})
}
