package network

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/utils"

	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/network/hostport"
)

// Reclaim releases what CNI plugins hold for a pod whose record is lost, with
// the verb DEL. p is what is left of the pod: its id, its cache directory,
// perhaps a network namespace. leases are those of its addresses that are
// known, and dirs the configuration directories of networks other than
// Config.ConfDir in which the pod may have been.
//
// After any error the same call must be repeated until it succeeds, and the
// network namespace and the cache directory must be kept for that.
func (n *Network) Reclaim(ctx context.Context, p Pod, leases []Lease, dirs []string) error {
	attachments, err := n.unrecorded(p, leases, dirs)
	if err != nil {
		return err
	}
	var errs []error
	for _, a := range attachments {
		if err := a.readdressLost(p, leases); err != nil { // most pods have theirs
			slog.WarnContext(ctx, "addresses of a pod without a record not put back on its interface, rules of plugins may stay", "pod", p.ID, "err", err)
		}
		errs = append(errs, n.Detach(ctx, p, a))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, l := range leases {
		if owner, _, err := readLease(l.File); err == nil && owner == l.Owner {
			errs = append(errs, fmt.Errorf("the plugins of network %q did not remove %s", l.Network, l.File))
		}
	}
	return errors.Join(errs...)
}

// unrecorded returns how a pod without a record was attached: as libcni has
// recorded it, once the ADD had succeeded; otherwise to the networks of its
// leases; and if nothing else is known, but its namespace has an interface, to
// all networks in force.
func (n *Network) unrecorded(p Pod, leases []Lease, dirs []string) ([]*Attachment, error) {
	all := n.cached(p)
	for _, l := range leases {
		if slices.ContainsFunc(all, func(a *Attachment) bool { return a.Network == l.Network }) {
			continue
		}
		list, err := parse(l.conf)
		if err != nil {
			return nil, err
		}
		a, err := n.guess(p, list, cmp.Or(l.Interface, ifName))
		if err != nil {
			return nil, err
		}
		all = append(all, a)
	}
	if len(all) > 0 || !attached(p.NetNS) {
		return all, nil
	}
	lists := n.inForce(dirs)
	if len(lists) == 0 {
		return nil, fmt.Errorf("the pod has an interface %s, and nothing says which network it is of: %w", ifName, n.missing(n.config().ConfDir, nil))
	}
	for _, list := range lists {
		a, err := n.guess(p, list, ifName)
		if err != nil {
			return nil, err
		}
		all = append(all, a)
	}
	return all, nil
}

// someHostPort stands for those of a pod without a record. The portmap plugin
// finds its rules by the pod's id, but only looks for them if it gets a port.
var someHostPort = []hostport.Mapping{{Protocol: "tcp", HostPort: 1, ContainerPort: 1}}

// guess returns an attachment from which the plugins of list can undo what they
// did for a pod of which nothing but its id is known.
func (n *Network) guess(p Pod, list *libcni.NetworkConfigList, link string) (*Attachment, error) {
	args, err := p.arguments()
	if err != nil {
		return nil, err
	}
	offers, err := n.offers(p, someHostPort)
	if err != nil {
		return nil, err
	}
	a := &Attachment{Network: list.Name, Interface: link, Conf: list.Bytes, Args: args}
	a.Capabilities, err = capabilities(offers, list)
	return a, err
}

// cached returns the attachments of which libcni has a readable record in the
// pod's cache directory, where DEL also finds the result of the ADD.
func (n *Network) cached(p Pod) []*Attachment {
	p.dropUnreadable()
	records, err := n.cni(p).GetCachedAttachments(p.ID)
	if err != nil {
		return nil // like a damaged one
	}
	var all []*Attachment
	for _, r := range records {
		list, err := parse(r.Config)
		if err != nil || utils.ValidateInterfaceName(r.IfName) != nil { // plugins would refuse it at each retry
			continue
		}
		a := &Attachment{Network: r.Network, Interface: r.IfName, Conf: list.Bytes, Args: r.CniArgs, Capabilities: map[string]json.RawMessage{}}
		for name, value := range r.CapabilityArgs {
			if a.Capabilities[name], err = json.Marshal(value); err != nil {
				delete(a.Capabilities, name)
			}
		}
		if result, err := n.cni(p).GetNetworkListCachedResult(list, a.runtimeConf(p, "")); err == nil && result != nil {
			a.Result, _ = encode(result, list.CNIVersion)
		}
		all = append(all, a)
	}
	return all
}

// maxRecord is far above what libcni records of an attachment, in bytes.
const maxRecord = 4 << 20

// dropUnreadable deletes libcni's records of the pod for which libcni would
// wait, such as a named pipe, or which it could not keep in memory: it reads
// whatever is there, at DEL as well. Links are not followed.
func (p Pod) dropUnreadable() {
	dir := filepath.Join(p.CacheDir, "results")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return // neither can libcni
	}
	for _, e := range entries {
		if !strings.Contains(e.Name(), p.ID) {
			continue
		}
		if info, err := e.Info(); err == nil && (!info.Mode().IsRegular() || info.Size() > maxRecord) {
			_ = os.Remove(filepath.Join(dir, e.Name())) // of a directory, which libcni does not read, only if it is empty
		}
	}
}

// attached reports whether a network namespace has the interface of a pod.
func attached(netNS string) bool {
	return netNS != "" && ns.Do(netNS, func() error {
		_, err := linkIndex(ifName)
		return err
	}) == nil
}
