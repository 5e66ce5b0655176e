package cgroup

import (
	"errors"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/inherit"
)

// Start calls start on one of inherit.Start's threads. Processes that it starts
// with the given attributes are born in the cgroup path: they are never
// anywhere else, and need not be moved. Every move of a process
// waits for an RCU grace period, some 10 ms on an idle machine, the same for
// one hierarchy as for all; Start does not.
//
// If names are given, processes are born there only in v1 hierarchies with one of these names
// ("memory", "name=systemd"), and in the v2 hierarchy if "" is among them. start may add to the
// attributes, and must not use them after it returns; a parent death signal is not possible. In a v2
// hierarchy Start needs Linux 5.7.
func Start(cgroup string, start func(*syscall.SysProcAttr) error, names ...string) error {
	cgroup, err := clean(cgroup)
	if err != nil {
		return failed("start in cgroup", cgroup, err)
	}
	all, _, err := find()
	if err != nil {
		return failed("start in cgroup", cgroup, err)
	}
	return inherit.Start(func() error { // a thread with a real-time policy could not be moved
		var attr syscall.SysProcAttr
		for _, h := range moves(all, cgroup, names) {
			if !h.v2() {
				if err := h.enter(cgroup); err != nil {
					return failed("start in cgroup", h.dir(cgroup), err)
				}
				continue
			}
			dir, err := h.open(cgroup)
			if err != nil {
				return failed("start in cgroup", h.dir(cgroup), err)
			}
			defer unix.Close(dir)
			attr.UseCgroupFD, attr.CgroupFD = true, dir
		}
		return start(&attr)
	})
}

// moves returns the hierarchies in which a process must be moved to be in
// cgroup.
func moves(all []hierarchy, cgroup string, names []string) []hierarchy {
	return slices.DeleteFunc(slices.Clone(all), func(h hierarchy) bool {
		wanted := len(names) == 0 || slices.ContainsFunc(names, h.has)
		return !wanted || h.own == cgroup
	})
}

// enter moves the calling thread into a cgroup of a v1 hierarchy.
func (h hierarchy) enter(cgroup string) error {
	err := write(h.dir(cgroup)+"/tasks", "0")
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOSPC) { // not made yet, or an empty cpuset
		if err := h.make(cgroup); err != nil {
			return err
		}
		err = write(h.dir(cgroup)+"/tasks", "0")
	}
	return err
}

func (h hierarchy) open(cgroup string) (int, error) {
	if err := h.make(cgroup); err != nil {
		return -1, err
	}
	return unix.Open(h.dir(cgroup), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
}
