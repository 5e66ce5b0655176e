package cgroup

import (
	"slices"
	"strings"

	"github.com/crius-run/crius/internal/mount"
)

// NSDelegate is the option of cgroup v2 that makes cgroup namespaces boundaries: a process in one
// can neither leave its cgroup nor change the limits of the namespace's root (cgroups(7)).
const NSDelegate = "nsdelegate"

// Options returns the mount options of cgroup v2 that hold for the whole hierarchy, such as
// NSDelegate; none on a node with cgroup v1. They may change while the node is up: each mount that
// is made outside of a cgroup namespace sets them again.
func Options() ([]string, error) { return options(mount.Each) }

func options(mounts func(func(mount.Info) bool) error) (list []string, err error) {
	err = mounts(func(m mount.Info) bool {
		if m.Type == "cgroup2" {
			list = slices.DeleteFunc(strings.Split(m.Options, ","), func(o string) bool { return !slices.Contains(known, o) })
		}
		return m.Type != "cgroup2" // it is at the beginning of a long table
	})
	return list, err
}

// known leaves out what is not cgroup v2's own, such as ro and seclabel.
var known = []string{NSDelegate, "favordynmods", "memory_localevents", "memory_recursiveprot", "memory_hugetlb_accounting", "pids_localevents"}
