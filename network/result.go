package network

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"

	"github.com/crius-run/crius/internal/ns"
)

// addresses returns the IPs that result gives to the pod's interface, the
// primary one first. Those of the host's end, or of another interface in the
// pod, are not the pod's. If a plugin does not name the interface of an address
// it is the pod's.
// None is valid: a network of layer 2 alone has no addresses to give. But a result that lists
// interfaces must list the pod's.
func addresses(result types.Result, ifName, primary string) ([]string, error) {
	r, err := current.NewResultFromResult(result)
	if err != nil {
		return nil, fmt.Errorf("CNI result: %w", err)
	}
	var ours []*current.IPConfig
	for _, ip := range r.IPs {
		if ip == nil || len(ip.Address.IP) == 0 {
			continue
		}
		if i := ip.Interface; i != nil {
			if *i < 0 || *i >= len(r.Interfaces) || r.Interfaces[*i] == nil {
				return nil, fmt.Errorf("CNI result: address %s refers to interface %d, but the result has %d interfaces", ip.Address.IP, *i, len(r.Interfaces))
			}
			if at := r.Interfaces[*i]; at.Sandbox == "" || at.Name != ifName {
				continue
			}
		}
		ours = append(ours, ip)
	}
	named := func(i *current.Interface) bool { return i != nil && i.Sandbox != "" && i.Name == ifName }
	if len(ours) == 0 && len(r.Interfaces) > 0 && !slices.ContainsFunc(r.Interfaces, named) {
		return nil, fmt.Errorf("CNI result: interface %s is not among the pod's interfaces", ifName)
	}
	rank := func(ip *current.IPConfig) int {
		switch four := ip.Address.IP.To4() != nil; {
		case primary == "cni", four == (primary != "ipv6"):
			return 0
		}
		return 1
	}
	slices.SortStableFunc(ours, func(a, b *current.IPConfig) int { return rank(a) - rank(b) })
	var texts []string
	for _, ip := range ours {
		texts = append(texts, ip.Address.IP.String())
	}
	return texts, nil
}

// addressesOf returns what addresses does. If the result gives the pod's interface none, those that
// it has in the pod's network namespace, and the result elsewhere, are the pod's: some plugins in a
// list name the node's end of the link (containerd/cri#1544).
func addressesOf(result types.Result, netNS, ifName, primary string) ([]string, error) {
	ips, err := addresses(result, ifName, primary)
	if len(ips) > 0 {
		return ips, nil
	}
	r, rerr := current.NewResultFromResult(result)
	if rerr != nil || len(r.IPs) == 0 {
		return ips, err
	}
	var own addressSet
	looked := ns.Do(netNS, func() error {
		link, err := linkIndex(ifName)
		if err == nil {
			own, err = addressesOn(link)
		}
		return err
	})
	if looked != nil {
		return ips, err
	}
	moved := *r
	moved.IPs = nil
	for _, ip := range r.IPs {
		if ip == nil {
			continue
		}
		if a, ok := netip.AddrFromSlice(ip.Address.IP); ok && own.ips[a.Unmap()] {
			moved.IPs = append(moved.IPs, &current.IPConfig{Address: ip.Address})
		}
	}
	if len(moved.IPs) == 0 {
		return ips, err
	}
	return addresses(&moved, ifName, primary)
}

// encode returns result in the version of the configuration, which its plugins
// will understand at DEL. A result that they could not read there, such as an
// address without its IP, is an error: the pod could never be removed.
func encode(result types.Result, cniVersion string) (json.RawMessage, error) {
	converted, err := result.GetAsVersion(cniVersion)
	if err != nil {
		return nil, fmt.Errorf("CNI result: %w", err)
	}
	text, err := json.Marshal(converted)
	if err == nil {
		_, err = create.Create(cniVersion, text)
	}
	if err != nil {
		return nil, fmt.Errorf("CNI result: %w", err)
	}
	return text, nil
}
