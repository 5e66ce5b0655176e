package server

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/storage"
	"github.com/crius-run/crius/storage/registry/verifier"
)

// Data from a request (metadata, labels, annotations, image spec) is valid
// UTF-8 already, because protobuf refuses anything else, and is returned as the
// same object: CRI requires it unaltered. Data from the kernel, a plugin or an
// image passes through valid or clip.

func fillSandbox(m *cri.PodSandbox, v *view.Sandbox) {
	m.Id = v.ID
	m.Metadata = v.Config.GetMetadata()
	m.State = v.State
	m.CreatedAt = nanos(v.CreatedAt)
	m.Labels = v.Config.GetLabels()
	m.Annotations = v.Config.GetAnnotations()
	m.RuntimeHandler = v.Asked
}

func sandboxMatches(f *cri.PodSandboxFilter, v *view.Sandbox) bool {
	return strings.HasPrefix(v.ID, f.GetId()) &&
		(f.GetState() == nil || f.GetState().GetState() == v.State) &&
		hasLabels(v.Config.GetLabels(), f.GetLabelSelector())
}

// sandboxStatus returns what a status and an event report about the pod itself,
// without its containers.
func sandboxStatus(v *view.Sandbox) *cri.PodSandboxStatus {
	options := v.Config.GetLinux().GetSecurityContext().GetNamespaceOptions()
	if options == nil {
		options = &cri.NamespaceOption{}
	}
	return &cri.PodSandboxStatus{
		Id:             v.ID,
		Metadata:       v.Config.GetMetadata(),
		State:          v.State,
		CreatedAt:      nanos(v.CreatedAt),
		Network:        sandboxNetwork(v),
		Linux:          &cri.LinuxPodSandboxStatus{Namespaces: &cri.Namespace{Options: options}},
		Labels:         v.Config.GetLabels(),
		Annotations:    v.Config.GetAnnotations(),
		RuntimeHandler: v.Asked,
	}
}

// sandboxNetwork returns nil for a pod whose own network has given it no address. A kubelet that
// finds a network without an IP there makes a new sandbox, again and again (kubernetes#48970,
// PodSandboxChanged).
func sandboxNetwork(v *view.Sandbox) *cri.PodSandboxNetworkStatus {
	if len(v.IPs) == 0 && v.NetNS != "" && v.State == cri.PodSandboxState_SANDBOX_READY {
		return nil
	}
	network := &cri.PodSandboxNetworkStatus{}
	for i, ip := range v.IPs {
		if i == 0 {
			network.Ip = valid(ip)
		} else {
			network.AdditionalIps = append(network.AdditionalIps, &cri.PodIP{Ip: valid(ip)})
		}
	}
	return network
}

func fillContainer(m *cri.Container, v *view.Container) {
	m.Id = v.ID
	m.PodSandboxId = v.SandboxID
	m.Metadata = v.Config.GetMetadata()
	m.Image = userImage(v.Config.GetImage())
	// The id, as in containerd, and not the digested name that ContainerStatus has: the garbage
	// collection of kubelets before 1.30 knows the images in use by this field, and compares it with
	// Image.id (cri-o#7143). Later ones use image_id.
	m.ImageRef = v.ImageID
	m.State = v.State
	m.CreatedAt = nanos(v.CreatedAt)
	m.Labels = v.Config.GetLabels()
	m.Annotations = v.Config.GetAnnotations()
	m.ImageId = v.ImageID
}

func containerMatches(f *cri.ContainerFilter, v *view.Container) bool {
	return strings.HasPrefix(v.ID, f.GetId()) &&
		strings.HasPrefix(v.SandboxID, f.GetPodSandboxId()) &&
		(f.GetState() == nil || f.GetState().GetState() == v.State) &&
		hasLabels(v.Config.GetLabels(), f.GetLabelSelector())
}

func containerStatus(v *view.Container) *cri.ContainerStatus {
	s := new(cri.ContainerStatus)
	fillContainerStatus(s, v)
	return s
}

