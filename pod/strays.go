package pod

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/internal/record"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/spec"
)

// stray is what bears an id in the way that we name things, and belongs to
// nothing that we know of.
type stray struct {
	id       string
	traces   map[string]bool // what and where, each
	monitors []conmon.Process
	cgroups  []string
	netNS    string
	leases   []network.Lease
}

// leaseAge is how old a lease must be to count: another runtime may be making
// the pod it is for.
const leaseAge = 2 * time.Minute

// search is one look at all places where things of ours are.
type search struct {
	*Engine
	found  map[string]*stray
	others map[string]bool // ids of other servers on this node
}

// strays reports what has no record. A thing is stray if it is there, then
// nobody knows its id, and then it still is there: an id is known from before the
// first thing bears it until after the last is gone, and never used again.
func (v *verification) strays(ctx context.Context) error {
	first, err := v.search()
	if err != nil {
		return fmt.Errorf("look for what has no record: %w", err)
	}
	maps.DeleteFunc(first, func(id string, _ *stray) bool { return v.knows(id) })
	if len(first) == 0 {
		return nil
	}
	second, err := v.search()
	if err != nil {
		return fmt.Errorf("look for what has no record: %w", err)
	}
	patient := time.Now().Add(addTime)
	for _, id := range slices.Sorted(maps.Keys(first)) {
		st := second[id]
		if st == nil {
			continue
		}
		unsure, why := v.dropLeases(st, patient)
		gone := remedy{"it is removed, with whatever else bears the id", func(ctx context.Context) error { return v.sweepStray(ctx, st) }}
		var problems []problem
		for _, trace := range slices.Sorted(maps.Keys(st.traces)) {
			if first[id].traces[trace] {
				problems = append(problems, problem{wrong: trace + " belongs to nothing on record", remedy: gone})
			}
		}
		for _, trace := range unsure {
			problems = append(problems, problem{wrong: trace + " belongs to nothing on record",
				advice: "it stays, since a pod of another runtime may have it: " + why.Error()})
		}
		v.report(ctx, "stray "+id, problems)
	}
	return ctx.Err()
}

// knows tells whether an id is that of anything we have on record or at work.
func (e *Engine) knows(id string) bool {
	if e.sandboxes.knows(id) || e.containers.knows(id) || e.cleanups.Has(id) {
		return true
	}
	_, podErr := e.podRecords.Get(id)
	_, ctrErr := e.ctrRecords.Get(id)
	return !errors.Is(podErr, fault.NotFound) || !errors.Is(ctrErr, fault.NotFound)
}

// search looks everywhere, and tells by id what it finds.
func (e *Engine) search() (map[string]*stray, error) {
	s := &search{Engine: e, found: map[string]*stray{}, others: map[string]bool{}}
	for _, look := range []func() error{s.directories, s.books, s.mounts, s.pins, s.monitors, s.cgroups, s.leases} {
		if err := look(); err != nil {
			return nil, err
		}
	}
	maps.DeleteFunc(s.found, func(id string, _ *stray) bool { return s.others[id] })
	return s.found, nil
}

// addShared is add for what is in a place that other servers of the node may use as
// well.
func (s *search) addShared(id, format string, args ...any) *stray {
	if record.ValidID(id) && isOthers(id, s.mark) {
		return nil
	}
	return s.add(id, format, args...)
}

// add notes a thing that bears the id; nil if it is no id of ours.
func (s *search) add(id, format string, args ...any) *stray {
	if !record.ValidID(id) {
		return nil
	}
	st := s.found[id]
	if st == nil {
		st = &stray{id: id, traces: map[string]bool{}}
		s.found[id] = st
	}
	st.traces[fmt.Sprintf(format, args...)] = true
	return st
}

// directories are those of records and of bundles.
func (s *search) directories() error {
	dirs := []string{
		filepath.Join(s.cfg.StateDir, "pods"), filepath.Join(s.cfg.StateDir, "containers"),
		filepath.Join(s.cfg.RunDir, "pods"), filepath.Join(s.cfg.RunDir, "containers"),
	}
	for _, dir := range dirs {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		for _, entry := range entries {
			s.add(entry.Name(), "directory %s", filepath.Join(dir, entry.Name()))
		}
	}
	return nil
}

