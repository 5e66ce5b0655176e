package server

import (
	"context"
	"encoding/json"
	"time"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/usage"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/storage"
)

// Engine runs pods and containers; *pod.Engine is the one there is.
//
// Ids are full or unique prefixes. Errors wrap a sentinel of internal/fault.
// Requests passed in have been validated here and belong to the Engine from
// then on. Views handed out are immutable; lists of them are snapshots in any
// order, since the kubelet and crictl both sort by creation time themselves.
type Engine interface {
	// RunSandbox runs a pod under handler ("" is the default one). An unknown
	// handler is fault.NotFound or fault.Invalid, naming those that exist.
	RunSandbox(ctx context.Context, handler string, cfg *cri.PodSandboxConfig) (id string, err error)
	// StopSandbox and RemoveSandbox succeed on an id that is not known.
	StopSandbox(ctx context.Context, id string) error
	RemoveSandbox(ctx context.Context, id string) error
	// UpdateSandboxResources records the resources of the pod as a whole; nil keeps the
	// former ones.
	UpdateSandboxResources(ctx context.Context, id string, overhead, resources *cri.LinuxContainerResources) error
	Sandbox(id string) (*view.Sandbox, error)
	Sandboxes() []*view.Sandbox

	// CreateContainer gets the pod's configuration as the request repeats it,
	// nil if it did not.
	CreateContainer(ctx context.Context, sandboxID string, cfg *cri.ContainerConfig, sandboxCfg *cri.PodSandboxConfig) (id string, err error)
	StartContainer(ctx context.Context, id string) error
	// StopContainer and RemoveContainer succeed on an id that is not known.
	StopContainer(ctx context.Context, id string, grace time.Duration) error
	RemoveContainer(ctx context.Context, id string) error
	Container(id string) (*view.Container, error)
	Containers() []*view.Container
	UpdateContainerResources(ctx context.Context, id string, r *cri.LinuxContainerResources) error
	// ExecSync runs cmd to its end; timeout 0 is no limit. A command that had
	// to be killed for its time is fault.Timeout, which the kubelet takes for
	// a failed probe.
	ExecSync(ctx context.Context, id string, cmd []string, timeout time.Duration) (*oci.ExecResult, error)
	ReopenContainerLog(ctx context.Context, id string) error
	// RuntimeSpec is the container's config.json.
	RuntimeSpec(id string) (json.RawMessage, error)

	// SandboxContainers are a pod's containers, newest first.
	SandboxContainers(id string) ([]*view.Container, error)
	// PullImage reports a registry that cannot be reached as fault.Unavailable and
	// an image that the policy does not trust as storage.ErrSignature: the
	// kubelet tells users of both in words of its own.
	PullImage(ctx context.Context, req storage.PullRequest) (*storage.Image, error)
	// RemoveImage takes all names of the image away and succeeds where none is.
	RemoveImage(ctx context.Context, ref string) error

	// Listen begins to collect events.
	Listen() (*view.Listener, error)
	// StopEvents ends all listening, so that a server that stops need not wait for it.
	StopEvents()

	CgroupDriver() cri.CgroupDriver
	// SetPodCIDR gets one CIDR or, on a dual-stack node, two joined by a comma.
	SetPodCIDR(cidr string) error
}

// Status says what the node can do now; *status.Node is the one there is.
type Status interface {
	// Handlers lists the RuntimeClass handlers that can be used now.
	Handlers(ctx context.Context) []*cri.RuntimeHandler
	// RuntimeStatus and NetworkStatus say whether a pod could be run, without looking
	// for it in the call; while nothing has been looked at since they are the same
	// pointers.
	RuntimeStatus(ctx context.Context) (*view.RuntimeStatus, error)
	NetworkStatus(ctx context.Context) (*view.NetworkStatus, error)
}

// Usage measures pods and containers; *usage.Reader is the one there is.
type Usage interface {
	// ContainerStats and SandboxStats measure those that are wanted. They never
	// fail: what vanished meanwhile is missing, or has no values.
	ContainerStats(ctx context.Context, wanted func(*view.Container) bool) []*usage.ContainerStats
	SandboxStats(ctx context.Context, wanted func(*view.Sandbox) bool) []*usage.SandboxStats
	// Metrics measures all ready pods, in the same way; MetricOffers is what the
	// kernel can tell beyond what all do.
	Metrics(ctx context.Context, parts usage.MetricParts) []*usage.PodMetrics
	MetricOffers() cgroup.Offers
}

// Images is what images there are; *storage.Store is the one there is.
//
// Errors wrap a sentinel of internal/fault.
type Images interface {
	Images(ctx context.Context) ([]*storage.Image, error)
	// LookUp finds an image by its id, the unique beginning of that without "sha256:", a
	// tag, a digest or a short name: people ask with crictl, too. The error is
	// fault.NotFound, or fault.Invalid where ref is no reference at all.
	LookUp(ctx context.Context, ref string) (*storage.Image, error)
	// Spec is the whole config of an image, fault.NotFound of one that is gone.
	Spec(ctx context.Context, image *storage.Image) (*imagespec.Image, error)
	FsInfo(ctx context.Context) (images, containers storage.FsUsage, err error)
}
