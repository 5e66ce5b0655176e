package hostport

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// tableName is the name of our tables, one per family.
const tableName = "crius-hostports"

// family is a family of nftables.
type family string

const (
	ip4 family = "ip"
	ip6 family = "ip6"
)

var families = []family{ip4, ip6}

func familyOf(a netip.Addr) family {
	if a.Is4() {
		return ip4
	}
	return ip6
}

func unspecified(f family) netip.Addr {
	if f == ip6 {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}

// chains are the rules, which are the same for any number of pods. Two tables
// and not one of the family inet: its NAT wants Linux 5.2, theirs 4.18 (where
// NAT of nftables and of iptables-legacy can be in force at the same time).
//
// Translated is only what is addressed to the node itself. Otherwise a pod with
// a host_ip of another node would catch the node's and the pods' traffic to it. That is
// a set and not the routing table's type local, which every Service has on a
// node whose kube-proxy uses IPVS (see nodeAddresses).
//
// The priorities are one before those of the others, so that it does not depend
// on the order of restarts who is asked first.
const chains = `	chain translate {
		meta l4proto . th dport . iifname @near meta mark set meta mark | 0x2000
		dnat to FAMILY daddr . meta l4proto . th dport map @addresses
		dnat to meta l4proto . th dport map @ports
	}
	chain arriving {
		type nat hook prerouting priority -101; policy accept;
		meta l4proto { 6, 17, 132 } FAMILY daddr @node jump translate
	}
	chain local {
		type nat hook output priority -101; policy accept;
		meta l4proto { 6, 17, 132 } FAMILY daddr @node jump translate
		LOOPBACK
	}
	chain leaving {
		type nat hook postrouting priority 99; policy accept;
		meta mark & 0x2000 == 0x2000 ct status & dnat == dnat masquerade
		LOCALHOST
	}
`

// Sets and maps, and what they are for:
//
//	addresses  mappings of one address of the node
//	ports      mappings of all addresses
//	node       the node's own addresses
//	near       what comes in by the pod's own link: the pod itself, and its
//	           neighbours on a bridge. They would get the answer past the
//	           node, from an address that they did not ask; so the node asks
//	           in its own name. The mark that says so is the one of the portmap
//	           plugin, and is set on nothing else.
const sets = `	map addresses { type ADDR . inet_proto . inet_service : ADDR . inet_service; }
	map ports { type inet_proto . inet_service : ADDR . inet_service; }
	set node { type ADDR; }
	set near { type inet_proto . inet_service . ifname; }
`

// localhost and guard are what IPv4 needs for connections from 127.0.0.1. Their
// packets leave by a link with route_localnet, under an address of the node.
// With route_localnet that link would also let its neighbours in to what
// listens on 127.0.0.1 (CVE-2020-8558), so that is dropped before any
// translation: a packet from outside never rightly has such an address.
const (
	loopback  = "meta l4proto { 6, 17, 132 } ip daddr 127.0.0.0/8 jump translate"
	localhost = "oifname @links ip saddr 127.0.0.0/8 masquerade"
	guard     = `	set links { type ifname; }
	chain guard {
		type filter hook prerouting priority -300; policy accept;
		iifname @links ip daddr 127.0.0.0/8 drop
		iifname @links ip saddr 127.0.0.0/8 drop
	}
`
)

// skeleton is a table without elements.
func skeleton(f family) string {
	words := strings.NewReplacer("FAMILY", "ip", "ADDR", "ipv4_addr", "LOOPBACK", loopback, "LOCALHOST", localhost)
	text := sets + guard + chains
	if f == ip6 {
		words = strings.NewReplacer("FAMILY", "ip6", "ADDR", "ipv6_addr", "\t\tLOOPBACK\n", "", "\t\tLOCALHOST\n", "")
		text = sets + chains
	}
	return fmt.Sprintf("table %s %s {\n%s}\n", f, tableName, words.Replace(text))
}

// element is an element of one of our sets or maps.
type element struct {
	family     family
	set        string
	key, value string // value: of a map
}

func (e element) String() string {
	text := e.key
	if e.value != "" {
		text += " : " + e.value
	}
	return fmt.Sprintf("element %s %s %s { %s }\n", e.family, tableName, e.set, text)
}

// protocols are the numbers of IANA: a node may lack the file with the names.
var protocols = map[string]uint8{"tcp": 6, "udp": 17, "sctp": 132}

// elements are all that the pods need on a node with these addresses. Mappings
// of a family that a pod has no address of have none. Should two pods have one
// port on record, it leads to the first by id: one bad pair must not cost all
// others theirs.
func elements(pods map[string]Pod, node []netip.Addr) map[element]bool {
	all := elementSet{map[element]bool{}, map[element]bool{}}
	for _, id := range slices.Sorted(maps.Keys(pods)) {
		p := pods[id]
		for _, target := range p.Targets {
			f := familyOf(target.IP)
			for _, m := range p.Mappings {
				for _, host := range m.hosts() {
					if familyOf(host) == f {
						m.elements(all, host, target)
					}
				}
			}
		}
		for _, link := range p.localLinks() {
			all.add(element{ip4, "links", quoted(link), ""})
		}
	}
	needed := familiesOf(all.elements)
	for _, address := range node {
		if f := familyOf(address); slices.Contains(needed, f) {
			all.add(element{f, "node", address.String(), ""})
		}
	}
	return all.elements
}

// elementSet is elements with different keys.
type elementSet struct{ elements, keys map[element]bool }

func (s elementSet) add(e element) {
	key := e
	key.value = ""
	if !s.keys[key] {
		s.keys[key], s.elements[e] = true, true
	}
}

// elements adds what one host address of a mapping needs.
func (m Mapping) elements(all elementSet, host netip.Addr, target Target) {
	f := familyOf(host)
	port := fmt.Sprintf("%d . %d", protocols[m.Protocol], m.HostPort)
	end := fmt.Sprintf("%s . %d", target.IP, m.ContainerPort)
	if host.IsUnspecified() {
		all.add(element{f, "ports", port, end})
	} else {
		all.add(element{f, "addresses", host.String() + " . " + port, end})
	}
	if target.Link != "" {
		all.add(element{f, "near", port + " . " + quoted(target.Link), ""})
	}
}

// localLinks are the links over which 127.0.0.1 leads to the pod.
func (p Pod) localLinks() []string {
	local := slices.ContainsFunc(p.Mappings, func(m Mapping) bool {
		return slices.ContainsFunc(m.hosts(), func(a netip.Addr) bool {
			return a == netip.IPv4Unspecified() || a.Is4() && a.IsLoopback()
		})
	})
	var links []string
	for _, target := range p.Targets {
		if local && target.IP.Is4() && target.Link != "" {
			links = append(links, target.Link)
		}
	}
	return links
}

// ends are where the mappings of pods lead.
func ends(pods []Pod) map[end]bool {
	all := map[end]bool{}
	for _, p := range pods {
		for _, target := range p.Targets {
			for _, m := range p.Mappings {
				all[end{protocols[m.Protocol], netip.AddrPortFrom(target.IP, m.ContainerPort)}] = true
			}
		}
	}
	return all
}

// end is one end of a flow.
type end struct {
	protocol uint8
	netip.AddrPort
}

// leads is where the pods' mappings lead what is addressed to a host address
// and port.
func leads(pods map[string]Pod) func(to end) (end, bool) {
	all := map[end]end{}
	for _, p := range pods {
		for _, target := range p.Targets {
			for _, m := range p.Mappings {
				for _, host := range m.hosts() {
					if host.Is4() == target.IP.Is4() {
						n := protocols[m.Protocol]
						all[end{n, netip.AddrPortFrom(host, m.HostPort)}] = end{n, netip.AddrPortFrom(target.IP, m.ContainerPort)}
					}
				}
			}
		}
	}
	return func(to end) (end, bool) {
		if found, ok := all[to]; ok {
			return found, true
		}
		found, ok := all[end{to.protocol, netip.AddrPortFrom(unspecified(familyOf(to.Addr())), to.Port())}]
		return found, ok
	}
}

// familiesOf are the families that elements are of.
func familiesOf(all map[element]bool) []family {
	var present []family
	for _, f := range families {
		for e := range all {
			if e.family == f {
				present = append(present, f)
				break
			}
		}
	}
	return present
}

// delta is the script that makes want of have.
func delta(have, want map[element]bool) string {
	return lines("delete ", have, want) + lines("add ", want, have)
}

// lines are the elements that are in all but not in those without.
func lines(verb string, all, without map[element]bool) string {
	var out []string
	for e := range all {
		if !without[e] {
			out = append(out, verb+e.String())
		}
	}
	slices.Sort(out)
	return strings.Join(out, "")
}

// refill is the script that makes our tables consist of want and keeps the
// tables, chains, sets and maps that there are: with new ones a packet can meet
// the old chain when it is not in force any more, having passed the new one
// when it was not yet. A family without an element needs no table.
func refill(there []family, want map[element]bool) string {
	var script strings.Builder
	needed := familiesOf(want)
	for _, f := range there {
		verb := "delete"
		if slices.Contains(needed, f) {
			verb = "flush"
		}
		fmt.Fprintf(&script, "%s table %s %s\n", verb, f, tableName)
	}
	for _, f := range needed {
		script.WriteString(skeleton(f))
		if !slices.Contains(there, f) {
			continue
		}
		fmt.Fprintf(&script, "flush map %[1]s %[2]s addresses\nflush map %[1]s %[2]s ports\nflush set %[1]s %[2]s node\nflush set %[1]s %[2]s near\n", f, tableName)
		if f == ip4 {
			fmt.Fprintf(&script, "flush set %s %s links\n", f, tableName)
		}
	}
	script.WriteString(lines("add ", want, nil))
	return script.String()
}

// replace is the script that makes new tables in the place of those that there
// are.
func replace(there []family, want map[element]bool) string {
	var script strings.Builder
	for _, f := range there {
		fmt.Fprintf(&script, "delete table %s %s\n", f, tableName)
	}
	script.WriteString(refill(nil, want))
	return script.String()
}

func quoted(link string) string { return `"` + link + `"` }