// books are the runtimes' own.
func (s *search) books() error {
	for _, name := range s.deps.Runtimes.Names() {
		runtime, err := s.deps.Runtimes.Get(name)
		// A root elsewhere may be other programs' as well.
		if err != nil || !strings.HasPrefix(runtime.Handler().Root, filepath.Clean(s.cfg.RunDir)+"/") {
			continue
		}
		books, err := runtime.Books()
		if err != nil {
			return fmt.Errorf("runtime handler %s: %w", name, err)
		}
		for id, paths := range books {
			for _, path := range paths {
				s.add(id, "%s of runtime handler %s", path, name)
			}
		}
	}
	return nil
}

func (s *search) mounts() error {
	for _, kind := range []string{"pods", "containers"} {
		dir := filepath.Join(s.cfg.RunDir, kind)
		points, err := mount.Under(dir)
		if err != nil {
			return err
		}
		real, err := filepath.EvalSymlinks(dir)
		if errors.Is(err, os.ErrNotExist) {
			continue
		} else if err != nil {
			return err
		}
		for _, point := range points {
			below, err := filepath.Rel(real, point)
			if err != nil {
				return err
			}
			id, _, _ := strings.Cut(below, "/")
			s.add(id, "mount %s", point)
		}
	}
	return nil
}

// pinPrefix is what the names of pinned namespaces begin with.
const pinPrefix = "crius-"

func (s *search) pins() error {
	pins, err := ns.Pins(s.cfg.NamespacesDir, pinPrefix)
	if err != nil {
		return err
	}
	netNS := ns.Spec{Dir: s.cfg.NamespacesDir, Net: true}
	for name, paths := range pins {
		for _, path := range paths {
			if st := s.addShared(strings.TrimPrefix(name, pinPrefix), "namespace %s", path); st != nil {
				netNS.Name = name
				st.netNS = netNS.Paths().Net
			}
		}
	}
	return nil
}

// monitors are known by the directory that they were given, which also tells
// those of other servers.
func (s *search) monitors() error {
	all, err := conmon.Monitors()
	if err != nil {
		return err
	}
	for _, m := range all {
		below, ours := strings.CutPrefix(m.Dir, filepath.Clean(s.cfg.RunDir)+"/")
		parts := strings.Split(below, "/")
		if !ours || len(parts) < 2 {
			s.leaveAlone(m)
			continue
		}
		if st := s.add(parts[1], "monitor, process %d,", m.PID); st != nil {
			st.monitors = append(st.monitors, m.Process)
		}
	}
	return nil
}

// leaveAlone notes the ids of another server's container and of its pod: they
// may share a directory of namespaces, or a cgroup, with ours.
func (s *search) leaveAlone(m conmon.Monitor) {
	s.others[m.ID] = true
	type bundle struct {
		Linux struct{ Namespaces []struct{ Path string } }
	}
	config, err := oci.ReadSpec[bundle](m.Dir)
	if err != nil {
		return
	}
	for _, n := range config.Linux.Namespaces {
		if id, ok := strings.CutPrefix(filepath.Base(n.Path), pinPrefix); ok {
			s.others[id] = true
		}
	}
}

// cgroups are those below the parents that our pods have, or would have.
func (s *search) cgroups() error {
	var tops []string
	note := func(name string) {
		if name != "" && filepath.Dir(name) != "/" {
			tops = append(tops, filepath.Dir(name))
		}
	}
	if _, name, err := s.cgroupOf(nil, "", "0"); err == nil {
		note(name)
	}
	for _, pod := range s.sandboxes.all() {
		if _, name, err := s.cgroupOf(pod.rec.Config.M, "", "0"); err == nil {
			note(name)
		}
	}
	slices.Sort(tops)
	for _, top := range slices.Compact(tops) {
		names, err := cgroup.Below(top, func(name string) bool { return s.cgroupID(name) != "" })
		if err != nil {
			return err
		}
		for _, name := range names {
			id, crios := s.cgroupID(filepath.Base(name)), !strings.HasPrefix(filepath.Base(name), spec.CgroupPrefix)
			if crios && s.found[id] == nil {
				continue // CRI-O itself may run here
			}
			if st := s.addShared(id, "cgroup %s", name); st != nil {
				st.cgroups = append(st.cgroups, name)
			}
		}
	}
	return nil
}

