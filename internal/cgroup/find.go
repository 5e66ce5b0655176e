package cgroup

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// Below lists, in any hierarchy, the cgroups below top whose own name fits,
// ascending. What is below such a one is its own and not looked at. A top that
// does not exist has none; the root is refused, since it has everybody's.
func Below(top string, fits func(name string) bool) ([]string, error) {
	top, err := clean(top)
	if err == nil && top == "/" {
		err = problem{fault.Invalid, "refusing to search the root cgroup"}
	}
	if err != nil {
		return nil, failed("search cgroup", top, err)
	}
	all, _, err := find()
	if err != nil {
		return nil, failed("search cgroup", top, err)
	}
	var found []string
	for _, h := range all {
		err := walk(h.dir(top), func(way []byte, name string) bool {
			if !fits(name) {
				return true
			}
			found = append(found, top+string(way)+"/"+name)
			return false
		}, nil)
		if err != nil {
			return nil, failed("search cgroup", h.dir(top), err)
		}
	}
	slices.Sort(found)
	return slices.Compact(found), nil
}

// Exists tells whether there is a cgroup path, in any hierarchy.
func Exists(cgroup string) (bool, error) {
	cgroup, err := clean(cgroup)
	if err != nil {
		return false, failed("check cgroup", cgroup, err)
	}
	all, _, err := find()
	if err != nil {
		return false, failed("check cgroup", cgroup, err)
	}
	for _, h := range all {
		switch err := unix.Access(h.dir(cgroup), unix.F_OK); err {
		case nil:
			return true, nil
		case unix.ENOENT, unix.ENOTDIR:
		default:
			return false, failed("check cgroup", h.dir(cgroup), err)
		}
	}
	return false, nil
}
