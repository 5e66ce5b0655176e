package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
)

// collectLimit is how long Collect, for which pods wait, may take.
var collectLimit = 10 * time.Second

// noCache makes libcni find no records of attachments: by default it would use
// those of other runtimes, and undo them.
const noCache = "/proc/crius-has-no-cni-cache"

// Live says what Collect must not touch.
type Live struct {
	// Attached returns the pods on record, with the interface of each. It is
	// called once no more pod can be attached.
	Attached func() (map[string]string, error)
	// Ours reports whether an id can only have been made by crius.
	Ours func(id string) bool
}

// Collect has the plugins remove what they still hold for pods that are gone:
// it calls the CNI verb GC for the networks of Config.ConfDir and dirs whose
// configuration has version 1.1.0 or later and no disableGC. It skips a network
// in which host-local holds an address for another runtime's pod: to the
// plugins, a pod that is not live is gone.
//
// A pod that was attached meanwhile would look gone as well. So Attach waits
// for Collect, which ends within collectLimit.
func (n *Network) Collect(ctx context.Context, dirs []string, live Live) error {
	var lists []*libcni.NetworkConfigList
	for _, list := range n.inForce(dirs) {
		if collects(list) {
			lists = append(lists, list)
		}
	}
	if len(lists) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, collectLimit, fmt.Errorf("the plugins took longer than %s: %w", collectLimit, fault.Timeout))
	defer cancel()
	defer n.holdAttach()()
	attached, err := live.Attached()
	if err != nil {
		return err
	}
	var errs []error
	for _, list := range lists {
		if err := n.collect(ctx, list, attached, live.Ours); err != nil {
			errs = append(errs, fmt.Errorf("collect garbage of network %q: %w", list.Name, err))
		}
	}
	return errors.Join(errs...)
}

func collects(list *libcni.NetworkConfigList) bool {
	known, err := version.GreaterThanOrEqualTo(list.CNIVersion, "1.1.0")
	return err == nil && known && !list.DisableGC
}

func (n *Network) collect(ctx context.Context, list *libcni.NetworkConfigList, attached map[string]string, ours func(id string) bool) error {
	for _, dir := range leaseDirs(list) {
		leases, err := leasesIn(dir, list)
		if err != nil {
			return err
		}
		for _, l := range leases {
			if _, known := attached[l.Owner]; !known && !ours(l.Owner) {
				slog.InfoContext(ctx, "network not garbage collected: another runtime may share it", "network", list.Name, "address", l.Address, "owner", l.Owner)
				return nil
			}
		}
	}
	args := &libcni.GCArgs{ValidAttachments: []types.GCAttachment{}} // plugins must not get null
	for id, link := range attached {
		args.ValidAttachments = append(args.ValidAttachments, types.GCAttachment{ContainerID: id, IfName: link})
	}
	return trace.Do(ctx, "CNI GC", func(ctx context.Context) error {
		return libcni.NewCNIConfigWithCacheDir(n.config().PluginDirs, noCache, &runner{}).GCNetworkList(ctx, list, args)
	})
}

// holdAttach makes Attach wait until release is called.
func (n *Network) holdAttach() (release func()) {
	done := make(chan struct{})
	n.mu.Lock()
	defer n.mu.Unlock()
	n.collecting = done
	return func() { close(done) }
}

// collected waits until no collection is under way.
func (n *Network) collected(ctx context.Context) error {
	n.mu.Lock()
	collecting := n.collecting
	n.mu.Unlock()
	if collecting == nil {
		return nil
	}
	select {
	case <-collecting:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
