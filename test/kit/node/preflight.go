package node

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
)

// preflight returns what the machine lacks, before a test fails for that
// reason. Of the runtimes it checks those that the node runs.
func preflight(runtimes []string) error {
	if os.Geteuid() != 0 {
		return errors.New("a node needs root: run the tests as root")
	}
	if runtimes == nil {
		runtimes = []string{"runc", "crun"}
	}
	for _, program := range append([]string{"iptables-save", "ip6tables-save", "nft", "ip", "unshare"}, runtimes...) {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("%w: install the test dependencies with test/setup.sh", err)
		}
	}
	if !slices.Contains(runtimes, "crun") {
		return nil
	}
	controllers, err := os.ReadFile("/sys/fs/cgroup/unified/cgroup.controllers")
	if left := strings.TrimSpace(string(controllers)); err == nil && left != "" {
		return fmt.Errorf("hybrid cgroups with controllers (%s) on the v2 side, which crun refuses: run test/setup.sh", left)
	}
	return nil
}
