package node

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// Reboot does to the node what a power loss and a boot do: every process ends
// at once; mounts, cgroups, interfaces, firewall rules and the run root are
// gone; the disk stays; the kernel has another boot id.
func (n *Node) Reboot(ctx context.Context) error {
	if err := n.Kill(); err != nil {
		return err
	}
	errs := []error{n.claim.EndProcesses(), n.claim.Unmount(), n.claim.RemoveCgroups()}
	for _, volatile := range []string{"r", "ns", "imgrun", "crius.sock"} {
		errs = append(errs, os.RemoveAll(n.Path(volatile)))
	}
	for _, dir := range pinDirs {
		errs = append(errs, os.MkdirAll(n.Path(dir), 0o755))
	}
	if _, err := n.Run(ctx, "nft", "flush", "ruleset"); err != nil {
		errs = append(errs, err)
	}
	_, _ = n.Run(ctx, "ip", "link", "delete", Bridge) // there may be none yet
	n.boots++
	id := fmt.Sprintf("00000000-0000-4000-8000-%012d\n", n.boots)
	errs = append(errs, os.WriteFile(n.Path("boot_id"), []byte(id), 0o644))
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return n.Start(ctx)
}

// bootWrapper shows the server another boot id, in its own mount namespace,
// from which mounts below the node's directory still propagate.
func (n *Node) bootWrapper() []string {
	const script = `mount --make-rprivate /proc && mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"`
	return []string{"unshare", "--mount", "--propagation", "unchanged", "sh", "-c", script, n.Path("boot_id")}
}
