// Package hostport forwards ports of the node to pods by its own nftables
// rules.
//
// The rules are derived from the mappings and the targets of the pods that the
// caller has on record, and never from what is in the kernel. They are in the
// tables "ip crius-hostports" and "ip6 crius-hostports", which belong to this
// package as a whole. The chains are the same for any number of pods; a pod
// adds and removes elements of maps, in one transaction. When the kernel's
// state is in doubt the tables are filled again, also in one transaction: no
// packet ever sees half of it, and existing connections continue.
//
// No socket is held on a host port. A mapping takes precedence over a process
// of the host that listens on the same port, as with CNI's portmap plugin.
//
// [::1] is not forwarded: the kernel accepts no packet for it from outside the
// loopback interface and has no route_localnet for IPv6. So clients are refused
// at once and try 127.0.0.1.
package hostport

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/crius-run/crius/internal/fault"
)

// Mapping is one port of the node that is forwarded to a pod. Its JSON form is that of
// CNI's capability "portMappings".
type Mapping struct {
	HostPort      uint16     `json:"hostPort"`
	ContainerPort uint16     `json:"containerPort"`
	Protocol      string     `json:"protocol"`        // tcp, udp or sctp
	HostIP        netip.Addr `json:"hostIP,omitzero"` // zero: all addresses of the node; unspecified: all of its family
}

// Target is an address of a pod, at most one per family, and the interface by
// which the node reaches it.
type Target struct {
	IP   netip.Addr `json:"ip"`
	Link string     `json:"link"`
}

// Pod is the input for the rules of a pod.
type Pod struct {
	ID       string
	Mappings []Mapping
	Targets  []Target // none: claimed, but not open
}

// Table is the node's host ports.
type Table struct {
	// mu is held during a transaction: the kernel does only one at a time.
	mu      sync.Mutex
	pods    map[string]Pod
	have    map[element]bool  // what the kernel has, unless unsure
	node    []netip.Addr      // addresses of the node to which have applies
	handles map[family]uint64 // of our tables; they change when another program replaces them
	unsure  bool
	told    string // the last problem logged by Check
}

// New returns a table without pods. It does not touch the kernel before Restore
// or Open.
func New() *Table { return &Table{pods: map[string]Pod{}} }

// Claim reserves host ports for a pod, which keeps them until Close. A port
// that another pod has is fault.Precondition: the scheduler keeps such pods
// apart, but not those that the kubelet reads from files. Without the nft
// program it is fault.Unavailable.
func (t *Table) Claim(id string, mappings []Mapping) error {
	if len(mappings) == 0 {
		return nil
	}
	if err := Installed(); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	taken := map[hostPort]string{}
	for _, other := range t.pods {
		for _, m := range other.Mappings {
			for _, p := range m.ports() {
				taken[p] = other.ID
			}
		}
	}
	for _, m := range mappings {
		for _, p := range m.ports() {
			if owner, ok := taken[p]; ok && owner != id {
				return fmt.Errorf("host port %s is already used by pod %s: %w", m, owner, fault.Precondition)
			}
		}
	}
	t.pods[id] = Pod{ID: id, Mappings: mappings}
	return nil
}

// Open makes the rules of a pod. Whether or not it succeeds, Close undoes it.
func (t *Table) Open(ctx context.Context, p Pod) error {
	ctx, cancel := limited(ctx)
	defer cancel()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pods[p.ID] = p
	if err := t.apply(ctx); err != nil {
		t.pods[p.ID] = Pod{ID: p.ID, Mappings: p.Mappings}
		return err
	}
	setLocalnet(ctx, p.localLinks(), true)
	t.cutFlows(ctx, []Pod{p}, nil)
	return nil
}

