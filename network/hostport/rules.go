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

// chains are the rules, which are the same for any number of pods. There are
// two tables instead of one of the family inet: NAT there needs Linux 5.2, in
// ip and ip6 only 4.18 (where NAT of nftables and of iptables-legacy can be
// active at the same time).
//
// Only packets addressed to the node itself are translated. Otherwise a pod
// with a foreign host_ip would receive the node's and the pods' traffic to it.
// The addresses are in a set instead of using the routing table's type local,
// because with kube-proxy's IPVS every Service has that type (see
// nodeAddresses).
//
// The priorities are one before those of other programs, so that precedence
// does not depend on the order of restarts.
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
//	near       packets from the pod's own link: from the pod itself, and from
//	           its neighbours on a bridge. The answer would bypass the node
//	           and come from an address that they did not contact; so the node
//	           masquerades these packets. The mark for that is the portmap
//	           plugin's, and is set on nothing else.
const sets = `	map addresses { type ADDR . inet_proto . inet_service : ADDR . inet_service; }
	map ports { type inet_proto . inet_service : ADDR . inet_service; }
	set node { type ADDR; }
	set near { type inet_proto . inet_service . ifname; }
`

// localhost and guard are what IPv4 needs for connections from 127.0.0.1. Their
// packets leave by a link with route_localnet, under an address of the node.
// With route_localnet that link would also let its neighbours reach services on
// 127.0.0.1 (CVE-2020-8558), so guard drops such packets before any
// translation: a packet from outside never legitimately has such an address.
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

// skeleton returns a table without elements.
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

// protocols are the numbers assigned by IANA: a node may lack the file with the
// names.
var protocols = map[string]uint8{"tcp": 6, "udp": 17, "sctp": 132}

// elements returns everything that the pods need on a node with these
// addresses. Mappings of a family in which a pod has no address yield none. If
// two pods have one port on record, it leads to the first by id: one bad pair
// must not cost all others theirs.
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

// localLinks returns the links over which 127.0.0.1 leads to the pod.
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

// ends returns the targets of the mappings of pods.
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

// leads returns a function that returns the target of what is addressed to a
// host address and port, by the pods' mappings.
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

// familiesOf returns the families of elements.
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

// delta returns the script that turns have into want.
func delta(have, want map[element]bool) string {
	return lines("delete ", have, want) + lines("add ", want, have)
}

// lines returns the elements of all that are not in without.
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

// refill returns the script that replaces all elements of our tables with want
// and keeps the existing tables, chains, sets and maps: with new ones a packet
// could pass the new chain before it is in force, and reach the old one after
// its end. A family without an element needs no table.
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

// replace returns the script that replaces the existing tables with new ones.
func replace(there []family, want map[element]bool) string {
	var script strings.Builder
	for _, f := range there {
		fmt.Fprintf(&script, "delete table %s %s\n", f, tableName)
	}
	script.WriteString(refill(nil, want))
	return script.String()
}

func quoted(link string) string { return `"` + link + `"` }