func fillContainerStatus(s *cri.ContainerStatus, v *view.Container) {
	s.Id = v.ID
	s.Metadata = v.Config.GetMetadata()
	s.State = v.State
	s.CreatedAt = nanos(v.CreatedAt)
	s.StartedAt = nanos(v.StartedAt)
	s.Image = userImage(v.Config.GetImage())
	s.ImageRef = v.ImageRef
	s.Labels = v.Config.GetLabels()
	s.Annotations = v.Config.GetAnnotations()
	s.Mounts = validMounts(v.Mounts)
	s.LogPath = valid(v.LogPath)
	s.ImageId = v.ImageID
	s.User = v.User
	s.StopSignal = v.StopSignal
	if s.Resources = v.Resources; s.Resources == nil {
		s.Resources = &cri.ContainerResources{Linux: &cri.LinuxContainerResources{}}
	}
	switch v.State {
	case cri.ContainerState_CONTAINER_EXITED:
		s.FinishedAt = nanos(v.FinishedAt)
		s.ExitCode = v.ExitCode
		s.Reason = valid(v.Reason)
		s.Message = clip(v.Message)
	case cri.ContainerState_CONTAINER_RUNNING:
		s.Reason = v.LogReason
		s.Message = clip(v.LogMessage)
	}
}

// userImage returns the image as the user named it: the kubelet creates
// containers by image id and shows this field in the pod's status. It names no
// runtime handler, because images do not have one: all handlers share the
// images, and a kubelet with RuntimeClassInImageCriApi (KEP-4216) deletes
// images for which no container has both the id and the handler.
func userImage(spec *cri.ImageSpec) *cri.ImageSpec {
	name := cmp.Or(spec.GetUserSpecifiedImage(), spec.GetImage())
	if name == spec.GetImage() && spec.GetRuntimeHandler() == "" {
		return spec
	}
	return &cri.ImageSpec{
		Image:              name,
		Annotations:        spec.GetAnnotations(),
		UserSpecifiedImage: spec.GetUserSpecifiedImage(),
		ImageRef:           spec.GetImageRef(),
	}
}

// validMounts replaces the mounts whose resolved source is not valid UTF-8.
func validMounts(mounts []*cri.Mount) []*cri.Mount {
	wrong := func(m *cri.Mount) bool {
		return !utf8.ValidString(m.GetHostPath()) || !utf8.ValidString(m.GetContainerPath())
	}
	if !slices.ContainsFunc(mounts, wrong) {
		return mounts
	}
	fixed := slices.Clone(mounts)
	for i, m := range mounts {
		if wrong(m) {
			fixed[i] = proto.CloneOf(m)
			fixed[i].HostPath, fixed[i].ContainerPath = valid(m.GetHostPath()), valid(m.GetContainerPath())
		}
	}
	return fixed
}

// execReply truncates the output so that the reply can be sent: CRI says that
// output beyond 16 MiB is discarded, but both streams share one message of that
// size. Each stream may always use half of the room.
func execReply(r *oci.ExecResult, room int) *cri.ExecSyncResponse {
	stdout, stderr := r.Stdout, r.Stderr
	stderr = stderr[:min(len(stderr), max(room/2, room-len(stdout)))]
	stdout = stdout[:min(len(stdout), room-len(stderr))]
	return &cri.ExecSyncResponse{Stdout: stdout, Stderr: stderr, ExitCode: r.ExitCode}
}

func toImage(i *storage.Image) *cri.Image {
	m := &cri.Image{}
	fillImage(m, i)
	return m
}

// fillImage leaves spec empty. ImageStatus adds annotations, as in CRI-O;
// lists, which the kubelet requests all the time, do not need them. An image is
// the same for all runtime handlers; see userImage.
func fillImage(m *cri.Image, i *storage.Image) {
	m.Id = i.ID
	m.RepoTags = validAll(i.RepoTags)
	m.RepoDigests = validAll(i.RepoDigests)
	m.Size = max(i.Size, 1) // CRI: must be > 0; clients consider an image of size 0 broken
	m.Uid, m.Username = imageUser(i)
	m.Pinned = i.Pinned
}

// maxUsername is more than any passwd tool accepts.
const maxUsername = 256

