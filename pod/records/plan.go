package records

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/oci/tuning"
	"github.com/crius-run/crius/storage"
)

// PodPlan is what a pod is made from. It never changes and is read without a lock.
type PodPlan struct {
	Handler    string                         `json:"Handler"`
	Config     Message[*cri.PodSandboxConfig] `json:"Config"`
	CreatedAt  time.Time                      `json:"CreatedAt"`
	BootID     string                         `json:"BootID"`
	Namespaces ns.Spec                        `json:"Namespaces"`
	Infra      bool                           `json:"Infra"` // the pod has an infra container
	// Sandboxed: the infra container holds the runtime sandbox, in which all containers
	// run.
	Sandboxed bool `json:"Sandboxed,omitempty"`
	// OwnFiles: its files are in a file system of their own. Those of pods from before
	// 0015-pod-files.md are not.
	OwnFiles bool `json:"OwnFiles,omitempty"`
	// CgroupPrefix is what the name of its cgroup begins with; empty: crius.
	CgroupPrefix string `json:"CgroupPrefix,omitempty"`
	// ByDefault: the request named no handler. Requests for pods from before that was recorded
	// count as having named one.
	ByDefault bool `json:"ByDefault,omitempty"`
	// SELinuxLevel is the pod's own; empty: the node had no SELinux.
	SELinuxLevel string `json:"SELinuxLevel,omitempty"`
	// Origin is Handler as it was when the pod was made: its runtime serves the pod until the
	// pod is gone. nil: the pod is from before that was recorded.
	Origin *oci.Origin `json:"Origin,omitempty"`
}

// PodState is the part of a pod's record that verbs change.
type PodState struct {
	Phase Phase `json:"Phase"`
	// Restoring: the pod is made from a checkpoint, whose containers are not all created yet. The
	// next server removes it.
	Restoring bool `json:"Restoring,omitempty"`
	// Network is planned before the ADD, completed by it, and nil again once the DEL has
	// succeeded: until then the network needs a DEL.
	Network *network.Attachment `json:"Network,omitempty"`
	// IPs are the addresses of a network that has been released.
	IPs []string `json:"IPs,omitempty"`
	// Overhead and Resources replace those of the plan's Config since an update.
	Overhead  Message[*cri.LinuxContainerResources] `json:"Overhead"`
	Resources Message[*cri.LinuxContainerResources] `json:"Resources"`
}

// Reached returns Phase.
func (state PodState) Reached() Phase { return state.Phase }

// Give records the resources that an update assigns to the pod; nil keeps the former ones.
func (state *PodState) Give(overhead, resources *cri.LinuxContainerResources) {
	if overhead != nil {
		state.Overhead.M = overhead
	}
	if resources != nil {
		state.Resources.M = resources
	}
}

// HasNetwork reports whether the pod has a network that needs a DEL.
func (state PodState) HasNetwork() bool { return state.Network != nil }

// Pod is everything that is on record of a pod.
type Pod struct {
	PodPlan
	PodState
}

// Current returns the request with the changes that updates have made.
func (rec Pod) Current() *cri.PodSandboxConfig {
	if rec.Overhead.M == nil && rec.Resources.M == nil {
		return rec.Config.M
	}
	config := proto.CloneOf(rec.Config.M)
	if config.Linux == nil {
		config.Linux = &cri.LinuxPodSandboxConfig{}
	}
	if rec.Overhead.M != nil {
		config.Linux.Overhead = rec.Overhead.M
	}
	if rec.Resources.M != nil {
		config.Linux.Resources = rec.Resources.M
	}
	return config
}

// NeedsNetworkCgroup reports whether the pod needs an empty cgroup with its own id. cAdvisor,
// which takes crius for CRI-O, finds a pod's network only by that cgroup; CRI-O also creates it
// for pods without an infra container.
func (plan *PodPlan) NeedsNetworkCgroup() bool {
	return plan.CgroupPrefix == spec.CrioPrefix && plan.Namespaces.Net && !plan.Infra
}

// Hostname returns the pod's hostname, or the node's for a pod that shares its network.
func (plan *PodPlan) Hostname() (string, error) {
	if plan.Namespaces.UTS && plan.Namespaces.Hostname != "" {
		return plan.Namespaces.Hostname, nil
	}
	return os.Hostname()
}

// Pins returns the paths of the pod's pinned namespaces.
func (plan *PodPlan) Pins() []string {
	set := plan.Namespaces.Paths()
	var paths []string
	for _, path := range []string{set.User, set.Net, set.IPC, set.UTS} {
		if path != "" {
			paths = append(paths, path)
		}
	}
	return paths
}

