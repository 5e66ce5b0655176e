package network

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/libcni"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/network/hostport"
)

// Attached is a pod with the record of how it is attached.
type Attached struct {
	Pod
	*Attachment
	// OwnStack: the runtime has its own network stack and removes the addresses
	// from the interface.
	OwnStack bool
}

// Damage is a difference between a pod's network and its record.
type Damage struct {
	Text string
	Dead bool // only a new pod will fix it
}

// Verify compares the contents of the pods' network namespaces, and the
// addresses that the IPAM plugin holds for them, with the records, and returns
// what is wrong by pod. Of the IPAM plugins only host-local can be checked. A
// network that cannot be checked does not count as dead.
func (n *Network) Verify(pods []Attached) map[string][]Damage {
	found := map[string][]Damage{}
	paths := make([]string, len(pods))
	for i, p := range pods {
		paths[i] = p.NetNS
		found[p.ID] = p.unleased()
	}
	failed := ns.Each(paths, func(i int) error {
		p := pods[i]
		found[p.ID] = append(found[p.ID], p.inside()...)
		return nil
	})
	for i, err := range failed {
		id := pods[i].ID
		if namespaceGone(err) {
			found[id] = append(found[id], Damage{fault.Text(err), true})
		} else {
			found[id] = append(found[id], unseen(err))
		}
	}
	return found
}

// unseen says that a pod's network could not be checked, which says nothing
// about it.
func unseen(err error) Damage {
	return Damage{"its network cannot be checked: " + fault.Text(err), false}
}

// namespaceGone reports whether an error of ns.Each means that the namespace
// does not exist any more, and with it no interface and no address.
func namespaceGone(err error) bool {
	return errors.Is(err, fault.NotFound) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH)
}

// inside is called in the pod's network namespace.
func (p Attached) inside() []Damage {
	if len(p.IPs) == 0 && len(p.Result) == 0 {
		return nil // how the network works is unknown
	}
	link, err := linkIndex(p.Interface)
	if errors.Is(err, errNoLink) {
		return []Damage{{fmt.Sprintf("its network interface %s is gone", p.Interface), true}}
	}
	if err != nil {
		return []Damage{unseen(err)}
	}
	if p.OwnStack {
		return nil
	}
	addresses, err := addressesOn(link)
	if err != nil {
		return []Damage{unseen(err)}
	}
	var damage []Damage
	for _, want := range p.IPs {
		if ip, err := netip.ParseAddr(want); err != nil || !addresses.has(ip) {
			damage = append(damage, Damage{fmt.Sprintf("%s has lost the address %s", p.Interface, want), false})
		}
	}
	return damage
}

// unleased returns the pod's addresses that the IPAM plugin may assign to
// another pod.
func (p Attached) unleased() []Damage {
	list, err := p.list()
	if err != nil {
		return []Damage{{fault.Text(err), false}}
	}
	var damage []Damage
	for _, dir := range leaseDirs(list) {
		for _, ip := range p.IPs {
			file := filepath.Join(dir, ip)
			switch owner, _, err := readLease(file); {
			case errors.Is(err, os.ErrNotExist):
				damage = append(damage, Damage{fmt.Sprintf("its address %s is no longer reserved: %s is missing", ip, file), true})
			case err == nil && owner != p.ID:
				damage = append(damage, Damage{fmt.Sprintf("its address %s is reserved for another container, %.64q, in %s", ip, owner, file), true})
			}
		}
	}
	return damage
}

// Lease is an address that the IPAM plugin host-local holds for a container.
type Lease struct {
	File, Network, Address string
	Owner, Interface       string // CNI's container id, and the interface in it
	Since                  time.Time
	conf                   json.RawMessage
}

// leasePlugin is the IPAM plugin whose records can be read: a file for each
// address.
const leasePlugin = "host-local"

// Leases lists the addresses that host-local holds for any container, in the
// networks in force, by Config.ConfDir and dirs, and in those of attachments.
// opaque are the IPAM plugins of these networks whose leases cannot be listed.
func (n *Network) Leases(dirs []string, attachments []*Attachment) (leases []Lease, opaque []string, err error) {
	lists := n.inForce(dirs)
	for _, a := range attachments {
		known := slices.ContainsFunc(lists, func(l *libcni.NetworkConfigList) bool { return string(l.Bytes) == string(a.Conf) })
		if list, err := a.list(); err == nil && !known {
			lists = append(lists, list)
		}
	}
	seen := map[string]bool{}
	for _, list := range lists {
		for _, plugin := range list.Plugins {
			if ipam := plugin.Network.IPAM.Type; ipam != "" && ipam != leasePlugin && !slices.Contains(opaque, ipam) {
				opaque = append(opaque, ipam)
			}
		}
		for _, dir := range leaseDirs(list) {
			if seen[dir] {
				continue
			}
			seen[dir] = true
			found, readErr := leasesIn(dir, list)
			leases, err = append(leases, found...), errors.Join(err, readErr)
		}
	}
	return leases, opaque, err
}

