package pod

import (
	"context"

	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/nri"
	"github.com/crius-run/crius/pod/status"
	"github.com/crius-run/crius/storage"
)

// Images is what the engine needs of storage.
type Images interface {
	Image(ctx context.Context, ref string) (*storage.Image, error)
	Pull(ctx context.Context, req storage.PullRequest) (*storage.Image, error)
	Admit(ctx context.Context, use storage.Use) error
	MountRootfs(ctx context.Context, r storage.Rootfs) error
	RemoveRootfs(ctx context.Context, r storage.Rootfs) error
	Remove(ctx context.Context, ref string) error
	Adopt(ctx context.Context, live []storage.Rootfs) error
	Ready(ctx context.Context) error
	CheckMapping(userNS string) error
	WritableUsage(ctx context.Context, id string) (usage storage.FsUsage, ok bool)
	WritableSize() (storage.FsSize, error)
	Verify(ctx context.Context, live []storage.Rootfs) ([]storage.Defect, error)
}

// Network is what the engine needs of CNI and of host ports.
type Network interface {
	Plan(p network.Pod) (*network.Attachment, error)
	Attach(ctx context.Context, p network.Pod, plan *network.Attachment) (*network.Attachment, error)
	Expose(ctx context.Context, p network.Pod, a *network.Attachment) error
	Restore(ctx context.Context, live map[string]*network.Attachment) error
	Detach(ctx context.Context, p network.Pod, a *network.Attachment) error
	Ready(ctx context.Context) error
	SetPodCIDR(cidr string) error
	Collect(ctx context.Context, dirs []string, live network.Live) error

	Load(live map[string]*network.Attachment)
	Verify(pods []network.Attached) map[string][]network.Damage
	VerifyHostPorts(ctx context.Context) ([]string, error)
	Leases(attachments []*network.Attachment) (leases []network.Lease, opaque []string, err error)
	Release(ctx context.Context, p network.Pod, l network.Lease) error
}

// Deps are the engine's hands.
type Deps struct {
	Images   Images
	Network  Network
	Runtimes status.Runtimes
	Trace    *trace.Tracer // follows the work; nil: nobody does
	Plugins  *nri.Plugins  // follow and change pods and containers; nil: none
}