// PodName identifies a pod to the kubelet: at most one pod at a time has it.
type PodName struct {
	Namespace, Name, UID string
	Attempt              uint32
}

// NameOfPod returns the name in a pod's metadata.
func NameOfPod(m *cri.PodSandboxMetadata) PodName {
	return PodName{m.GetNamespace(), m.GetName(), m.GetUid(), m.GetAttempt()}
}

func (n PodName) String() string {
	return fmt.Sprintf("%s/%s (uid %s, attempt %d)", n.Namespace, n.Name, n.UID, n.Attempt)
}

// Attached returns the networks of the pods that are ready in this boot according to their
// records.
func Attached(pods map[string]*Pod, boot string) map[string]*network.Attachment {
	live := map[string]*network.Attachment{}
	for id, rec := range pods {
		if rec.Phase == Ready && rec.Network != nil && rec.BootID == boot {
			live[id] = rec.Network
		}
	}
	return live
}

// ContainerPlan is what a container is made from. It never changes and is read without a lock.
type ContainerPlan struct {
	SandboxID string                        `json:"SandboxID"`
	Handler   string                        `json:"Handler"`
	Config    Message[*cri.ContainerConfig] `json:"Config"`
	ImageID   string                        `json:"ImageID"`
	ImageRef  string                        `json:"ImageRef"`
	CreatedAt time.Time                     `json:"CreatedAt"`
	BootID    string                        `json:"BootID"`
	LogPath   string                        `json:"LogPath"`
	// CgroupsPath is spec.Linux.CgroupsPath; Cgroup is its path below the cgroup mount.
	CgroupsPath string   `json:"CgroupsPath"`
	Cgroup      string   `json:"Cgroup"`
	MountLabel  string   `json:"MountLabel,omitempty"` // SELinux context of its files
	Volumes     []Volume `json:"Volumes,omitempty"`
	// Workload are the limits that the pod's workload or Tuning has set. No update changes
	// them.
	Workload Message[*cri.LinuxContainerResources] `json:"Workload,omitzero"`
	// Tuning is for a container that has CPUs of its own; nil: there is nothing to do.
	Tuning     *tuning.Plan `json:"Tuning,omitempty"`
	StopSignal cri.Signal   `json:"StopSignal"` // as reported
	StopNumber int          `json:"StopNumber"` // as sent
	// Origin is the pod's, for a container whose pod has lost its record.
	Origin *oci.Origin `json:"Origin,omitempty"`
	// Foreign is the architecture of the image, if this node's processor does not run it.
	Foreign string `json:"Foreign,omitempty"`
	// WritableSize is how many bytes its writable layer may have; 0: what the configuration says.
	WritableSize int64 `json:"WritableSize,omitempty"`
}

// ContainerState is the part of a container's record that verbs change.
type ContainerState struct {
	Phase     Phase                                 `json:"Phase"`
	StartedAt time.Time                             `json:"StartedAt"`
	Resources Message[*cri.LinuxContainerResources] `json:"Resources"`
	User      Message[*cri.ContainerUser]           `json:"User"`
	// StartError says why the container could not be started. If the container is still
	// Created, it says why it cannot be: the runtime does not know the container.
	StartError string `json:"StartError,omitempty"`
	// OOMKills is how many of the container's processes the OOM killer had killed when crius
	// sent SIGKILL. These kills did not end the container.
	OOMKills uint64 `json:"OOMKills,omitempty"`
	// OOMExec is the last command of an exec that ended as the OOM killer ends processes, while the
	// count of its kills rose; nil: there was none.
	OOMExec *OOMExec `json:"OOMExec,omitempty"`
	// Incomplete: it is being removed, and was never created.
	Incomplete bool `json:"Incomplete,omitempty"`
	// Checkpoint is one that was begun: the container may be frozen, and files of it may be left.
	// nil: there is none.
	Checkpoint *Checkpoint `json:"Checkpoint,omitempty"`
	// Annotations are the container's as NRI plugins have adjusted them; nil: they have not.
	Annotations map[string]string `json:"Annotations,omitempty"`
}

// OOMExec is what the server has seen of OOM kills when a command of an exec ended.
type OOMExec struct {
	Kills   uint64    `json:"Kills"` // in the container until then
	At      time.Time `json:"At"`
	Command string    `json:"Command"` // the program, without its directory
}

// Checkpoint is what an unfinished checkpoint has on the node, beside a directory that is the
// container's own.
type Checkpoint struct {
	Since  time.Time `json:"Since"`
	Cgroup string    `json:"Cgroup"` // of the runtime and criu
	// Names are unfinished files and directories in Dir, the caller's directory with that inode on
	// that device.
	Dir    string   `json:"Dir"`
	Device uint64   `json:"Device,omitempty"` // 0: unknown, in records of earlier versions
	Inode  uint64   `json:"Inode"`
	Names  []string `json:"Names,omitempty"`
}