// cgroupID is the id in the name of a cgroup of ours.
func (s *search) cgroupID(name string) string {
	name = strings.TrimSuffix(name, ".scope")
	for _, prefix := range []string{spec.CgroupPrefix, cmp.Or(s.cfg.CgroupPrefix, spec.CgroupPrefix)} {
		if id, ok := strings.CutPrefix(name, prefix+"-"); ok && record.ValidID(id) {
			return id
		}
	}
	return ""
}

// leases are those of ids in the form of ours. Other runtimes use it as well:
// see dropLeases.
func (s *search) leases() error {
	leases, _, err := s.deps.Network.Leases(s.attachments())
	if err != nil {
		return err
	}
	for _, l := range leases {
		if time.Since(l.Since) < leaseAge {
			continue
		}
		if st := s.addShared(l.Owner, "%s", leaseTrace(l)); st != nil {
			st.leases = append(st.leases, l)
		}
	}
	return nil
}

func (e *Engine) attachments() []*network.Attachment {
	var all []*network.Attachment
	for _, s := range e.sandboxes.all() {
		if a := s.network(); a != nil {
			all = append(all, a)
		}
	}
	return all
}

// addTime is more than CNI plugins take from the making of an interface to its
// address.
const addTime = 3 * time.Second

// dropLeases leaves to a stray only those leases whose addresses nobody on this
// node has: others belong to another runtime's pod. While that cannot be told it
// waits, until then, and then drops them all, and says of which it is unsure and
// why.
func (e *Engine) dropLeases(st *stray, patient time.Time) (unsure []string, why error) {
	if len(st.leases) == 0 || st.netNS != "" { // it is the stray itself that may have them
		return nil, nil
	}
	var addresses []string
	for _, l := range st.leases {
		addresses = append(addresses, l.Address)
	}
	idle, err := e.idle(addresses)
	for errors.Is(err, network.ErrHidden) && time.Now().Before(patient) { // a pod may just be getting its address
		time.Sleep(50 * time.Millisecond)
		idle, err = e.idle(addresses)
	}
	st.leases = slices.DeleteFunc(st.leases, func(l network.Lease) bool {
		drop := !slices.Contains(idle, l.Address)
		if drop {
			delete(st.traces, leaseTrace(l))
		}
		if drop && err != nil {
			unsure = append(unsure, leaseTrace(l))
		}
		return drop
	})
	return unsure, err
}

func (e *Engine) idle(addresses []string) ([]string, error) {
	pins, err := pinnedNetworks()
	if err != nil {
		return nil, err
	}
	var ours []string
	for _, s := range e.sandboxes.all() {
		ours = append(ours, s.rec.Namespaces.Paths().Net)
	}
	return network.Idle(addresses, pins, ours)
}

func leaseTrace(l network.Lease) string {
	return fmt.Sprintf("address %s, reserved in %s,", l.Address, l.File)
}

// pinnedNetworks are the places of all network namespaces that are kept without
// a process, by whomever.
func pinnedNetworks() ([]string, error) {
	var points []string
	err := mount.Each(func(m mount.Info) bool {
		if m.Type == "nsfs" && strings.HasPrefix(m.Root, "net:") {
			points = append(points, m.Point)
		}
		return true
	})
	return points, err
}

// strayTime is far more than a kill takes: what does not die of it must not keep
// the rest of a stray from being removed.
const strayTime = 10 * time.Second

func killCgroup(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, strayTime)
	defer cancel()
	return cgroup.Kill(ctx, name)
}

// sweepStray removes everything that bears the id. As in release, a network that
// cannot be given back keeps its namespace.
func (e *Engine) sweepStray(ctx context.Context, st *stray) error {
	for _, l := range st.leases {
		p := network.Pod{ID: st.id, NetNS: st.netNS, CacheDir: filepath.Join(e.podRecords.Path(st.id), "cni")}
		if err := e.deps.Network.Release(ctx, p, l); err != nil {
			return fmt.Errorf("give address %s back: %w", l.Address, err)
		}
	}
	if len(st.leases) == len(st.traces) {
		return nil // nothing else is ours, and other runtimes have ids like it
	}
	var errs []error
	for _, name := range st.cgroups {
		errs = append(errs, killCgroup(ctx, name))
	}
	errs = append(errs, e.sweep(ctx, st.id))
	for _, monitor := range st.monitors { // whose directory has gone before it
		errs = append(errs, conmon.Signal(monitor, unix.SIGKILL))
	}
	for _, name := range st.cgroups {
		errs = append(errs, cgroup.Remove(name))
	}
	return errors.Join(errs...)
}
