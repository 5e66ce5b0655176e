package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/testkit/inventory"
)

// ownerFile names the process that made a node.
const ownerFile = "owner"

// Sweep removes what nodes of processes that are gone left behind, such as
// those of a test run that was killed.
func Sweep() error {
	files, err := filepath.Glob("/tmp/cr??????/" + ownerFile)
	if err != nil {
		return err
	}
	var errs []error
	for _, file := range files {
		data, err := os.ReadFile(file)
		pid, convErr := strconv.Atoi(string(data))
		if err != nil || convErr != nil || unix.Kill(pid, 0) == nil {
			continue
		}
		dir := filepath.Dir(file)
		errs = append(errs, scrub(filepath.Base(dir), dir))
	}
	return errors.Join(errs...)
}

// scrub removes everything of a node but its network, whatever state it is in.
func scrub(id, dir string) error {
	var errs []error
	errs = append(errs, endProcesses(id, dir))
	errs = append(errs, unmountBelow(dir), removeCgroups(id))
	unix.Unmount(dir, unix.MNT_DETACH) // not mounted is as good
	return errors.Join(append(errs, os.RemoveAll(dir))...)
}

// endProcesses kills until none is left, since a process may start others
// while it is being killed.
func endProcesses(id, dir string) error {
	for deadline := time.Now().Add(time.Minute); ; {
		thaw(id)
		pids := inventory.Processes(inventory.Scope{Dir: dir, Cgroup: "/" + id, Ignore: []int{os.Getpid()}})
		if len(pids) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("processes of node %s survive SIGKILL: %v", id, pids)
		}
		for _, pid := range pids {
			unix.Kill(pid, unix.SIGKILL)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// thaw lets frozen processes see their SIGKILL.
func thaw(id string) {
	for _, dir := range inventory.Cgroups("/" + id) {
		state := filepath.Join(dir, "freezer.state")
		if data, err := os.ReadFile(state); err == nil && !bytes.HasPrefix(data, []byte("THAWED")) {
			os.WriteFile(state, []byte("THAWED"), 0)
		}
	}
}

func unmountBelow(dir string) error {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	lines := strings.Split(string(data), "\n")
	slices.Reverse(lines)
	for _, line := range lines {
		f := strings.Fields(line)
		if len(f) > 4 && strings.HasPrefix(f[4], dir+"/") {
			unix.Unmount(strings.ReplaceAll(f[4], `\040`, " "), unix.MNT_DETACH)
		}
	}
	return nil
}

// removeCgroups takes its time over each: a process that is told to be in no cgroup
// any more, since it is ending, still keeps its own for a moment.
func removeCgroups(id string) error {
	var errs []error
	deadline := time.Now().Add(10 * time.Second)
	for _, dir := range slices.Backward(inventory.Cgroups("/" + id)) {
		err := os.Remove(dir)
		for errors.Is(err, unix.EBUSY) && time.Now().Before(deadline) {
			time.Sleep(5 * time.Millisecond)
			err = os.Remove(dir)
		}
		if err != nil && !os.IsNotExist(err) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Reboot does to the node what losing power and coming back does: every
// process ends at once, mounts, cgroups, interfaces, firewall rules and the
// run root are gone, the disk stays, and the kernel has another boot id.
func (n *Node) Reboot(ctx context.Context) error {
	if err := n.Kill(); err != nil {
		return err
	}
	errs := []error{endProcesses(n.ID, n.Dir), unmountBelow(n.Dir), removeCgroups(n.ID)}
	for _, volatile := range []string{"r", "ns", "imgrun", "crius.sock"} {
		errs = append(errs, os.RemoveAll(n.Path(volatile)))
	}
	for _, dir := range pinDirs {
		errs = append(errs, os.MkdirAll(n.Path(dir), 0o755))
	}
	if _, err := n.Run(ctx, "nft", "flush", "ruleset"); err != nil {
		errs = append(errs, err)
	}
	n.Run(ctx, "ip", "link", "delete", Bridge) // there may be none yet
	n.boots++
	id := fmt.Sprintf("00000000-0000-4000-8000-%012d\n", n.boots)
	errs = append(errs, os.WriteFile(n.Path("boot_id"), []byte(id), 0o644))
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return n.Start(ctx)
}

// bootWrapper shows the server another boot id, in a mount namespace of its
// own from which mounts below the node's directory still reach everybody.
func (n *Node) bootWrapper() []string {
	const script = `mount --make-rprivate /proc && mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"`
	return []string{"unshare", "--mount", "--propagation", "unchanged", "sh", "-c", script, n.Path("boot_id")}
}
