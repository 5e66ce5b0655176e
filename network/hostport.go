package network

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/network/hostport"
)

// portCapability is the capability by which a plugin requests host ports (CNI's
// CONVENTIONS.md).
const portCapability = "portMappings"

// Values of Config.HostPorts.
const (
	portsByAuto  = "auto"
	portsByCrius = "crius"
	portsByCNI   = "cni"
)

// ownPorts reports whether crius forwards the host ports of a pod in the
// network of list. If plugins did so as well they would be translated twice.
func (n *Network) ownPorts(list *libcni.NetworkConfigList) bool {
	switch n.config().HostPorts {
	case portsByCrius:
		return true
	case portsByCNI:
		return false
	}
	for _, plugin := range list.Plugins {
		if plugin.Network.Capabilities[portCapability] {
			return false
		}
	}
	return true
}

// HostPortsReady returns why pods with host ports cannot be attached now although
// others can: fault.Unavailable if crius forwards host ports in the present network and
// the nft program is missing.
func (n *Network) HostPortsReady() error {
	chosen, err := n.choose()
	if err != nil || !n.ownPorts(chosen.list) {
		return nil //nolint:nilerr // Ready tells
	}
	return hostport.Installed()
}

// HostPortsBy says, for people, who forwards the host ports of new pods; "" if there is no usable
// configuration.
func (n *Network) HostPortsBy() string {
	chosen, err := n.choose()
	if err != nil {
		return ""
	}
	if n.ownPorts(chosen.list) {
		return "crius forwards host ports, checks its rules and restores them"
	}
	var plugins []string
	for _, plugin := range chosen.list.Plugins {
		if plugin.Network.Capabilities[portCapability] {
			plugins = append(plugins, plugin.Network.Type)
		}
	}
	if len(plugins) == 0 {
		return fmt.Sprintf("host ports are left to network %q (network.host_ports = %q): crius neither refuses ports in use nor restores rules", chosen.list.Name, portsByCNI)
	}
	return fmt.Sprintf("plugin %s of %s forwards host ports: crius neither refuses ports in use nor restores its rules; to have crius do it, set network.host_ports = %q",
		strings.Join(plugins, ", "), chosen.file, portsByCrius)
}

// Forwards reports whether TCP connections to an address of the node go to a pod with these port mappings, by crius's rules or by a
// plugin's.
func Forwards(wanted []*cri.PortMapping, to netip.AddrPort) bool {
	ports, err := portMappings(wanted)
	return err == nil && slices.ContainsFunc(ports, func(m hostport.Mapping) bool { return m.Covers(to) })
}

// portMappings returns the mappings with a host port; 0 only documents the port
// of a container.
func portMappings(wanted []*cri.PortMapping) ([]hostport.Mapping, error) {
	var ports []hostport.Mapping
	for _, w := range wanted {
		if w.GetHostPort() == 0 {
			continue
		}
		if !isPort(w.GetHostPort()) || !isPort(w.GetContainerPort()) {
			return nil, fmt.Errorf("port mapping from %d to %d: ports go from 1 to 65535: %w", w.GetHostPort(), w.GetContainerPort(), fault.Invalid)
		}
		p := hostport.Mapping{HostPort: uint16(w.GetHostPort()), ContainerPort: uint16(w.GetContainerPort())}
		switch w.GetProtocol() {
		case cri.Protocol_TCP:
			p.Protocol = "tcp"
		case cri.Protocol_UDP:
			p.Protocol = "udp"
		case cri.Protocol_SCTP:
			p.Protocol = "sctp"
		default:
			return nil, fmt.Errorf("port mapping from %d: unknown protocol %d: %w", w.GetHostPort(), w.GetProtocol(), fault.Invalid)
		}
		if w.GetHostIp() != "" {
			ip, err := netip.ParseAddr(w.GetHostIp())
			if err != nil || ip.Zone() != "" {
				return nil, fmt.Errorf("port mapping from %d: %.128q is not an IP address: %w", w.GetHostPort(), w.GetHostIp(), fault.Invalid)
			}
			p.HostIP = ip.Unmap()
		}
		ports = append(ports, p)
	}
	return ports, nil
}

func isPort(n int32) bool { return n > 0 && n <= 65535 }

// targets returns the first address of each family, with the links by which the
// node reaches them.
func targets(ips []string) ([]hostport.Target, error) {
	var all []hostport.Target
	seen := map[bool]bool{}
	for _, text := range ips {
		ip, err := netip.ParseAddr(text)
		if err != nil {
			return nil, fmt.Errorf("address of the pod: %w", err)
		}
		if seen[ip.Is4()] {
			continue
		}
		seen[ip.Is4()] = true
		link, err := hostport.LinkTo(ip)
		if err != nil {
			return nil, fmt.Errorf("host ports: %w", err)
		}
		all = append(all, hostport.Target{IP: ip, Link: link})
	}
	return all, nil
}

// Expose forwards a pod's host ports to it, unless CNI plugins do that in the
// pod's network. The Attachment is the one that Attach returned, and must
// already be on record. Detach ends the forwarding, whether or not Expose
// succeeds.
//
// The error is fault.Unavailable if the nft program is missing.
func (n *Network) Expose(ctx context.Context, p Pod, a *Attachment) error {
	if len(a.HostPorts) == 0 {
		return nil
	}
	for _, m := range a.HostPorts {
		if len(a.HostTargets) == 0 || m.HostIP.IsValid() && !a.reaches(m.HostIP) {
			// As other runtimes do: one manifest serves nodes of one and of two
			// families.
			slog.WarnContext(ctx, "host port not forwarded: the pod has no address of its IP family", "pod", p.ID, "port", m.String())
		}
	}
	if err := trace.Do(ctx, "open host ports", func(ctx context.Context) error { return n.ports.Open(ctx, a.exposed(p.ID)) }); err != nil {
		return fmt.Errorf("forward host ports to the pod: %w", err)
	}
	return nil
}

// Restore replaces the nftables rules for host ports with those of live, the attached
// pods by id. Until it succeeds, Ready tries again. It also releases addresses that a
// power cut has left without an owner.
func (n *Network) Restore(ctx context.Context, live map[string]*Attachment) error {
	if err := trace.Do(ctx, "release orphaned leases", n.dropLostLeases); err != nil {
		slog.WarnContext(ctx, "cannot release IP addresses that belong to no pod", "err", err)
	}
	restore := func(ctx context.Context) error { return n.ports.Restore(ctx, exposedPods(live)) }
	if err := trace.Do(ctx, "restore host ports", restore); err != nil {
		return fmt.Errorf("restore host ports: %w", err)
	}
	return nil
}

func (a *Attachment) exposed(id string) hostport.Pod {
	return hostport.Pod{ID: id, Mappings: a.HostPorts, Targets: a.HostTargets}
}

func (a *Attachment) reaches(host netip.Addr) bool {
	for _, target := range a.HostTargets {
		if target.IP.Is4() == host.Is4() {
			return true
		}
	}
	return false
}
