// Package cgroup makes, measures, empties and removes control groups, and starts
// processes in them, in any of the three layouts of a node: one tree (v2), a tree
// for each controller (v1), or both side by side (hybrid).
//
// A path is relative to the cgroup file systems, such as
// "/kubepods/pod1/crius-2", and names the same place in every hierarchy. It
// must be absolute and without "..". Each call reads the mount points of the
// hierarchies from the mount table; only Meters remember them.
//
// crius-conmon links this package, so it uses as little of the standard library
// as possible.
package cgroup

import (
	"errors"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// Mode is the layout of the node's cgroups.
type Mode int

// The layouts.
const (
	None   Mode = iota // no cgroup file system is mounted
	V1                 // every resource controller has a v1 hierarchy
	Hybrid             // as V1, and a v2 hierarchy beside them for tracking processes
	V2                 // the resource controllers are in the one v2 hierarchy
)

// Detect returns the node's layout.
func Detect() Mode {
	_, mode, err := find()
	if err != nil {
		return None
	}
	return mode
}

// Move moves another process into the cgroup path, which it makes, in every
// hierarchy that has the parent cgroup. The process's usage until then stays
// accounted to its old cgroup.
func Move(cgroup string, pid int) error {
	cgroup, err := clean(cgroup)
	if err != nil {
		return failed("move to cgroup", cgroup, err)
	}
	all, _, err := find()
	if err != nil {
		return failed("move to cgroup", cgroup, err)
	}
	for _, h := range all {
		err := h.makeOne(cgroup)
		if err == nil {
			err = write(h.dir(cgroup)+"/cgroup.procs", strconv.Itoa(pid))
		}
		if err != nil && !errors.Is(err, unix.ENOENT) { // or a parent is missing, or is being removed
			return failed("move to cgroup", h.dir(cgroup), err)
		}
	}
	return nil
}

// Make makes the cgroup path and its parents in every hierarchy where they are
// missing.
func Make(cgroup string) error {
	cgroup, err := clean(cgroup)
	if err != nil {
		return failed("make cgroup", cgroup, err)
	}
	all, _, err := find()
	if err != nil {
		return failed("make cgroup", cgroup, err)
	}
	for _, h := range all {
		if err := h.make(cgroup); err != nil {
			return failed("make cgroup", h.dir(cgroup), err)
		}
	}
	return nil
}

// make makes cgroup and its parents. A new cpuset has neither CPUs nor memory
// nodes and accepts no process: it gets those of its parent.
func (h hierarchy) make(cgroup string) error {
	if cgroup == "/" {
		return nil
	}
	if err := h.make(path.Dir(cgroup)); err != nil {
		return err
	}
	return h.makeOne(cgroup)
}

// makeOne makes a cgroup whose parent exists.
func (h hierarchy) makeOne(cgroup string) error {
	if err := unix.Mkdir(h.dir(cgroup), 0o755); err != nil && err != unix.EEXIST {
		return err
	}
	if !h.has("cpuset") {
		return nil
	}
	for _, file := range []string{"/cpuset.cpus", "/cpuset.mems"} {
		own, err := os.ReadFile(h.dir(cgroup) + file)
		if err != nil {
			return err
		}
		if strings.TrimSpace(string(own)) != "" {
			continue
		}
		inherited, err := os.ReadFile(h.dir(path.Dir(cgroup)) + file)
		if err != nil {
			return err
		}
		if err := write(h.dir(cgroup)+file, strings.TrimSpace(string(inherited))); err != nil {
			return err
		}
	}
	return nil
}

// Own returns the cgroup of this process: in the v2 hierarchy, else in
// systemd's, else in that of the memory controller.
func Own() (string, error) {
	all, _, err := find()
	if err != nil {
		return "", failed("find own cgroup", "/proc/self/cgroup", err)
	}
	for _, name := range []string{"", "name=systemd", "memory"} {
		for _, h := range all {
			if h.has(name) {
				return h.own, nil
			}
		}
	}
	return "", failed("find own cgroup", "/proc/self/cgroup", problem{fault.NotFound, "no cgroup file system is mounted"})
}

// Procs returns the processes in the cgroup path and below it, in any
// hierarchy, by ascending pid. A missing cgroup has none.
func Procs(cgroup string) ([]int, error) {
	cgroup, err := clean(cgroup)
	if err != nil {
		return nil, failed("list cgroup", cgroup, err)
	}
	all, _, err := find()
	if err != nil {
		return nil, failed("list cgroup", cgroup, err)
	}
	pids, err := members(all, cgroup)
	if err != nil {
		return nil, failed("list cgroup", cgroup, err)
	}
	return pids, nil
}

func members(all []hierarchy, cgroup string) ([]int, error) {
	var pids []int
	for _, h := range all {
		err := walk(h.dir(cgroup), nil, func(_ int, _ string, dir int) error {
			list, err := read(dir, "cgroup.procs")
			if err != nil && !gone(err) && !errors.Is(err, unix.EOPNOTSUPP) { // of a threaded cgroup, whose domain lists the processes
				return err
			}
			for line := range strings.Lines(list) {
				if pid, err := strconv.Atoi(strings.TrimSpace(line)); err == nil {
					pids = append(pids, pid)
				}
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	slices.Sort(pids)
	return slices.Compact(pids), nil
}

// clean returns the canonical form of a path. Cgroups have no symbolic links,
// so a path without ".." cannot leave its hierarchy.
func clean(cgroup string) (string, error) {
	if !strings.HasPrefix(cgroup, "/") {
		return cgroup, problem{fault.Invalid, "a cgroup path must begin with /"}
	}
	for _, part := range strings.Split(cgroup, "/") {
		if part == ".." {
			return cgroup, problem{fault.Invalid, "a cgroup path must not contain .."}
		}
	}
	if strings.ContainsFunc(cgroup, func(r rune) bool { return r < ' ' }) {
		return cgroup, problem{fault.Invalid, "a cgroup path must not contain control characters"}
	}
	return path.Clean(cgroup), nil
}

// within reports whether cgroup is top or below it.
func within(cgroup, top string) bool {
	return cgroup == top || strings.HasPrefix(cgroup, strings.TrimSuffix(top, "/")+"/")
}

// problem is a text with the fault that it wraps.
type problem struct {
	fault error
	text  string
}

func (p problem) Error() string { return p.text }
func (p problem) Unwrap() error { return p.fault }

func failed(verb, path string, err error) error {
	if inner, ok := errors.AsType[*os.PathError](err); ok {
		path, err = inner.Path, inner.Err
	}
	return &os.PathError{Op: verb, Path: path, Err: err}
}
