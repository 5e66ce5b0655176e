package network

import (
	"encoding/json"
	"fmt"
	"net/netip"

	"github.com/containernetworking/cni/libcni"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

// The annotations by which Kubernetes limits a pod's traffic, in bits per
// second.
const (
	ingressBandwidth = "kubernetes.io/ingress-bandwidth"
	egressBandwidth  = "kubernetes.io/egress-bandwidth"
)

// capabilities are the arguments that some plugin of list asks for by
// "capabilities", by the conventions of CNI (its CONVENTIONS.md).
func (n *Network) capabilities(p Pod, list *libcni.NetworkConfigList) (map[string]json.RawMessage, error) {
	offers, err := n.offers(p)
	if err != nil {
		return nil, err
	}
	var taken map[string]json.RawMessage
	for _, plugin := range list.Plugins {
		for name, asked := range plugin.Network.Capabilities {
			offer, ok := offers[name]
			if !asked || !ok {
				continue
			}
			text, err := json.Marshal(offer)
			if err != nil {
				return nil, fmt.Errorf("capability %s: %w", name, err)
			}
			if taken == nil {
				taken = map[string]json.RawMessage{}
			}
			taken[name] = text
		}
	}
	return taken, nil
}

// offers are all capability arguments that there are for p. They are checked
// whether or not a plugin asks for them: what is wrong with a pod does not
// depend on the network.
func (n *Network) offers(p Pod) (map[string]any, error) {
	offers := map[string]any{}
	ports, err := portMappings(p.PortMappings)
	if err != nil {
		return nil, err
	}
	if len(ports) > 0 {
		offers["portMappings"] = ports
	}
	limits, err := bandwidthOf(p.Annotations)
	if err != nil {
		return nil, err
	}
	if limits != (bandwidth{}) {
		offers["bandwidth"] = limits
	}
	if d := p.DNS; d != nil {
		offers["dns"] = dns{d.GetServers(), d.GetSearches(), d.GetOptions()}
	}
	if cidrs := n.announced(); len(cidrs) > 0 {
		var ranges [][]ipRange // one set for each: a pod gets an address of every set
		for _, cidr := range cidrs {
			ranges = append(ranges, []ipRange{{cidr}})
		}
		offers["ipRanges"] = ranges
	}
	if p.CgroupParent != "" {
		offers["cgroupPath"] = p.CgroupParent
	}
	if len(p.Annotations) > 0 {
		offers["io.kubernetes.cri.pod-annotations"] = p.Annotations
	}
	return offers, nil
}

type dns struct {
	Servers  []string `json:"servers,omitempty"`
	Searches []string `json:"searches,omitempty"`
	Options  []string `json:"options,omitempty"`
}

type ipRange struct {
	Subnet string `json:"subnet"`
}

type portMapping struct {
	HostPort      int32  `json:"hostPort"`
	ContainerPort int32  `json:"containerPort"`
	Protocol      string `json:"protocol"`
	HostIP        string `json:"hostIP,omitempty"`
}

// portMappings are those that want a port of the host; with 0 a container just
// says which port it serves.
func portMappings(wanted []*cri.PortMapping) ([]portMapping, error) {
	var ports []portMapping
	for _, w := range wanted {
		if w.GetHostPort() == 0 {
			continue
		}
		if !isPort(w.GetHostPort()) || !isPort(w.GetContainerPort()) {
			return nil, fmt.Errorf("%w: port mapping from %d to %d: ports go from 1 to 65535", fault.Invalid, w.GetHostPort(), w.GetContainerPort())
		}
		p := portMapping{HostPort: w.GetHostPort(), ContainerPort: w.GetContainerPort()}
		switch w.GetProtocol() {
		case cri.Protocol_TCP:
			p.Protocol = "tcp"
		case cri.Protocol_UDP:
			p.Protocol = "udp"
		case cri.Protocol_SCTP:
			p.Protocol = "sctp"
		default:
			return nil, fmt.Errorf("%w: port mapping from %d: unknown protocol %d", fault.Invalid, w.GetHostPort(), w.GetProtocol())
		}
		if w.GetHostIp() != "" {
			ip, err := netip.ParseAddr(w.GetHostIp())
			if err != nil || ip.Zone() != "" {
				return nil, fmt.Errorf("%w: port mapping from %d: %.128q is not an IP address", fault.Invalid, w.GetHostPort(), w.GetHostIp())
			}
			p.HostIP = ip.String()
		}
		ports = append(ports, p)
	}
	return ports, nil
}

func isPort(n int32) bool { return n > 0 && n <= 65535 }

// bandwidth is in bits, and bits per second.
type bandwidth struct {
	IngressRate  int64 `json:"ingressRate,omitempty"`
	IngressBurst int64 `json:"ingressBurst,omitempty"`
	EgressRate   int64 `json:"egressRate,omitempty"`
	EgressBurst  int64 `json:"egressBurst,omitempty"`
}

func bandwidthOf(annotations map[string]string) (bandwidth, error) {
	const anyBurst = 1<<31 - 1 // Kubernetes limits the rate only
	var b bandwidth
	for name, to := range map[string]struct{ rate, burst *int64 }{
		ingressBandwidth: {&b.IngressRate, &b.IngressBurst},
		egressBandwidth:  {&b.EgressRate, &b.EgressBurst},
	} {
		text, ok := annotations[name]
		if !ok || text == "" {
			continue
		}
		rate, err := quantity(text)
		if err != nil {
			return b, fmt.Errorf("%w: annotation %s: %w", fault.Invalid, name, err)
		}
		if rate < 1e3 || rate > 1e15 { // the bounds of Kubernetes
			return b, fmt.Errorf("%w: annotation %s: %.64q is not from 1k to 1P bits per second", fault.Invalid, name, text)
		}
		*to.rate, *to.burst = rate, anyBurst
	}
	return b, nil
}
