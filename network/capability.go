package network

import (
	"encoding/json"
	"fmt"

	"github.com/containernetworking/cni/libcni"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/network/hostport"
)

// The annotations by which Kubernetes limits a pod's traffic, in bits per
// second.
const (
	ingressBandwidth = "kubernetes.io/ingress-bandwidth"
	egressBandwidth  = "kubernetes.io/egress-bandwidth"
)

// capabilities returns the arguments that some plugin of list requests by
// "capabilities", by the conventions of CNI (its CONVENTIONS.md).
func capabilities(offers map[string]any, list *libcni.NetworkConfigList) (map[string]json.RawMessage, error) {
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

// offers returns all capability arguments for p; the plugins forward ports.
// They are checked whether or not a plugin requests them: an error in a pod
// does not depend on the network.
func (n *Network) offers(p Pod, ports []hostport.Mapping) (map[string]any, error) {
	offers := map[string]any{}
	if len(ports) > 0 {
		offers[portCapability] = ports
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
		var ranges [][]ipRange // one set for each: a pod gets an address from every set
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
			return b, fmt.Errorf("annotation %s: %w: %w", name, err, fault.Invalid)
		}
		if rate < 1e3 || rate > 1e15 { // Kubernetes' bounds
			return b, fmt.Errorf("annotation %s: %.64q is not from 1k to 1P bits per second: %w", name, text, fault.Invalid)
		}
		*to.rate, *to.burst = rate, anyBurst
	}
	return b, nil
}