// imageUser returns the user of an image, by number or by name.
func imageUser(i *storage.Image) (*cri.Int64Value, string) {
	uid, name := i.User()
	if uid != nil {
		return &cri.Int64Value{Value: *uid}, ""
	}
	return nil, valid(name[:min(len(name), maxUsername)])
}

func fsUsage(u storage.FsUsage) *cri.FilesystemUsage {
	return &cri.FilesystemUsage{
		Timestamp:  nanos(u.Timestamp),
		FsId:       &cri.FilesystemIdentifier{Mountpoint: valid(u.Mountpoint)},
		UsedBytes:  &cri.UInt64Value{Value: u.UsedBytes},
		InodesUsed: &cri.UInt64Value{Value: u.InodesUsed},
	}
}

// The verbose information is one JSON document under the key info, as crictl
// and the tools built on it expect.

func sandboxInfo(v *view.Sandbox, spec json.RawMessage) (map[string]string, error) {
	spec = validJSON(spec)
	return verbose(struct {
		PID            int                   `json:"pid"`
		RuntimeHandler string                `json:"runtimeHandler"`
		NetNS          string                `json:"netNamespace,omitempty"`
		Config         *cri.PodSandboxConfig `json:"config"`
		RuntimeSpec    json.RawMessage       `json:"runtimeSpec"`
	}{v.PID, v.Handler, v.NetNS, v.Config, spec})
}

// validJSON returns nil for what would spoil the whole document.
func validJSON(spec json.RawMessage) json.RawMessage {
	if !json.Valid(spec) {
		return nil
	}
	return spec
}

func containerInfo(v *view.Container, spec json.RawMessage) (map[string]string, error) {
	spec = validJSON(spec)
	return verbose(struct {
		SandboxID      string               `json:"sandboxID"`
		PID            int                  `json:"pid"`
		Privileged     bool                 `json:"privileged"`
		RuntimeHandler string               `json:"runtimeHandler"`
		Bundle         string               `json:"bundle"`
		Config         *cri.ContainerConfig `json:"config"`
		RuntimeSpec    json.RawMessage      `json:"runtimeSpec"`
	}{v.SandboxID, v.PID, v.Config.GetLinux().GetSecurityContext().GetPrivileged(), v.Handler, v.Bundle, v.Config, spec})
}

func imageInfo(spec *imagespec.Image, verdicts []verifier.Verdict) (map[string]string, error) {
	return verbose(withVerdicts(map[string]any{"imageSpec": spec}, verdicts))
}

func withVerdicts(document map[string]any, verdicts []verifier.Verdict) map[string]any {
	if len(verdicts) > 0 {
		document["verifiers"] = verdicts
	}
	return document
}

// artifactInfo lists the files of an artifact, which has no config.
func artifactInfo(image *storage.Image, verdicts []verifier.Verdict) (map[string]string, error) {
	type file struct {
		Path   string `json:"path"`
		Digest string `json:"digest"`
		Size   int64  `json:"size"`
	}
	var files []file
	for _, f := range image.Files {
		files = append(files, file{f.Path, f.Digest.String(), f.Size})
	}
	return verbose(withVerdicts(map[string]any{"artifactFiles": files}, verdicts))
}

func verbose(document any) (map[string]string, error) {
	text, err := json.Marshal(document)
	if err != nil {
		return nil, fmt.Errorf("verbose information: %w", err)
	}
	return map[string]string{"info": valid(string(text))}, nil
}

func hasLabels(labels, selector map[string]string) bool {
	for key, want := range selector {
		if got, ok := labels[key]; !ok || got != want {
			return false
		}
	}
	return true
}

func validAll(texts []string) []string {
	fixed := make([]string, len(texts))
	for i, text := range texts {
		fixed[i] = valid(text)
	}
	return fixed
}

func validMap(texts map[string]string) map[string]string {
	fixed := make(map[string]string, len(texts))
	for key, text := range texts {
		fixed[valid(key)] = valid(text)
	}
	return fixed
}

// nanos converts to CRI's time: 0 means none.
func nanos(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}
