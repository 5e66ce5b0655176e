package pod

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/oci"
)

// recordVersion changes when a record of the old form can no longer be read.
const recordVersion = 1

type phase string

const (
	phaseCreating phase = "creating"
	phaseReady    phase = "ready"    // pod
	phaseStopping phase = "stopping" // pod: dead, and its network is being given back
	phaseStopped  phase = "stopped"  // pod: everything but the record and the run directory is gone
	phaseCreated  phase = "created"  // container
	phaseStarting phase = "starting" // container: whether it started, the runtime knows
	phaseStarted  phase = "started"  // container
	phaseRemoving phase = "removing" // both: hidden from readers
)

// podPlan is what a pod is made of. It never changes and is read without a lock.
type podPlan struct {
	Handler    string
	Config     message[*cri.PodSandboxConfig]
	CreatedAt  time.Time
	BootID     string
	Namespaces ns.Spec
	Infra      bool // the pod has a container of its own
	// Sandboxed: the infra container holds the runtime's sandbox, in which all containers
	// run.
	Sandboxed bool `json:",omitempty"`
	// OwnFiles: its files are in a file system of their own, as those of pods from
	// before 0015-pod-files.md are not.
	OwnFiles bool `json:",omitempty"`
	// CgroupPrefix is what the name of its cgroup begins with; empty: crius.
	CgroupPrefix string `json:",omitempty"`
	// SELinuxLevel is the pod's own; empty: the node had no SELinux.
	SELinuxLevel string `json:",omitempty"`
}

// podState is what verbs change of a pod.
type podState struct {
	Phase phase
	// Network is planned before the ADD, completed by it, and nil again once
	// the DEL has succeeded: while it is not, the network needs a DEL.
	Network *network.Attachment `json:",omitempty"`
	// Overhead and Resources replace those of the plan's Config since an update.
	Overhead  message[*cri.LinuxContainerResources]
	Resources message[*cri.LinuxContainerResources]
}

// give notes what an update gives to the pod; nil leaves it as it was.
func (state *podState) give(overhead, resources *cri.LinuxContainerResources) {
	if overhead != nil {
		state.Overhead.M = overhead
	}
	if resources != nil {
		state.Resources.M = resources
	}
}

// podRecord is all that is on record of a pod.
type podRecord struct {
	podPlan
	podState
}

// config is the request as updates have changed it.
func (rec podRecord) config() *cri.PodSandboxConfig {
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

// containerPlan is what a container is made of. It never changes and is read
// without a lock.
type containerPlan struct {
	SandboxID string
	Handler   string
	Config    message[*cri.ContainerConfig]
	ImageID   string
	ImageRef  string
	CreatedAt time.Time
	BootID    string
	LogPath   string
	// CgroupsPath is spec.Linux.CgroupsPath, Cgroup the same below the mount.
	CgroupsPath string
	Cgroup      string
	MountLabel  string        `json:",omitempty"` // SELinux context of its files
	Volumes     []imageVolume `json:",omitempty"`
	StopSignal  cri.Signal    // as reported
	StopNumber  int           // as sent
}

// containerState is what verbs change of a container.
type containerState struct {
	Phase     phase
	StartedAt time.Time
	Resources message[*cri.LinuxContainerResources]
	User      message[*cri.ContainerUser]
	// StartError is why the container could not be started or, of one that is still
	// phaseCreated, why it cannot be: the runtime has nothing of that one.
	StartError string `json:",omitempty"`
}

// refused is why the runtime did not create the container, nil if it did.
func (state *containerState) refused() error {
	if state.Phase != phaseCreated || state.StartError == "" {
		return nil
	}
	return &oci.ProgramError{Message: state.StartError}
}

// containerRecord is all that is on record of a container but for its exit.
type containerRecord struct {
	containerPlan
	containerState
}

// message lets a protobuf message live in a JSON document in its own JSON
// form, which an operator can read.
type message[M proto.Message] struct{ M M }

func (m message[M]) MarshalJSON() ([]byte, error) {
	if !m.M.ProtoReflect().IsValid() {
		return []byte("null"), nil
	}
	text, err := protojson.Marshal(m.M)
	// protojson varies its white space on purpose; records should not.
	var compact bytes.Buffer
	if err == nil {
		err = json.Compact(&compact, text)
	}
	return compact.Bytes(), err
}

func (m *message[M]) UnmarshalJSON(text []byte) error {
	var typed M
	if string(text) == "null" {
		return nil
	}
	m.M = typed.ProtoReflect().New().Interface().(M)
	return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(text, m.M)
}

// podName and containerName are what the kubelet may ask for once at a time.
type podName struct {
	Namespace, Name, UID string
	Attempt              uint32
}

func nameOfPod(m *cri.PodSandboxMetadata) podName {
	return podName{m.GetNamespace(), m.GetName(), m.GetUid(), m.GetAttempt()}
}

func (n podName) String() string {
	return fmt.Sprintf("%s/%s (uid %s, attempt %d)", n.Namespace, n.Name, n.UID, n.Attempt)
}

type containerName struct {
	SandboxID, Name string
	Attempt         uint32
}

func nameOfContainer(sandboxID string, m *cri.ContainerMetadata) containerName {
	return containerName{sandboxID, m.GetName(), m.GetAttempt()}
}

func (n containerName) String() string {
	return fmt.Sprintf("%s (attempt %d) of pod %.13s", n.Name, n.Attempt, n.SandboxID)
}

// request identifies a piece of work: the same name with another content is
// another request, and must not be taken for a retry of the first.
type request struct {
	name    any
	content [sha256.Size]byte
}

func requestOf(name any, parts ...proto.Message) (request, error) {
	h := sha256.New()
	for _, part := range parts {
		text, err := proto.MarshalOptions{Deterministic: true}.Marshal(part)
		if err != nil {
			return request{}, err
		}
		fmt.Fprintf(h, "%d\n", len(text))
		h.Write(text)
	}
	return request{name: name, content: [sha256.Size]byte(h.Sum(nil))}, nil
}

// bootID changes with every boot of the machine.
func bootID() (string, error) {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return string(bytes.TrimSpace(text)), err
}
