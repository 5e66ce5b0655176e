package cgroup

import (
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// Below returns, in ascending order, the cgroups below top, in any hierarchy,
// whose name fits. It does not look below those. A missing top has none; the
// root is refused, because everything is below it.
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

// Occupied returns those of the cgroup paths that have processes, in them or
// below, in any hierarchy. Many paths take as long as one.
func Occupied(cgroups []string) (occupied []string, err error) {
	all, _, err := find()
	if err != nil {
		return nil, failed("list cgroup", strings.Join(cgroups, ", "), err)
	}
	for _, cgroup := range cgroups {
		cleaned, err := clean(cgroup)
		if err != nil {
			return nil, failed("list cgroup", cgroup, err)
		}
		pids, err := members(all, cleaned)
		if err != nil {
			return nil, failed("list cgroup", cgroup, err)
		}
		if len(pids) > 0 {
			occupied = append(occupied, cgroup)
		}
	}
	return occupied, nil
}

// Exists reports whether the cgroup path exists in any hierarchy.
func Exists(cgroup string) (bool, error) {
	there, err := Existing([]string{cgroup})
	return len(there) > 0, err
}

// Existing returns those of the cgroup paths that exist in any hierarchy. Many
// paths take as long as one.
func Existing(cgroups []string) (there []string, err error) {
	all, _, err := find()
	if err != nil {
		return nil, failed("check cgroup", strings.Join(cgroups, ", "), err)
	}
	for _, cgroup := range cgroups {
		cleaned, err := clean(cgroup)
		if err != nil {
			return nil, failed("check cgroup", cgroup, err)
		}
		for _, h := range all {
			err := unix.Access(h.dir(cleaned), unix.F_OK)
			if err == nil {
				there = append(there, cgroup)
				break
			}
			if err != unix.ENOENT && err != unix.ENOTDIR {
				return nil, failed("check cgroup", h.dir(cleaned), err)
			}
		}
	}
	return there, nil
}
