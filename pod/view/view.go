// Package view holds what readers see of pods and containers: immutable snapshots,
// and events that carry them. Nothing here waits for a verb or for a reader.
package view

import (
	"sync/atomic"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Sandbox is what readers see of a pod: an immutable snapshot, replaced as
// a whole whenever a fact changes. Nothing reachable from it may be modified.
type Sandbox struct {
	ID        string
	Handler   string // RuntimeClass handler, never empty
	Asked     string // the handler that the request named; empty: none
	Config    *cri.PodSandboxConfig
	State     cri.PodSandboxState
	CreatedAt time.Time
	IPs       []string // primary first; empty for host network
	NetNS     string   // pinned network namespace; empty for host network
	Interface string   // that CNI made in NetNS
	PID       int      // infra container's init, 0 where there is none
	Memo      *Memo
}

// Container is what readers see of a container; immutable like Sandbox.
type Container struct {
	ID         string
	SandboxID  string
	Handler    string
	Config     *cri.ContainerConfig
	ImageID    string // Image.id, the same wherever CRI names the image (1.36)
	ImageRef   string // the image's digested name, its id where it has none
	State      cri.ContainerState
	CreatedAt  time.Time
	StartedAt  time.Time // zero until started
	FinishedAt time.Time // zero until exited
	ExitCode   int32
	Reason     string // Completed, Error, OOMKilled, ...: empty until exited
	Message    string
	LogReason  string // LogBlocked or LogDetached while it runs and its log lacks what it writes
	LogMessage string
	PID        int    // init as the host sees it, 0 unless created or running
	LogPath    string // absolute; empty: output is discarded
	Mounts     []*cri.Mount
	Resources  *cri.ContainerResources // in force now
	User       *cri.ContainerUser
	StopSignal cri.Signal
	Bundle     string // OCI bundle directory
	Memo       *Memo
}

// Started returns when the container was started, or created if it was not started.
func (v *Container) Started() time.Time {
	if v.StartedAt.IsZero() {
		return v.CreatedAt
	}
	return v.StartedAt
}

// Memo keeps what a reader has computed from a view, which stays valid as long as the view is
// shown. A nil Memo keeps nothing.
type Memo struct{ made atomic.Pointer[[]byte] }

// Get returns the result of the first successful call of produce. The caller must not modify
// it.
func (m *Memo) Get(produce func() ([]byte, error)) ([]byte, error) {
	if m == nil {
		return produce()
	}
	if made := m.made.Load(); made != nil {
		return *made, nil
	}
	made, err := produce()
	if err != nil {
		return nil, err
	}
	m.made.Store(&made) // concurrent readers have computed the same
	return made, nil
}

// RuntimeStatus is what readers see of the node's runtimes; immutable like Sandbox.
type RuntimeStatus struct {
	NotReady error                 // why containers of the default handler cannot be run; nil: they can
	Handlers []*cri.RuntimeHandler // that can be used, in an order that never changes
	Table    uint64                // version of the table of handlers

	CgroupDelegation bool // cgroup v2 with nsdelegate: containers may be given their cgroups
	Seccomp          bool // the kernel filters system calls
}

// NetworkStatus is what readers see of the node's network; immutable like Sandbox.
type NetworkStatus struct {
	NotReady error // why pods cannot be given a network; nil: they can, or Grace says why not
	Grace    error // why they cannot now, while the network still counts as ready; nil: they can
}
