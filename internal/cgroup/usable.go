package cgroup

import (
	"fmt"
	"os"

	"github.com/crius-run/crius/internal/fault"
)

// systemd marks a node that runs systemd (sd_booted(3)).
const systemd = "/run/systemd/system"

// Usable returns why containers cannot have cgroups with a driver, "systemd" or "cgroupfs", in the
// same words for as long as that lasts.
func Usable(driver string) error {
	_, err := os.Lstat(systemd)
	return usable(driver, err == nil, Detect())
}

func usable(driver string, booted bool, mode Mode) error {
	switch {
	case mode == None:
		return fmt.Errorf("no cgroup file system is mounted: mount cgroup2 at /sys/fs/cgroup: %w", fault.Unavailable)
	case driver == "systemd" && !booted:
		return fmt.Errorf("runtime.cgroup_driver is systemd, but this node does not run systemd: no %s; set runtime.cgroup_driver = \"cgroupfs\", and cgroupDriver: cgroupfs in the kubelet's configuration: %w",
			systemd, fault.Unavailable)
	}
	return nil
}
