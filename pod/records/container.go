package records

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/storage"
)

// ContainerPlan is what a container is made of. It never changes and is read
// without a lock.
type ContainerPlan struct {
	SandboxID string
	Handler   string
	Config    Message[*cri.ContainerConfig]
	ImageID   string
	ImageRef  string
	CreatedAt time.Time
	BootID    string
	LogPath   string
	// CgroupsPath is spec.Linux.CgroupsPath, Cgroup the same below the mount.
	CgroupsPath string
	Cgroup      string
	MountLabel  string     `json:",omitempty"` // SELinux context of its files
	Volumes     []Volume   `json:",omitempty"`
	StopSignal  cri.Signal // as reported
	StopNumber  int        // as sent
}

// ContainerState is what verbs change of a container.
type ContainerState struct {
	Phase     Phase
	StartedAt time.Time
	Resources Message[*cri.LinuxContainerResources]
	User      Message[*cri.ContainerUser]
	// StartError is why the container could not be started or, of one that is still
	// Created, why it cannot be: the runtime has nothing of that one.
	StartError string `json:",omitempty"`
}

// Refused is why the runtime did not create the container, nil if it did.
func (state *ContainerState) Refused() error {
	if state.Phase != Created || state.StartError == "" {
		return nil
	}
	return &oci.ProgramError{Message: state.StartError}
}

// Container is all that is on record of a container but for its exit.
type Container struct {
	ContainerPlan
	ContainerState
}

// Volume is an image that a container mounts (KEP-4639).
type Volume struct {
	Mount    int // position among the request's mounts
	ImageID  string
	ImageRef string // as ContainerPlan.ImageRef
}

// StartErrorCode is what peers report for a program that could not be started.
const StartErrorCode = 128

// Ending says how the container ended, in the words that the kubelet knows.
func (state *ContainerState) Ending(exit conmon.Exit) (code int32, reason, message string) {
	switch {
	case state.StartError != "":
		return StartErrorCode, "StartError", state.StartError
	case exit.Code == 0:
		return 0, "Completed", ""
	case exit.OOMKills > 0:
		return exit.Code, "OOMKilled", ""
	default:
		return exit.Code, "Error", exit.Message
	}
}

// ImagesInUse are the root file systems of a container and its volumes, as far as the
// holding of images is concerned.
func (plan *ContainerPlan) ImagesInUse(id string) []storage.Rootfs {
	held := []storage.Rootfs{{ID: id, ImageID: plan.ImageID}}
	for _, v := range plan.Volumes {
		held = append(held, storage.Rootfs{ID: v.RootID(id), ImageID: v.ImageID})
	}
	return held
}

// RootID is how storage knows the volume of a container.
func (v Volume) RootID(container string) string {
	return container + "-volume-" + strconv.Itoa(v.Mount)
}

// Mounts are the request's, with the images that were mounted.
func (plan *ContainerPlan) Mounts() []*cri.Mount {
	asked := plan.Config.M.GetMounts()
	if len(plan.Volumes) == 0 {
		return asked
	}
	mounts := slices.Clone(asked)
	for _, v := range plan.Volumes {
		mounts[v.Mount] = proto.CloneOf(asked[v.Mount])
		mounts[v.Mount].Image.ImageRef = v.ImageRef
	}
	return mounts
}

// ContainerName is what the kubelet may ask for once at a time.
type ContainerName struct {
	SandboxID, Name string
	Attempt         uint32
}

// NameOfContainer is the name in the metadata of a container of a pod.
func NameOfContainer(sandboxID string, m *cri.ContainerMetadata) ContainerName {
	return ContainerName{sandboxID, m.GetName(), m.GetAttempt()}
}

func (n ContainerName) String() string {
	return fmt.Sprintf("%s (attempt %d) of pod %.13s", n.Name, n.Attempt, n.SandboxID)
}
