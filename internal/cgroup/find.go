package cgroup

import (
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// Below lists, in any hierarchy, the cgroups below top whose own name fits,
// ascending. What is below such a one is its own and not looked at. A top that
// does not exist has none; the root is refused, since it has everybody's.
func Below(top string, fits func(name string) bool) ([]string, error) {
	top, err := clean(top)
	if err == nil && top == "/" {
		err = problem{fault.Invalid, "everything is below the root cgroup"}
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
		err := search(unix.AT_FDCWD, h.dir(top), func(below string) bool {
			name := below[strings.LastIndexByte(below, '/')+1:]
			if !fits(name) {
				return false
			}
			found = append(found, strings.TrimSuffix(top, "/")+below)
			return true
		})
		if err != nil {
			return nil, failed("search cgroup", h.dir(top), err)
		}
	}
	slices.Sort(found)
	return slices.Compact(found), nil
}

// search calls stop for each cgroup below the one called name in the directory
// parent, by its path from there, and goes on into those for which it is false.
func search(parent int, name string, stop func(below string) bool) error {
	fd, err := unix.Openat(parent, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT || err == unix.ENODEV {
		return nil
	}
	if err != nil {
		return err
	}
	dir := os.NewFile(uintptr(fd), name)
	defer dir.Close()
	entries, err := dir.ReadDir(-1)
	if err != nil && !gone(err) {
		return err
	}
	for _, e := range entries {
		if !e.IsDir() || stop("/"+e.Name()) {
			continue
		}
		err := search(fd, e.Name(), func(below string) bool { return stop("/" + e.Name() + below) })
		if err != nil {
			return err
		}
	}
	return nil
}

// Exists tells whether there is a cgroup path, in any hierarchy.
func Exists(cgroup string) (bool, error) {
	cgroup, err := clean(cgroup)
	if err != nil {
		return false, failed("look for cgroup", cgroup, err)
	}
	all, _, err := find()
	if err != nil {
		return false, failed("look for cgroup", cgroup, err)
	}
	for _, h := range all {
		switch err := unix.Access(h.dir(cgroup), unix.F_OK); err {
		case nil:
			return true, nil
		case unix.ENOENT, unix.ENOTDIR:
		default:
			return false, failed("look for cgroup", h.dir(cgroup), err)
		}
	}
	return false, nil
}