// Close removes the rules of a pod and releases its ports. It is idempotent, and needs
// no earlier Claim or Load of the pod. After any error the same call must be repeated
// until it succeeds, and until then the pod's addresses must not become another pod's.
func (t *Table) Close(ctx context.Context, p Pod) error {
	if len(p.Mappings) == 0 {
		return nil
	}
	ctx, cancel := limited(ctx)
	defer cancel()
	t.mu.Lock()
	defer t.mu.Unlock()
	known, claimed := t.pods[p.ID]
	delete(t.pods, p.ID)
	if len(known.Targets)+len(p.Targets) == 0 {
		return nil // only claimed: without a target there never was a rule
	}
	t.dropLocalnet(ctx, append(known.localLinks(), p.localLinks()...))
	if err := t.apply(ctx); err != nil {
		if claimed {
			t.pods[p.ID] = Pod{ID: p.ID, Mappings: p.Mappings} // not free for other pods yet
		}
		return err
	}
	gone := []Pod{known, p} // the same, or one of them has no targets
	t.cutFlows(ctx, gone, ends(gone))
	return nil
}

// Restore makes the kernel's rules those of pods, whatever they were: at the
// start of a server, from the records of the live pods. After an error Check,
// Open and Close try again.
func (t *Table) Restore(ctx context.Context, pods []Pod) error {
	ctx, cancel := limited(ctx)
	defer cancel()
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range pods {
		t.pods[p.ID] = p
	}
	t.unsure = true
	return t.rebuild(ctx)
}

// limited bounds a change with all its attempts, because others wait for it.
func limited(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, timeLimit, fmt.Errorf("updating the nftables rules took longer than %s: %w", timeLimit, fault.Timeout))
}

// checkLimit bounds what Check does, because its caller has more to check.
const checkLimit = 2 * time.Second

// Check checks that our tables still exist ("nft flush ruleset" deletes them) and
// creates them again if not. It costs two small requests to the kernel if they do, and
// nothing while there are no host ports. It does not wait for a transaction in
// progress, and logs what it cannot repair.
func (t *Table) Check(ctx context.Context) {
	if !t.mu.TryLock() {
		return
	}
	defer t.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, checkLimit)
	defer cancel()
	if !t.unsure {
		why := t.altered()
		if why == "" && !t.moved() {
			return
		}
		if why != "" {
			slog.WarnContext(ctx, "nftables rules of host ports changed by another program, rebuilding them", "why", why)
			t.unsure = true
		}
	}
	err := t.apply(ctx)
	if err != nil && err.Error() != t.told {
		slog.ErrorContext(ctx, "host ports not forwarded to their pods", "err", err)
	}
	t.told = ""
	if err != nil {
		t.told = err.Error()
	}
}

// altered returns how our tables differ from those that we made.
func (t *Table) altered() string {
	if len(t.handles) == 0 {
		return ""
	}
	now, err := tableHandles()
	for f, handle := range t.handles {
		if there, ok := now[f]; err == nil && (!ok || there != handle) {
			return fmt.Sprintf("table %s %s was removed or replaced", f, tableName)
		}
	}
	return ""
}

// moved reports whether the node has other addresses than the rules know.
func (t *Table) moved() bool {
	if len(t.have) == 0 {
		return false
	}
	node, err := nodeAddresses()
	return err == nil && !sameAddresses(node, t.node)
}

func sameAddresses(a, b []netip.Addr) bool {
	a, b = slices.Clone(a), slices.Clone(b)
	slices.SortFunc(a, netip.Addr.Compare)
	slices.SortFunc(b, netip.Addr.Compare)
	return slices.Equal(a, b)
}

// want returns what the kernel should have, on a node with these addresses.
func (t *Table) want() (all map[element]bool, node []netip.Addr, err error) {
	if len(t.pods) == 0 {
		return nil, nil, nil
	}
	if node, err = nodeAddresses(); err != nil {
		return nil, nil, fmt.Errorf("addresses of the node: %w", err)
	}
	return elements(t.pods, node), node, nil
}

// apply brings the kernel from its present state to that of the pods.
func (t *Table) apply(ctx context.Context) error {
	want, node, err := t.want()
	if err != nil {
		return err
	}
	if t.unsure || !slices.Equal(familiesOf(want), familiesOf(t.have)) {
		return t.rebuild(ctx)
	}
	script := delta(t.have, want)
	if script == "" {
		t.node = node
		return nil
	}
	if err := run(ctx, script); err != nil {
		if ctx.Err() != nil {
			t.unsure = true
			return err
		}
		// Another program may have changed the table.
		slog.DebugContext(ctx, "host port change failed, rebuilding the nftables tables", "err", err)
		return t.rebuild(ctx)
	}
	t.have, t.node = want, node
	return nil
}

