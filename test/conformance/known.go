package main

import (
	"slices"

	"github.com/crius-run/crius/test/kit/tools"
)

// knownFailure is a spec that fails with some handlers, for a reason outside of
// crius. docs/handlers.md has a row for each.
type knownFailure struct {
	spec     string // its full name
	handlers []string
	why      string
}

var (
	gvisor     = []string{tools.Gvisor, tools.GvisorShim}
	gvisorShim = []string{tools.GvisorShim}
)

// allKnownFailures are all of them.
var allKnownFailures = []knownFailure{
	{"Container Mount Propagation runtime should support mount propagation mount with 'rshared' should support propagation from host to container and vice versa", gvisor,
		"mounts in a sandbox are its own: gVisor refuses bidirectional mounts"},
	{"Container Mount Readonly runtime should support readonly mounts should support non-recursive readonly mounts", gvisor,
		"gVisor makes what is mounted in a read-only volume read-only as well"},
	{"Container OOM runtime should output OOMKilled reason should terminate with exitCode 137 and reason OOMKilled", gvisor,
		"the memory limit of one container is not in force, that of the pod is"},
	{"PodSandbox runtime should support metrics operations runtime should support listing pod sandbox metrics [Conformance]", gvisor,
		"gVisor counts no CFS periods of a container"},
	{"PodSandbox runtime should support sysctls should support safe sysctls", gvisor,
		"gVisor ignores sysctls that it does not have"},
	{"PodSandbox runtime should support sysctls should support unsafe sysctls", gvisor,
		"gVisor ignores sysctls that it does not have"},
	{"Security Context NamespaceOption runtime should support HostIpc is true", gvisor,
		"a sandbox has its own IPC objects, not the node's"},
	{"Security Context NamespaceOption runtime should support HostNetwork is true", gvisor,
		"a sandbox does not show the node's sockets"},
	{"Security Context bucket runtime should support MaskedPaths", gvisor,
		"gVisor ignores masked paths: /proc and /sys are its own"},
	{"Security Context bucket runtime should support ReadonlyPaths", gvisor,
		"gVisor ignores read-only paths: /proc and /sys are its own"},
	{"Security Context bucket runtime should support Privileged is true", gvisor,
		"there are no bridges and no /sys/class/net, for privileged containers either"},
	{"Security Context bucket runtime should support adding capability", gvisor,
		"there are no bridges and no /sys/class/net, for privileged containers either"},
	{"Streaming runtime should support streaming interfaces runtime should support portforward in host network", gvisorShim,
		"by the shim a pod in the node's network has a loopback interface alone"},
}

// knownFailures returns the reasons of a handler's known failures, by the names of
// the specs.
func knownFailures(handler string) map[string]string {
	reasons := map[string]string{}
	for _, k := range allKnownFailures {
		if slices.Contains(k.handlers, handler) {
			reasons[k.spec] = k.why
		}
	}
	return reasons
}
