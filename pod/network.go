package pod

import (
	"context"
	"log/slog"
	"net/netip"
	"path/filepath"

	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/network"
)

func (s *Sandbox) planNetwork() error {
	attachment, err := s.engine.deps.Network.Plan(s.networkPod())
	if err != nil {
		return err
	}
	s.Change(func(now *livePod) { now.Network = attachment })
	return nil
}

// attach gives the pod its network. The plan, which the record has held since the start of the
// creation, is on the disk before the ADD, so that a DEL is possible whatever happens: a lease
// may be on another machine, where only the record leads to it.
func (s *Sandbox) attach(ctx context.Context, onDisk func() error) error {
	if err := onDisk(); err != nil {
		return err
	}
	pod, plan := s.networkPod(), s.Now().Network
	done, err := s.engine.deps.Network.Attach(ctx, pod, plan)
	if err != nil {
		return err
	}
	s.Change(func(now *livePod) { now.Network = done })
	if len(done.HostPorts) > 0 {
		// The rules are made from the record.
		if err := s.Put(ctx); err != nil {
			return err
		}
		if err := s.engine.deps.Network.Expose(ctx, pod, done); err != nil {
			return err
		}
	}
	// The interfaces exist now, and plugins may have changed what the pod requests.
	return trace.Call(ctx, "set interface sysctls", func() error { return ns.SetNetworkSysctls(s.plan.Namespaces) })
}

// detach releases the network if the pod has one, and removes it from the state.
func (s *Sandbox) detach(ctx context.Context) error {
	a := s.Now().Network
	if a == nil {
		return nil
	}
	if err := s.engine.deps.Network.Detach(ctx, s.networkPod(), a); err != nil {
		s.Change(func(now *livePod) { now.detachErr = err })
		return err
	}
	s.Change(func(now *livePod) { now.Network, now.IPs = nil, a.IPs })
	return nil
}

// networkPod returns the pod as the network knows it.
func (s *Sandbox) networkPod() network.Pod {
	cfg := s.plan.Config.M
	meta := cfg.GetMetadata()
	return network.Pod{
		ID:           s.ID,
		Name:         meta.GetName(),
		Namespace:    meta.GetNamespace(),
		UID:          meta.GetUid(),
		NetNS:        s.plan.Namespaces.Paths().Net,
		CacheDir:     filepath.Join(s.engine.records.Pods.Path(s.ID), "cni"),
		PortMappings: cfg.GetPortMappings(),
		Annotations:  cfg.GetAnnotations(),
		DNS:          cfg.GetDnsConfig(),
		CgroupParent: cfg.GetLinux().GetCgroupParent(),
		OwnKernel:    s.plan.Sandboxed,
		ConfDir:      s.runtime.Handler().CNIConfDir,
	}
}

// ForwardedTo returns the pod to which TCP connections to an address of the node go by its host ports, empty if there is none.
func (e *Engine) ForwardedTo(to netip.AddrPort) (id string) {
	for _, s := range e.sandboxes.All() {
		if s.Now().Network != nil && network.Forwards(s.plan.Config.M.GetPortMappings(), to) {
			return s.ID
		}
	}
	return ""
}

// SetPodCIDR passes the node's pod CIDR to the network.
func (e *Engine) SetPodCIDR(cidr string) error { return e.deps.Network.SetPodCIDR(cidr) }

// CollectNetwork starts a background job in which the network plugins release what they hold
// for removed pods of this server. It is called when a server starts, after Recover.
func (e *Engine) CollectNetwork() {
	e.background.Go("collect garbage of networks", func() {
		ctx := e.background.Closing()
		if err := e.deps.Trace.Do(ctx, "collect", "networks", e.audit.CollectNetwork); err != nil {
			slog.WarnContext(ctx, "CNI plugins did not release everything they hold for removed pods, the next server start retries", "err", err)
		}
	})
}
