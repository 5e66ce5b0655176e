package audit

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/ids"
	"github.com/crius-run/crius/network"
)

// orphan is what bears an id in the way that crius names things, and belongs to
// nothing on record.
type orphan struct {
	id       string
	traces   map[string]bool // what and where, each
	monitors []conmon.Process
	cgroups  []string
	netNS    string
	leases   []network.Lease
}

func (a *Auditor) knows(id string) bool {
	return a.Node.Knows(id) || a.Cleanups.Has(id) || a.Records.Has(id)
}

// Orphans reports objects without a record. An object is an orphan if it exists, its id
// is then unknown, and it still exists after that.
func (a *Auditor) Orphans(ctx context.Context, report *Report) error {
	first, err := a.everywhere()
	if err != nil {
		return fmt.Errorf("search for orphans: %w", err)
	}
	maps.DeleteFunc(first, func(id string, _ *orphan) bool { return a.knows(id) })
	if len(first) == 0 {
		return nil
	}
	second, err := a.everywhere()
	if err != nil {
		return fmt.Errorf("search for orphans: %w", err)
	}
	patience, cancel := context.WithTimeout(ctx, addTime)
	defer cancel()
	for _, id := range slices.Sorted(maps.Keys(first)) {
		o := second[id]
		if o == nil {
			continue
		}
		unsure, why := a.dropLeases(patience, o)
		removal := Remedy{"remove it and everything else with this ID", func(ctx context.Context) error { return a.remove(ctx, o) }}
		var problems []Problem
		for _, trace := range slices.Sorted(maps.Keys(o.traces)) {
			if first[id].traces[trace] {
				problems = append(problems, Problem{Wrong: trace + " belongs to no recorded pod or container", Remedy: removal})
			}
		}
		for _, trace := range unsure {
			problems = append(problems, Problem{Wrong: trace + " belongs to no recorded pod or container",
				Advice: "kept, because a pod of another runtime may be using it: " + why.Error()})
		}
		report.Add(ctx, "orphan "+id, problems)
	}
	return ctx.Err()
}

// addTime is more than CNI plugins take from the making of an interface to its
// address.
const addTime = 3 * time.Second

// dropLeases takes from an orphan's list the leases whose addresses are in use on this
// node: they belong to another runtime's pod. While it cannot tell, it looks again until
// patience ends; then it takes all of them, and returns those that it is unsure about and
// why.
func (a *Auditor) dropLeases(patience context.Context, o *orphan) (unsure []string, why error) {
	if len(o.leases) == 0 || o.netNS != "" { // it is the orphan itself that may have them
		return nil, nil
	}
	var addresses []string
	for _, l := range o.leases {
		addresses = append(addresses, l.Address)
	}
	idle, err := a.idle(addresses)
	again := time.NewTicker(50 * time.Millisecond)
	defer again.Stop()
	for errors.Is(err, network.ErrHidden) && patience.Err() == nil { // a pod may just be getting its address
		select {
		case <-again.C:
		case <-patience.Done():
		}
		idle, err = a.idle(addresses)
	}
	o.leases = slices.DeleteFunc(o.leases, func(l network.Lease) bool {
		drop := !slices.Contains(idle, l.Address)
		if drop {
			delete(o.traces, leaseTrace(l))
		}
		if drop && err != nil {
			unsure = append(unsure, leaseTrace(l))
		}
		return drop
	})
	return unsure, err
}

func (a *Auditor) idle(addresses []string) ([]string, error) {
	pins, err := pinnedNetworks()
	if err != nil {
		return nil, err
	}
	var own []string
	for _, p := range a.Node.Pods() {
		own = append(own, p.Plan.Namespaces.Paths().Net)
	}
	return network.Idle(addresses, pins, own)
}

// killTime is far more than a kill takes: what does not die of it must not keep
// the rest of an orphan from being removed.
const killTime = 10 * time.Second

func killCgroup(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, killTime)
	defer cancel()
	return cgroup.Kill(ctx, name)
}

// remove removes everything that bears the id. A network that cannot be given back
// keeps its namespace.
func (a *Auditor) remove(ctx context.Context, o *orphan) error {
	for _, l := range o.leases {
		p := network.Pod{ID: o.id, NetNS: o.netNS, CacheDir: filepath.Join(a.StateDir, "pods", o.id, "cni")}
		if err := a.Network.Release(ctx, p, l); err != nil {
			return fmt.Errorf("release address %s: %w", l.Address, err)
		}
	}
	if len(o.leases) == len(o.traces) {
		return nil // nothing else is ours, and other runtimes have ids like it
	}
	var errs []error
	for _, name := range o.cgroups {
		errs = append(errs, killCgroup(ctx, name))
	}
	errs = append(errs, a.Node.Sweep(ctx, o.id))
	for _, monitor := range o.monitors { // whose directory has gone before it
		errs = append(errs, conmon.Signal(monitor, unix.SIGKILL))
	}
	for _, name := range o.cgroups {
		errs = append(errs, cgroup.Remove(ctx, name))
	}
	return errors.Join(errs...)
}

// CollectNetwork has the network plugins remove what they hold for pods of this server
// that are gone (network.Collect). It is for the start of a server, after recovery:
// whatever was lost with an earlier one has no record any more.
func (a *Auditor) CollectNetwork(ctx context.Context) error {
	var dirs []string // of handlers that have networks of their own
	for _, name := range a.Runtimes.Names() {
		if runtime, err := a.Runtimes.Get(name); err == nil && runtime.Handler().CNIConfDir != "" {
			dirs = append(dirs, runtime.Handler().CNIConfDir)
		}
	}
	ours := func(id string) bool { return ids.Valid(id) && ids.HasMark(id, a.Mark) }
	return a.Network.Collect(ctx, dirs, network.Live{Attached: a.attached, Ours: ours})
}

// attached are the pods on record that have a network, or are about to get one. The
// record comes before the network: of a pod that the plugins know there is one.
func (a *Auditor) attached() (map[string]string, error) {
	pods, _, damaged, err := a.Records.Pods.Read()
	if err != nil {
		return nil, fmt.Errorf("read pod records: %w", err)
	}
	attached := map[string]string{}
	for _, d := range damaged { // its network is not known
		return nil, fmt.Errorf("read pod records: %w", d.Err)
	}
	for id, rec := range pods {
		if rec.Network != nil {
			attached[id] = rec.Network.Interface
		}
	}
	return attached, nil
}

// OpaqueIPAM are the IPAM plugins whose addresses cannot be compared with the records,
// since only the plugins can list them.
func (a *Auditor) OpaqueIPAM() []string {
	_, opaque, _ := a.Network.Leases(a.attachments()) // Verify has told the error
	return opaque
}

// attachments are the networks that the node's pods have.
func (a *Auditor) attachments() []*network.Attachment {
	var all []*network.Attachment
	for _, p := range a.Node.Pods() {
		if n := p.Now().Network; n != nil {
			all = append(all, n)
		}
	}
	return all
}