// Reached returns Phase.
func (state ContainerState) Reached() Phase { return state.Phase }

// Refused returns why the runtime did not create the container, nil if it did.
func (state *ContainerState) Refused() error {
	if state.Phase != Created || state.StartError == "" {
		return nil
	}
	return &oci.ProgramError{Message: state.StartError}
}

// Container is everything that is on record of a container, except for its exit.
type Container struct {
	ContainerPlan
	ContainerState
}

// Volume is an image that a container mounts (KEP-4639).
type Volume struct {
	Mount   int    `json:"Mount"` // position among the request's mounts
	ImageID string `json:"ImageID"`
}

// StartErrorCode is the exit code that peers report for a program that could not be started.
const StartErrorCode = 128

// codeKilled is the exit code of a program that SIGKILL has ended, and of a shell that passes on
// such an end of its child.
const codeKilled = 137

// Ending returns how the container ended, in the words that the kubelet knows. It is OOMKilled
// only if the OOM killer ended it, as CRI says. The kernel does not tell which process it has
// killed: one kill that came before SIGKILL by crius, or before another exit code, was that of
// a child or of a command (k8s#140716), of which the message tells.
func (state *ContainerState) Ending(exit conmon.Exit) (code int32, reason, message string) {
	switch {
	case state.StartError != "":
		return StartErrorCode, "StartError", state.StartError
	case exit.Code == codeKilled && exit.OOMKills > state.OOMKills:
		return exit.Code, "OOMKilled", exit.Message
	case exit.Code == 0:
		reason = "Completed"
	default:
		reason = "Error"
	}
	message = exit.Message
	if exit.OOMKills > 0 {
		message = strings.TrimPrefix(message+"; "+otherKills(exit.OOMKills)+state.whenKilled(exit), "; ")
	}
	return exit.Code, reason, message
}

// whenKilled says by when the last kill had happened that was noticed. The kernel counts only: it
// reports neither the time nor the process.
func (state *ContainerState) whenKilled(exit conmon.Exit) string {
	kills, at, which := exit.OOMSeen.Kills, time.Unix(exit.OOMSeen.At, 0), ""
	if e := state.OOMExec; e != nil && e.Kills >= kills {
		kills, at = e.Kills, e.At
		which = fmt.Sprintf(", when the command %q of an exec ended with code %d", e.Command, codeKilled)
	}
	if kills == 0 {
		return ""
	}
	return fmt.Sprintf(": %d by %s%s", kills, at.UTC().Format(time.RFC3339), which)
}

func otherKills(n uint64) string {
	if n == 1 {
		return "the OOM killer killed 1 process of the container before it ended, not its first one"
	}
	return fmt.Sprintf("the OOM killer killed %d processes of the container before it ended, not its first one", n)
}

// ImagesInUse returns the root file systems of a container and its image volumes, with the
// fields that image references need.
func (plan *ContainerPlan) ImagesInUse(id string) []storage.Rootfs {
	held := []storage.Rootfs{{ID: id, ImageID: plan.ImageID}}
	for _, v := range plan.Volumes {
		held = append(held, storage.Rootfs{ID: v.RootID(id), ImageID: v.ImageID, ReadOnly: true})
	}
	return held
}

// RootID returns the volume's storage.Rootfs.ID.
func (v Volume) RootID(container string) string {
	return container + "-volume-" + strconv.Itoa(v.Mount)
}

// Mounts returns the mounts of the request, with the ids of the images that were mounted, as
// PullImage and Container.image_id have them (KEP-5365).
func (plan *ContainerPlan) Mounts() []*cri.Mount {
	asked := plan.Config.M.GetMounts()
	if len(plan.Volumes) == 0 {
		return asked
	}
	mounts := slices.Clone(asked)
	for _, v := range plan.Volumes {
		mounts[v.Mount] = proto.CloneOf(asked[v.Mount])
		mounts[v.Mount].Image.ImageRef = v.ImageID
	}
	return mounts
}

// ContainerName identifies a container to the kubelet: at most one container at a time
// has it.
type ContainerName struct {
	SandboxID, Name string
	Attempt         uint32
}

// NameOfContainer returns the name in the metadata of a container of a pod.
func NameOfContainer(sandboxID string, m *cri.ContainerMetadata) ContainerName {
	return ContainerName{sandboxID, m.GetName(), m.GetAttempt()}
}

func (n ContainerName) String() string {
	return fmt.Sprintf("%s (attempt %d) of pod %.13s", n.Name, n.Attempt, n.SandboxID)
}
