package claim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/ids"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/wait"
)

// scrub removes everything with the name except network namespaces, which end
// with their last process and mount, in any state.
func (c *Claim) scrub() error {
	if err := c.EndProcesses(); err != nil {
		return err
	}
	errs := []error{c.removeShared(), c.Unmount(), c.RemoveCgroups()}
	for unix.Unmount(c.Dir, unix.MNT_DETACH) == nil { // it may be mounted on itself
	}
	return errors.Join(append(errs, os.RemoveAll(c.Dir))...)
}

// EndProcesses kills the processes in the claim's cgroups, and those that name
// its directory, until none is left: a process may start others while it is
// being killed.
func (c *Claim) EndProcesses() error {
	var pids []int
	gone := wait.Until(context.Background(), func() bool {
		thaw(c.ID)
		pids = inventory.Processes(inventory.Scope{Dir: c.Dir, Cgroup: "/" + c.ID, Ignore: []int{os.Getpid()}})
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		return len(pids) == 0
	})
	if !gone {
		return fmt.Errorf("processes of %s survive SIGKILL: %v", c.ID, pids)
	}
	return nil
}

// thaw lets frozen processes receive their SIGKILL.
func thaw(id string) {
	for _, dir := range inventory.Cgroups("/" + id) {
		state := filepath.Join(dir, "freezer.state")
		if data, err := os.ReadFile(state); err == nil && !bytes.HasPrefix(data, []byte("THAWED")) {
			_ = os.WriteFile(state, []byte("THAWED"), 0)
		}
	}
}

// roots are where nodes have crius's state, below a claim's directory: see
// test/kit/node.
var roots = []string{"lib", "disk/lib"}

// places are where runtimes have files with ids in their names.
var places = inventory.OfRuntimes

// shimSockets is where containerd's shims, which also serve in stand-ins for
// others, make sockets whose names say nothing. Each of them has its address in a
// file of its working directory, which is one of shimDirs.
var shimSockets = "/run/containerd/s"

var shimDirs = []string{"r/containers/*", "r/pods/*/infra"}

// removeShared removes what the runtimes of a node, which are dead, have left in
// places that nodes share: what has an id of the node in its name, and the sockets
// of its shims.
func (c *Claim) removeShared() error {
	var left []string
	for _, root := range roots {
		paths, err := inventory.Shared(places, ids.Mark(filepath.Join(c.Dir, root)))
		if err != nil {
			return err
		}
		left = append(left, paths...)
	}
	for _, dir := range shimDirs {
		files, err := filepath.Glob(filepath.Join(c.Dir, dir, "address"))
		if err != nil {
			return err
		}
		for _, file := range files {
			address, _ := os.ReadFile(file)
			if path := filepath.Clean(strings.TrimPrefix(strings.TrimSpace(string(address)), "unix://")); filepath.Dir(path) == shimSockets {
				left = append(left, path)
			}
		}
	}
	var errs []error
	for _, path := range left {
		errs = append(errs, mount.RemoveTree(path))
	}
	return errors.Join(errs...)
}

// Unmount detaches every mount below the claim's directory.
func (c *Claim) Unmount() error {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	lines := strings.Split(string(data), "\n")
	slices.Reverse(lines)
	for _, line := range lines {
		f := strings.Fields(line)
		if len(f) > 4 && strings.HasPrefix(f[4], c.Dir+"/") {
			_ = unix.Unmount(strings.ReplaceAll(f[4], `\040`, " "), unix.MNT_DETACH)
		}
	}
	return nil
}

// RemoveCgroups removes the claim's cgroups, which must be empty. A process
// that is ending keeps its cgroup for a moment after the cgroup lists none.
func (c *Claim) RemoveCgroups() error {
	// One limit for all: processes in another PID namespace, which may be there for ever, cannot be seen.
	ctx, cancel := context.WithTimeout(context.Background(), wait.Limit)
	defer cancel()
	var errs []error
	for _, dir := range slices.Backward(inventory.Cgroups("/" + c.ID)) {
		var err error
		wait.Until(ctx, func() bool {
			err = os.Remove(dir)
			return !errors.Is(err, unix.EBUSY)
		})
		if err != nil && !os.IsNotExist(err) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