// rebuild makes our tables what they should be, whatever they are.
func (t *Table) rebuild(ctx context.Context) error {
	t.unsure = true
	want, node, err := t.want()
	if err != nil {
		return err
	}
	before, err := tableHandles()
	if err != nil {
		return err
	}
	there := slices.Sorted(maps.Keys(before))
	if script := refill(there, want); script != "" {
		if err := run(ctx, script); err != nil {
			if ctx.Err() != nil {
				return err
			}
			// The tables may be from another version.
			if again := run(ctx, replace(there, want)); again != nil {
				return again
			}
			slog.WarnContext(ctx, "nftables tables of host ports unusable, replaced", "err", err)
		}
	}
	handles, err := tableHandles()
	if err != nil {
		return err
	}
	t.have, t.node, t.handles, t.unsure = want, node, handles, false
	all := slices.Collect(maps.Values(t.pods))
	for _, p := range all {
		setLocalnet(ctx, p.localLinks(), true)
	}
	t.cutFlows(ctx, all, nil)
	return nil
}

// dropLocalnet ends the translation of 127.0.0.1 on links that no pod needs any
// more, before the rule that guards them is removed.
func (t *Table) dropLocalnet(ctx context.Context, links []string) {
	for _, p := range t.pods {
		needed := p.localLinks()
		links = slices.DeleteFunc(links, func(l string) bool { return slices.Contains(needed, l) })
	}
	setLocalnet(ctx, links, false)
}

// String returns the mapping's host side, as in 0.0.0.0:80/tcp.
func (m Mapping) String() string {
	if !m.HostIP.IsValid() {
		return fmt.Sprintf("%d/%s", m.HostPort, m.Protocol)
	}
	return fmt.Sprintf("%s/%s", netip.AddrPortFrom(m.HostIP, m.HostPort), m.Protocol)
}

// hostPort is a combination that only one pod can have. A mapping of one
// address and one of all addresses do not conflict: the former takes
// precedence.
type hostPort struct {
	protocol string
	address  netip.AddrPort
}

func (m Mapping) ports() []hostPort {
	var ports []hostPort
	for _, host := range m.hosts() {
		ports = append(ports, hostPort{m.Protocol, netip.AddrPortFrom(host, m.HostPort)})
	}
	return ports
}

// hosts returns the host addresses of a mapping; the unspecified address of a
// family stands for all of it.
func (m Mapping) hosts() []netip.Addr {
	if m.HostIP.IsValid() {
		return []netip.Addr{m.HostIP}
	}
	return []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}
}

// Covers reports whether TCP connections to an address of the node are among those that the mapping forwards.
func (m Mapping) Covers(to netip.AddrPort) bool {
	return m.Protocol == "tcp" && m.HostPort == to.Port() && slices.ContainsFunc(m.hosts(), func(host netip.Addr) bool {
		return host == to.Addr() || host.IsUnspecified() && host.Is4() == to.Addr().Is4()
	})
}

// Validate returns what is wrong with the mappings of one pod; it is
// fault.Invalid.
func Validate(mappings []Mapping) error {
	ends := map[hostPort]uint16{}
	for _, m := range mappings {
		switch ip := m.HostIP; {
		case ip == netip.IPv6Loopback():
			return fmt.Errorf("host port %s: the kernel cannot forward [::1] to a pod; use host_ip 127.0.0.1: %w", m, fault.Invalid)
		case ip.IsMulticast():
			return fmt.Errorf("host port %s: host_ip is a multicast address: %w", m, fault.Invalid)
		}
		for _, p := range m.ports() {
			if end, ok := ends[p]; ok && end != m.ContainerPort {
				return fmt.Errorf("host port %s is mapped to both port %d and port %d of the pod: %w", m, end, m.ContainerPort, fault.Invalid)
			}
			ends[p] = m.ContainerPort
		}
	}
	return nil
}
