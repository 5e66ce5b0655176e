package pod

import (
	"context"

	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/nri"
	"github.com/crius-run/crius/pod/audit"
	"github.com/crius-run/crius/pod/profile"
	"github.com/crius-run/crius/pod/status"
	"github.com/crius-run/crius/pod/usage"
	"github.com/crius-run/crius/storage"
)

// Images is what the engine needs of storage.
type Images interface {
	status.Images
	usage.Images
	audit.Images
	Image(ctx context.Context, ref string) (*storage.Image, error)
	Pull(ctx context.Context, req storage.PullRequest) (*storage.Image, error)
	Admit(ctx context.Context, use storage.Use) error
	MountRootfs(ctx context.Context, r storage.Rootfs) error
	RemoveRootfs(ctx context.Context, r storage.Rootfs) error
	Remove(ctx context.Context, ref string) error
	Adopt(ctx context.Context, live []storage.Rootfs) error
}

// Network is what the engine needs of CNI and of host ports.
type Network interface {
	status.Network
	audit.Network
	Plan(p network.Pod) (*network.Attachment, error)
	Attach(ctx context.Context, p network.Pod, plan *network.Attachment) (*network.Attachment, error)
	Expose(ctx context.Context, p network.Pod, a *network.Attachment) error
	Detach(ctx context.Context, p network.Pod, a *network.Attachment) error
	SetPodCIDR(cidr string) error
	Unlock(ctx context.Context, netns string) error
	Load(live map[string]*network.Attachment)
}

// Deps are the engine's backends.
type Deps struct {
	Images   Images
	Profiles profile.Store
	Network  Network
	Runtimes status.Runtimes
	Trace    *trace.Tracer // follows the work; may be nil
	Plugins  *nri.Plugins  // observe and change pods and containers; may be nil
}
