package audit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/ids"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/spec"
)

// visit is one look at all places where the server keeps things.
type visit struct {
	*Auditor
	found   map[string]*orphan
	others  []conmon.Monitor // of other servers on this node
	running oci.HelpersByID
}

// strays visits all places, and returns by id what is there without a record.
func (a *Auditor) strays(ctx context.Context) (map[string]*orphan, error) {
	v := &visit{Auditor: a, found: map[string]*orphan{}}
	v.listed(ctx)
	for _, look := range []func() error{v.directories, v.files, v.helpers, v.mounts, v.pins, v.monitors, v.cgroups, v.leases} {
		if err := look(); err != nil {
			return nil, err
		}
	}
	for _, m := range v.others {
		delete(v.found, m.ID)
	}
	maps.DeleteFunc(v.found, func(id string, _ *orphan) bool { return a.knows(id) })
	v.leavePods()
	v.shortened()
	return v.found, nil
}

// leaseAge is how old a lease without the mark of this server must be to count: another runtime
// may just be making the pod that the lease is for.
const leaseAge = 2 * time.Minute

// addShared is add for places that other servers of the node may use as well.
func (v *visit) addShared(id, format string, args ...any) *orphan {
	if ids.Valid(id) && ids.OfOther(id, v.Mark) {
		return nil
	}
	o := v.add(id, format, args...)
	if o != nil {
		o.shared = true
	}
	return o
}

// add notes a thing that has the id. It returns nil if the id is not in the form of crius's
// ids.
func (v *visit) add(id, format string, args ...any) *orphan {
	if !ids.Valid(id) {
		return nil
	}
	o := v.found[id]
	if o == nil {
		o = &orphan{id: id, traces: map[string]bool{}}
		v.found[id] = o
	}
	o.traces[fmt.Sprintf(format, args...)] = true
	return o
}

// directories visits the directories of records and bundles.
func (v *visit) directories() error {
	dirs := []string{
		filepath.Join(v.StateDir, "pods"), filepath.Join(v.StateDir, "containers"),
		filepath.Join(v.RunDir, "pods"), filepath.Join(v.RunDir, "containers"),
	}
	for _, dir := range dirs {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		for _, entry := range entries {
			v.add(entry.Name(), "directory %s", filepath.Join(dir, entry.Name()))
		}
	}
	return nil
}

// files visits the state files of the runtimes.
func (v *visit) files() error {
	for name, runtime := range v.Runtimes.All() {
		// Other programs may use a root elsewhere as well.
		if !strings.HasPrefix(runtime.Handler().Root, filepath.Clean(v.RunDir)+"/") {
			continue
		}
		files, err := runtime.StateFiles()
		if err != nil {
			return fmt.Errorf("runtime handler %s: %w", name, err)
		}
		for id, paths := range files {
			for _, path := range paths {
				v.add(id, "%s of runtime handler %s", path, name)
			}
		}
	}
	return nil
}

func (v *visit) mounts() error {
	for _, kind := range []string{"pods", "containers"} {
		dir := filepath.Join(v.RunDir, kind)
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
			v.add(id, "mount %s", point)
		}
	}
	return nil
}

func (v *visit) pins() error {
	pins, err := ns.Pins(v.NamespacesDir, v.PinPrefix)
	if err != nil {
		return err
	}
	netNS := ns.Spec{Dir: v.NamespacesDir, Net: true}
	for name, paths := range pins {
		for _, path := range paths {
			if o := v.addShared(strings.TrimPrefix(name, v.PinPrefix), "namespace %s", path); o != nil {
				netNS.Name = name
				o.netNS = netNS.Paths().Net
			}
		}
	}
	return nil
}

// monitors visits all monitors. The directory of a monitor says whether it is of this server.
func (v *visit) monitors() error {
	all, err := conmon.Monitors()
	if err != nil {
		return err
	}
	for _, m := range all {
		below, ours := strings.CutPrefix(m.Dir, filepath.Clean(v.RunDir)+"/")
		parts := strings.Split(below, "/")
		if !ours || len(parts) < 2 {
			v.others = append(v.others, m)
			continue
		}
		if o := v.add(parts[1], "monitor, process %d,", m.PID); o != nil {
			o.monitors = append(o.monitors, m.Process)
		}
	}
	return nil
}

// leavePods leaves alone the pods of other servers' containers, which may share a directory of
// namespaces, or a cgroup, with those of this server. Bundles say which they are. These can be
// large, so they are read only if a stray may be such a pod.
func (v *visit) leavePods() {
	type bundle struct {
		Linux struct{ Namespaces []struct{ Path string } }
	}
	for _, m := range v.others {
		if !v.anyShared() {
			return
		}
		config, err := oci.ReadSpec[bundle](m.Dir)
		if err != nil {
			continue
		}
		for _, n := range config.Linux.Namespaces {
			if id, ok := strings.CutPrefix(filepath.Base(n.Path), v.PinPrefix); ok {
				delete(v.found, id)
			}
		}
	}
}

func (v *visit) anyShared() bool {
	for _, o := range v.found {
		if o.shared {
			return true
		}
	}
	return false
}

// cgroups visits the parents of the cgroups of pods and containers.
func (v *visit) cgroups() error {
	tops := slices.Clone(v.Node.CgroupParents())
	for _, top := range v.Node.CgroupParents() {
		tops = append(tops, path.Join("/vc", top)) // of Kata 1
	}
	slices.Sort(tops)
	for _, top := range slices.Compact(tops) {
		names, err := cgroup.Below(top, func(name string) bool { return v.cgroupID(name) != "" })
		if err != nil {
			return err
		}
		for _, name := range names {
			id, crios := v.cgroupID(filepath.Base(name)), !strings.HasPrefix(strings.TrimPrefix(filepath.Base(name), "kata_"), spec.CgroupPrefix)
			if crios && v.found[id] == nil {
				continue // CRI-O itself may run here
			}
			if o := v.addShared(id, "cgroup %s", name); o != nil {
				o.cgroups = append(o.cgroups, name)
			}
		}
	}
	return nil
}

// cgroupID returns the id in the name of a cgroup; empty: the name is not in the form of
// crius's.
func (v *visit) cgroupID(name string) string {
	name = strings.TrimPrefix(strings.TrimSuffix(name, ".scope"), "kata_") // which Kata 1 adds
	for _, prefix := range []string{spec.CgroupPrefix, cmp.Or(v.CgroupPrefix, spec.CgroupPrefix)} {
		if id, ok := strings.CutPrefix(name, prefix+"-"); ok && ids.Valid(id) {
			return id
		}
	}
	return ""
}

// leases visits the leases of ids in the form of crius's. Other runtimes use that form as well:
// see dropLeases.
func (v *visit) leases() error {
	leases, _, err := v.Network.Leases(v.confDirs(), v.attachments())
	if err != nil {
		return err
	}
	for _, l := range leases {
		if time.Since(l.Since) < leaseAge && !v.isOurs(l.Owner) {
			continue
		}
		if o := v.addShared(l.Owner, "%s", leaseTrace(l)); o != nil {
			o.leases = append(o.leases, l)
		}
	}
	return nil
}

func leaseTrace(l network.Lease) string {
	return fmt.Sprintf("address %s, reserved in %s,", l.Address, l.File)
}

// pinnedNetworks returns the paths of all network namespaces that are pinned, by any program.
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
