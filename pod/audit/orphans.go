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

// orphan is everything that has an id in the form of crius's ids and is not on record.
type orphan struct {
	id       string
	traces   map[string]bool // what has the id, and where
	shared   bool            // one of them is in a place that other servers may use as well
	monitors []conmon.Process
	helpers  []conmon.Process // of runtimes
	cgroups  []string
	netNS    string
	leases   []network.Lease
}

func (a *Auditor) knows(id string) bool {
	return a.Node.Knows(id) || a.Cleanups.Has(id) || a.Records.Has(id)
}

// Orphans reports objects without a record. An object counts as an orphan if it exists, its id
// is unknown after that, and it still exists then.
func (a *Auditor) Orphans(ctx context.Context, report *Report) error {
	first, err := a.strays(ctx)
	if err != nil {
		return fmt.Errorf("search for orphans: %w", err)
	}
	if len(first) == 0 {
		return nil
	}
	second, err := a.strays(ctx)
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

// addTime is more than CNI plugins take from creating an interface to giving it an address.
const addTime = 3 * time.Second

// dropLeases drops from an orphan the leases whose addresses are in use on this node: they
// belong to a pod of another runtime. While it cannot find out, it retries until patience ends;
// then it drops all of them, and returns those that it is unsure about, and why.
func (a *Auditor) dropLeases(patience context.Context, o *orphan) (unsure []string, why error) {
	if len(o.leases) == 0 || o.netNS != "" { // the orphan itself may have them
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

// killTime is far more than a kill takes: a process that does not die must not keep the rest of
// an orphan from being removed.
const killTime = 10 * time.Second

func killCgroup(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, killTime)
	defer cancel()
	return cgroup.Kill(ctx, name)
}

// remove removes everything with the id of the orphan. As long as its network cannot be released,
// its network namespace and its state directory stay.
func (a *Auditor) remove(ctx context.Context, o *orphan) error {
	reclaim := func(ctx context.Context) error {
		p := network.Pod{ID: o.id, NetNS: o.netNS, CacheDir: filepath.Join(a.StateDir, "pods", o.id, "cni")}
		if err := a.Network.Reclaim(ctx, p, o.leases, a.confDirs()); err != nil {
			return fmt.Errorf("release the network of pod %s, which has no record: %w", o.id, err)
		}
		return nil
	}
	if len(o.leases) == len(o.traces) {
		return reclaim(ctx) // only leases have the id, which may be that of another runtime
	}
	var errs []error
	for _, name := range o.cgroups {
		errs = append(errs, killCgroup(ctx, name))
	}
	errs = append(errs, a.Node.Sweep(ctx, o.id, reclaim))
	for _, process := range slices.Concat(o.monitors, o.helpers) { // their directories are gone
		errs = append(errs, conmon.Signal(process, unix.SIGKILL))
	}
	for _, name := range o.cgroups {
		errs = append(errs, cgroup.Remove(ctx, name))
	}
	return errors.Join(errs...)
}

// CollectNetwork has the network plugins remove what they hold for removed pods of this server
// (network.Collect). It is called when a server starts, after recovery: pods that an earlier
// server lost have no record then.
func (a *Auditor) CollectNetwork(ctx context.Context) error {
	ours := func(id string) bool { return ids.Valid(id) && ids.HasMark(id, a.Mark) }
	return a.Network.Collect(ctx, a.confDirs(), network.Live{Attached: a.attached, Ours: ours})
}

// confDirs returns the configuration directories of handlers that have networks of their own.
func (a *Auditor) confDirs() []string {
	var dirs []string
	for _, runtime := range a.Runtimes.All() {
		if dir := runtime.Handler().CNIConfDir; dir != "" && !slices.Contains(dirs, dir) {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// attached returns the pods on record that have a network or are about to get one. A pod that
// plugins know is among them, since it is recorded before it gets a network.
func (a *Auditor) attached() (map[string]string, error) {
	pods, _, damaged, err := a.Records.Pods.Read()
	if err != nil {
		return nil, fmt.Errorf("read pod records: %w", err)
	}
	attached := map[string]string{}
	for _, d := range damaged { // its network is unknown
		return nil, fmt.Errorf("read pod records: %w", d.Err)
	}
	for id, rec := range pods {
		if rec.Network != nil {
			attached[id] = rec.Network.Interface
		}
	}
	return attached, nil
}

// OpaqueIPAM returns the IPAM plugins whose addresses cannot be compared with the records,
// since only the plugins can list them.
func (a *Auditor) OpaqueIPAM() []string {
	_, opaque, _ := a.Network.Leases(a.confDirs(), a.attachments()) // Verify has returned the error
	return opaque
}

// attachments returns the networks of the node's pods.
func (a *Auditor) attachments() []*network.Attachment {
	var all []*network.Attachment
	for _, p := range a.Node.Pods() {
		if n := p.Now().Network; n != nil {
			all = append(all, n)
		}
	}
	return all
}
