package hostport

import (
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// The kernel translates the packets of a flow like the first one, for as long
// as it remembers the flow. A UDP client that keeps sending from one port keeps
// the flow alive for ever: its packets continue to go to a dead pod, or to no
// pod if there was none when it began. The same holds for SCTP, which repeats
// its INIT. TCP starts new flows by itself.

// Attributes of conntrack's netlink messages that x/sys does not have
// (linux/netfilter/nfnetlink_conntrack.h).
const (
	ctGet    = 1
	ctDelete = 2

	ctTupleOrig  = 1
	ctTupleReply = 2
	ctID         = 12
	ctZone       = 18
	ctFilter     = 25

	ctTupleIP    = 1
	ctTupleProto = 2

	ctIP4Src, ctIP4Dst, ctIP6Src, ctIP6Dst     = 1, 2, 3, 4
	ctProtoNum, ctProtoSrcPort, ctProtoDstPort = 1, 2, 3

	ctFilterOrigFlags = 1
	ctFilterProtoNum  = 1 << 3
	ctFilterDstPort   = 1 << 5
)

// flow is a flow in the kernel's table.
type flow struct {
	to   end // destination of its first packet
	from end // source of its answers
	id   []attribute
}

// cutFlows deletes the kernel's UDP and SCTP flows to the host ports of pods
// that do not lead where they should now: those older than the mapping, and
// those to closed ends. Other flows, to other ports or to addresses of other
// nodes, stay. It is best effort: the mappings are right for every new flow.
func (t *Table) cutFlows(ctx context.Context, pods []Pod, closed map[end]bool) {
	for _, f := range families {
		ports := flowPorts(pods, f)
		if len(ports) == 0 {
			continue
		}
		if err := cut(f, ports, stale(leads(t.pods), closed, ownAddress(nodeAddresses))); err != nil {
			slog.WarnContext(ctx, "stale conntrack entries not flushed: existing flows may reach the wrong pod", "err", err)
		}
	}
}

// flowPorts returns the host ports of pods whose flows must be deleted.
func flowPorts(pods []Pod, f family) map[port]bool {
	ports := map[port]bool{}
	for _, p := range pods {
		if !slices.ContainsFunc(p.Targets, func(t Target) bool { return familyOf(t.IP) == f }) {
			continue
		}
		for _, m := range p.Mappings {
			if m.Protocol != "tcp" && slices.ContainsFunc(m.hosts(), func(a netip.Addr) bool { return familyOf(a) == f }) {
				ports[port{protocols[m.Protocol], m.HostPort}] = true
			}
		}
	}
	return ports
}

// port is a port of the node.
type port struct {
	protocol uint8
	number   uint16
}

// stale reports whether a flow must be deleted. A flow to a mapped host port
// must lead to the mapping's target; any other flow is ours only if it goes to
// a closed end.
func stale(leads func(end) (end, bool), closed map[end]bool, own func(netip.Addr) bool) func(flow) bool {
	return func(f flow) bool {
		if want, ok := leads(f.to); ok {
			return f.from != want && own(f.to.Addr())
		}
		return closed[f.from]
	}
}

// ownAddress returns a function that reports whether an address is this node's.
func ownAddress(list func() ([]netip.Addr, error)) func(netip.Addr) bool {
	own, _ := list() // without the list fewer flows are known to be ours
	return func(a netip.Addr) bool { return a.IsLoopback() || slices.Contains(own, a) }
}

// cut deletes the stale flows of a family to ports. The kernel walks through
// its whole table of flows to list them, so cut asks once for all ports.
func cut(f family, ports map[port]bool, stale func(flow) bool) error {
	var found []flow
	err := netfilter(unix.NFNL_SUBSYS_CTNETLINK, ctGet, unix.NLM_F_DUMP, f, selection(ports)...).ask(func(message []byte) {
		if one, ok := parseFlow(message); ok && ports[port{one.to.protocol, one.to.Port()}] && stale(one) {
			found = append(found, one)
		}
	})
	if err != nil {
		return err
	}
	for _, one := range found {
		err := netfilter(unix.NFNL_SUBSYS_CTNETLINK, ctDelete, unix.NLM_F_ACK, f, one.id...).ask(func([]byte) {})
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	return nil
}

// selection makes the kernel filter its answer as far as it can: a node may
// have a million flows. Kernels before Linux 5.8 ignore it and list all.
func selection(ports map[port]bool) []attribute {
	var first port
	sameProtocol, samePort := true, true
	for p := range ports {
		if first == (port{}) {
			first = p
		}
		sameProtocol = sameProtocol && p.protocol == first.protocol
		samePort = samePort && p.number == first.number
	}
	if !sameProtocol {
		return nil
	}
	proto := []attribute{{ctProtoNum, []byte{first.protocol}}}
	flags := uint32(ctFilterProtoNum)
	if samePort {
		proto = append(proto, attribute{ctProtoDstPort, binary.BigEndian.AppendUint16(nil, first.number)})
		flags |= ctFilterDstPort
	}
	return []attribute{
		nested(ctTupleOrig, nested(ctTupleProto, proto...)),
		nested(ctFilter, attribute{ctFilterOrigFlags, binary.NativeEndian.AppendUint32(nil, flags)}),
	}
}

// parseFlow parses a conntrack message.
func parseFlow(message []byte) (flow, bool) {
	if len(message) < nfHeader {
		return flow{}, false
	}
	all := unpack(message[nfHeader:])
	var out flow
	var ok1, ok2 bool
	_, out.to, ok1 = parseTuple(all[ctTupleOrig])
	out.from, _, ok2 = parseTuple(all[ctTupleReply])
	for _, kind := range []uint16{ctTupleOrig, ctZone, ctID} {
		if data, ok := all[kind]; ok {
			if kind == ctTupleOrig {
				kind |= unix.NLA_F_NESTED
			}
			out.id = append(out.id, attribute{kind, slices.Clone(data)})
		}
	}
	return out, ok1 && ok2
}

func parseTuple(data []byte) (source, destination end, ok bool) {
	tuple := unpack(data)
	ips, proto := unpack(tuple[ctTupleIP]), unpack(tuple[ctTupleProto])
	if len(proto[ctProtoNum]) != 1 {
		return source, destination, false
	}
	at := func(ip4, ip6, port uint16) (end, bool) {
		ip := ips[ip4]
		if ip == nil {
			ip = ips[ip6]
		}
		address, ok := netip.AddrFromSlice(ip)
		if !ok || len(proto[port]) != 2 {
			return end{}, false
		}
		return end{proto[ctProtoNum][0], netip.AddrPortFrom(address, binary.BigEndian.Uint16(proto[port]))}, true
	}
	source, ok1 := at(ctIP4Src, ctIP6Src, ctProtoSrcPort)
	destination, ok2 := at(ctIP4Dst, ctIP6Dst, ctProtoDstPort)
	return source, destination, ok1 && ok2
}
