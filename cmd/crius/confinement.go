package main

import (
	"context"
	"fmt"

	"github.com/crius-run/crius/cmd/crius/config"
)

// confinement says in one line what separates containers from the node, besides namespaces.
func (h host) confinement(c config.Config) string {
	return fmt.Sprintf("SELinux %s; AppArmor %s; seccomp %s", h.selinux(c), h.appArmor(c), h.seccomp(c))
}

func (h host) selinux(c config.Config) string {
	switch enforce := h.read("sys/fs/selinux/enforce"); {
	case enforce == "":
		return "not enabled on this node"
	case !c.Pod.SELinux:
		return "not used (pod.selinux = false)"
	case enforce == "0":
		return "permissive"
	}
	return "enforcing"
}

func (h host) appArmor(c config.Config) string {
	switch {
	case h.read("sys/module/apparmor/parameters/enabled") != "Y":
		return "not enabled on this node"
	case c.Pod.AppArmorProfile == "":
		return "on, no default profile (pod.apparmor_profile)"
	}
	return "on, default profile " + c.Pod.AppArmorProfile
}

func (h host) seccomp(c config.Config) string {
	switch {
	case !h.exists("proc/sys/kernel/seccomp"):
		return "missing in the kernel"
	case c.Pod.SeccompProfile != "":
		return "on, default profile " + c.Pod.SeccompProfile
	}
	return "on, crius's default profile"
}

// checkConfinement reports what separates containers from the node. What is wrong with it, the check
// of the kernel says.
func (n *node) checkConfinement(context.Context) []finding {
	return []finding{ok("%s", n.host.confinement(n.config.Config))}
}
