package server

import (
	"context"
	"encoding/json"
	"time"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/pod/usage"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/storage"
	"github.com/crius-run/crius/storage/registry/verifier"
)

// Engine runs pods and containers; *pod.Engine is the only implementation.
//
// Ids are full or unique prefixes. Errors wrap a sentinel of internal/fault.
// Requests passed in have been validated here and belong to the Engine from
// then on. Returned views are immutable; lists of them are snapshots in any
// order, because the kubelet and crictl both sort by creation time themselves.
type Engine interface {
	// RunSandbox runs a pod under handler ("" is the default one). An unknown
	// handler is fault.NotFound or fault.Invalid, with the names of existing
	// ones.
	RunSandbox(ctx context.Context, handler string, cfg *cri.PodSandboxConfig) (id string, err error)
	// StopSandbox and RemoveSandbox succeed on an unknown id.
	StopSandbox(ctx context.Context, id string) error
	RemoveSandbox(ctx context.Context, id string) error
	// UpdateSandboxResources records the resources of the pod as a whole; nil
	// keeps the previous ones.
	UpdateSandboxResources(ctx context.Context, id string, overhead, resources *cri.LinuxContainerResources) error
	Sandbox(id string) (*view.Sandbox, error)
	Sandboxes() []*view.Sandbox

	// CreateContainer gets the pod's configuration as repeated in the request,
	// nil if it is not there.
	CreateContainer(ctx context.Context, sandboxID string, cfg *cri.ContainerConfig, sandboxCfg *cri.PodSandboxConfig) (id string, err error)
	StartContainer(ctx context.Context, id string) error
	// StopContainer and RemoveContainer succeed on an unknown id.
	StopContainer(ctx context.Context, id string, grace time.Duration) error
	RemoveContainer(ctx context.Context, id string) error
	Container(id string) (*view.Container, error)
	Containers() []*view.Container
	UpdateContainerResources(ctx context.Context, id string, r *cri.LinuxContainerResources) error
	// ExecSync runs cmd to its end; timeout 0 means no limit. A command that was
	// killed because its time was up is fault.Timeout, which the kubelet treats
	// as a failed probe.
	ExecSync(ctx context.Context, id string, cmd []string, timeout time.Duration) (*oci.ExecResult, error)
	ReopenContainerLog(ctx context.Context, id string) error
	// RuntimeSpec returns the container's config.json, with its limits as they are now.
	RuntimeSpec(id string) (json.RawMessage, error)
	// PodSpec returns the OCI spec of the pod itself.
	PodSpec(id string) (json.RawMessage, error)

	// CheckpointContainer writes an archive of a running container to an absolute
	// path that nothing has yet; timeout 0 means a limit of its own.
	// CheckpointSandbox writes several to an empty directory; ctx has a deadline.
	// A node that cannot do it is fault.Unimplemented, with words that the
	// kubelet's tests know.
	CheckpointContainer(ctx context.Context, id, location string, timeout time.Duration) error
	CheckpointSandbox(ctx context.Context, id, dir string, containers []string) error
	// RestoreSandbox makes a pod of such a directory, with all containers created; ctx has
	// a deadline.
	RestoreSandbox(ctx context.Context, req pod.RestoreRequest) (id string, err error)

	// SandboxContainers returns a pod's containers, newest first.
	SandboxContainers(id string) ([]*view.Container, error)
	// PullImage reports an unreachable registry as fault.Unavailable and an image
	// that the policy does not trust as storage.ErrSignature: the kubelet reports
	// both to users in its own words.
	PullImage(ctx context.Context, req storage.PullRequest) (*storage.Image, error)
	// RemoveImage removes all names of the image, and succeeds if there are none.
	RemoveImage(ctx context.Context, ref string) error

	// PullSecurityProfile pulls a seccomp profile, unless it is present (cached). What is wrong
	// with a reference or an artifact for good is fault.Invalid; other errors are those of
	// PullImage.
	PullSecurityProfile(ctx context.Context, req storage.PullRequest) (cached bool, err error)
	SecurityProfiles() []storage.Profile
	// RemoveSecurityProfile succeeds if there is no profile with the digest.
	RemoveSecurityProfile(ctx context.Context, digest string) error

	// Listen begins to collect events.
	Listen() (*view.Listener, error)
	// StopEvents ends all listeners, so that a stopping server need not wait for
	// them.
	StopEvents()

	CgroupDriver() cri.CgroupDriver
	// SetPodCIDR takes one CIDR or, on a dual-stack node, two joined by a comma.
	SetPodCIDR(cidr string) error
}

// Status reports what the node can do now; *status.Node is the only
// implementation.
type Status interface {
	// Handlers lists the RuntimeClass handlers that can be used now.
	Handlers(ctx context.Context) []*cri.RuntimeHandler
	// RuntimeStatus and NetworkStatus report whether a pod could be run, from the
	// last look, not one of their own; until the next look they return the same
	// pointers.
	RuntimeStatus(ctx context.Context) (*view.RuntimeStatus, error)
	NetworkStatus(ctx context.Context) (*view.NetworkStatus, error)
}

// Usage measures pods and containers; *usage.Reader is the only implementation.
type Usage interface {
	// ContainerStats and SandboxStats measure those for which wanted returns
	// true. They never fail: what vanished meanwhile is missing, or has no
	// values.
	ContainerStats(ctx context.Context, wanted func(*view.Container) bool) []*usage.ContainerStats
	SandboxStats(ctx context.Context, wanted func(*view.Sandbox) bool) []*usage.SandboxStats
	// Metrics measures all ready pods, in the same way; MetricOffers returns the
	// optional features of the kernel.
	Metrics(ctx context.Context, parts usage.MetricParts) []*usage.PodMetrics
	MetricOffers() cgroup.Offers
}

// Images looks up images; *storage.Store is the only implementation.
//
// Errors wrap a sentinel of internal/fault.
type Images interface {
	Images(ctx context.Context) ([]*storage.Image, error)
	// LookUp finds an image by its id, a unique prefix of that without "sha256:",
	// a tag, a digest or a short name: people ask with crictl, too. The error is
	// fault.NotFound, or fault.Invalid if ref is not a reference at all.
	LookUp(ctx context.Context, ref string) (*storage.Image, error)
	// Spec returns the complete config of an image, fault.NotFound if it is gone.
	Spec(ctx context.Context, image *storage.Image) (*imagespec.Image, error)
	// Verdicts returns what image verifiers said about an image, fault.NotFound if it is gone.
	Verdicts(ctx context.Context, image *storage.Image) ([]verifier.Verdict, error)
	FsInfo(ctx context.Context) (images, containers storage.FsUsage, err error)
}