// leasesIn returns the leases in a directory of host-local; none if the
// directory is missing.
func leasesIn(dir string, list *libcni.NetworkConfigList) (leases []Lease, err error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	for _, entry := range entries {
		lease := Lease{File: filepath.Join(dir, entry.Name()), Network: list.Name, Address: leaseAddress(entry.Name()), conf: list.Bytes}
		info, statErr := entry.Info()
		if lease.Address == "" || statErr != nil || !info.Mode().IsRegular() {
			continue // its lock, and its last reserved address
		}
		var readErr error
		if lease.Owner, lease.Interface, readErr = readLease(lease.File); readErr == nil {
			lease.Since = info.ModTime()
			leases = append(leases, lease)
		}
	}
	return leases, err
}

// leaseDirs returns the directories of host-local's files for the network.
func leaseDirs(list *libcni.NetworkConfigList) []string {
	var dirs []string
	for _, plugin := range list.Plugins {
		if plugin.Network.IPAM.Type != leasePlugin {
			continue
		}
		var conf struct{ IPAM struct{ DataDir string } }
		if json.Unmarshal(plugin.Bytes, &conf) != nil {
			continue
		}
		dir := conf.IPAM.DataDir
		if dir == "" {
			dir = "/var/lib/cni/networks"
		}
		dirs = append(dirs, filepath.Join(dir, list.Name))
	}
	return dirs
}

// leaseAddress returns the address of a file of host-local; empty for other
// files. host-local writes "_" for ":" if a file system requires that.
func leaseAddress(file string) string {
	address := strings.ReplaceAll(file, "_", ":")
	if net.ParseIP(address) == nil {
		return ""
	}
	return address
}

// readLease reads a file of host-local: the container's id, and on another line
// the interface, which old versions leave out.
func readLease(file string) (owner, link string, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return "", "", err
	}
	text = bytes.Trim(text, "\x00\r\n ") // a power cut leaves zeros
	owner, link, _ = strings.Cut(string(text), "\n")
	return strings.TrimSpace(owner), strings.TrimSpace(link), nil
}

// ErrHidden means that Idle cannot tell: a pod's runtime has taken its
// addresses off the interface, and only that runtime knows them.
var ErrHidden = errors.New("a pod's interface has no address: the runtime may have moved the address into the sandbox")

// ownNetwork is the network namespace of this process, which is the node's.
const ownNetwork = "/proc/self/ns/net"

// Idle returns those of addresses that no interface has, in this process's
// network namespace or in one that is pinned at one of paths: each runtime pins
// those of its pods. Namespaces that processes of containers make do not count:
// they could claim any address for as long as they like. If a namespace cannot
// be checked, or hides its addresses (ErrHidden) and is not in known, Idle
// returns an error: any address may then be in use.
func Idle(addresses, paths, known []string) ([]string, error) {
	ours := map[uint64]bool{}
	for _, path := range append([]string{ownNetwork}, known...) {
		if inode, err := ns.Inode(path); err == nil {
			ours[inode] = true
		}
	}
	used := make([]bool, len(addresses))
	where := append([]string{ownNetwork}, paths...)
	failed := ns.Each(where, func(i int) error {
		here, err := addressesOn(0)
		if err != nil {
			return err
		}
		for j, a := range addresses {
			ip, err := netip.ParseAddr(a)
			used[j] = used[j] || err == nil && here.has(ip)
		}
		if here.global() {
			return nil
		}
		if inode, lost := ns.Inode(where[i]); lost == nil && ours[inode] {
			return nil
		}
		bare, err := hasUpLink()
		if bare && err == nil {
			err = ErrHidden
		}
		return err
	})
	for i, err := range failed {
		if !namespaceGone(err) { // a namespace that is gone has no address
			return nil, fmt.Errorf("look for addresses in use in %s: %w", where[i], err)
		}
	}
	var idle []string
	for i, a := range addresses {
		if !used[i] {
			idle = append(idle, a)
		}
	}
	return idle, nil
}

// Load records the host ports of live, the attached pods by id, and leaves the
// firewall unchanged: for VerifyHostPorts without a Restore.
func (n *Network) Load(live map[string]*Attachment) { n.ports.Load(exposedPods(live)) }

// VerifyHostPorts returns how the firewall's rules for host ports differ from
// those of the pods.
func (n *Network) VerifyHostPorts(ctx context.Context) ([]string, error) { return n.ports.Verify(ctx) }

func exposedPods(live map[string]*Attachment) []hostport.Pod {
	var pods []hostport.Pod
	for id, a := range live {
		if len(a.HostPorts) > 0 {
			pods = append(pods, a.exposed(id))
		}
	}
	return pods
}
