package cgroup

import (
	"os"
	"slices"
	"strings"

	"github.com/crius-run/crius/internal/mount"
)

// hierarchy is one mounted cgroup tree.
type hierarchy struct {
	membership
	point string // where it is mounted
	root  string // the cgroup of the tree that is visible there
}

// membership is a line of /proc/PID/cgroup: the cgroup of a process in one
// hierarchy.
type membership struct {
	names string // controllers, or name=; empty for v2
	own   string // relative to the hierarchy's mount point, once that is known
}

func (m membership) v2() bool { return m.names == "" }

func (m membership) has(name string) bool {
	return slices.Contains(strings.Split(m.names, ","), name)
}

// dir returns the directory of a cgroup in h.
func (h hierarchy) dir(cgroup string) string { return strings.TrimSuffix(h.point+cgroup, "/") }

// find returns what this process sees: the hierarchies that crius uses, in the
// kernel's order, and the layout that they make up.
func find() ([]hierarchy, Mode, error) {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, None, err
	}
	return locate(memberships(string(text)), mount.Each)
}

// locate finds the mount point of each hierarchy, and stops once it has all:
// they are at the beginning of a long table.
func locate(own []membership, mounts func(func(mount.Info) bool) error) ([]hierarchy, Mode, error) {
	all := make([]hierarchy, len(own))
	missing := len(own)
	err := mounts(func(m mount.Info) bool {
		for i, mine := range own {
			if all[i].point != "" || !mine.mountedAs(m) {
				continue
			}
			below, ok := relative(mine.own, m.Root)
			if !ok { // another container's part of the tree
				continue
			}
			all[i] = hierarchy{membership{mine.names, below}, m.Point, m.Root}
			missing--
			break
		}
		return missing > 0
	})
	if err != nil {
		return nil, None, err
	}
	all = slices.DeleteFunc(all, func(h hierarchy) bool { return h.point == "" })
	return layout(all)
}

// layout depends on where the resource controllers are. On v2, other v1
// hierarchies (for example a VPN's net_cls) are not crius's to touch.
func layout(all []hierarchy) ([]hierarchy, Mode, error) {
	resources := slices.ContainsFunc(all, func(h hierarchy) bool { return h.has("memory") || h.has("cpu") || h.has("pids") })
	two := slices.IndexFunc(all, hierarchy.v2)
	switch {
	case resources && two >= 0:
		return all, Hybrid, nil
	case resources:
		return all, V1, nil
	case two >= 0:
		return all[two : two+1], V2, nil
	}
	return nil, None, nil
}

// mountedAs reports whether at is a mount of the hierarchy.
func (m membership) mountedAs(at mount.Info) bool {
	if m.v2() {
		return at.Type == "cgroup2"
	}
	if at.Type != "cgroup" {
		return false
	}
	options := strings.Split(at.Options, ",")
	for name := range strings.SplitSeq(m.names, ",") {
		if !slices.Contains(options, name) {
			return false
		}
	}
	return true
}

// relative returns cgroup relative to root.
func relative(cgroup, root string) (string, bool) {
	if root == "/" {
		return cgroup, true
	}
	below, ok := strings.CutPrefix(cgroup, root)
	if !ok || (below != "" && below[0] != '/') {
		return "", false
	}
	return "/" + strings.TrimPrefix(below, "/"), true
}

// memberships reads /proc/PID/cgroup.
func memberships(text string) []membership {
	var all []membership
	for line := range strings.Lines(text) {
		_, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ":")
		names, cgroup, ok := strings.Cut(rest, ":")
		if ok && strings.HasPrefix(cgroup, "/") {
			all = append(all, membership{names, cgroup})
		}
	}
	return all
}
