package oci

import (
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/oci/version"
)

// quirks are the differences between families of OCI runtimes in how crius
// drives them.
type quirks struct {
	// systemd is the global flag that makes the runtime use systemd for cgroups;
	// empty: it has none.
	systemd string
	// sandboxed: all containers of a pod live in a runtime sandbox with its own kernel.
	// The runtime makes it for the first container and finds it again by the
	// annotations of the others. Only the runtime can send signals to those.
	sandboxed bool
	// machine: the runtime sandbox is a virtual machine.
	machine bool
	// start: a container in a runtime sandbox gets its streams from the verb start, not
	// from create.
	start bool
	// log are global flags followed by the path of a file for errors, which are
	// JSON objects with a msg. Needed where standard error is the container's.
	log []string
	// wait is the verb that ends when a container in a runtime sandbox ends, and prints
	// how it ended. Empty: the pid that create has left is a process that ends
	// with the container.
	wait string
	// tellSize: processes on the terminal of a container in a runtime sandbox get no
	// SIGWINCH when its size changes.
	tellSize bool
	// innerPID is the flag of exec for a file with the command's pid inside the
	// runtime sandbox; the pid on the host is that of a helper, whose death the command survives.
	innerPID string
	// forward is the verb, with its flag, that connects a unix socket with a port
	// of the runtime sandbox's own network. Empty: the pod's address leads there.
	forward []string
	// lateSize: exec sets the size of the terminal while the command starts, not before.
	lateSize bool
	// swapFirst: update raises the memory limit before that of memory and swap
	// together, which cgroup v1 refuses.
	swapFirst bool
	// hostNetwork are the global flags for a runtime sandbox in the node's network.
	hostNetwork []string
	// helper is the word on the command line of a process that the runtime leaves
	// beside a container, and whose zombie its delete takes for alive.
	helper string
	// stateFiles are patterns for the runtime's state files of a container, in
	// its root or elsewhere; ID stands for the id.
	stateFiles []string
	// holds: it passes criu a file of options at a restore too, so that the container can be held.
	holds bool
	// saves: its verb checkpoint writes the whole runtime sandbox, without criu.
	saves bool
	// inRoot: all state files are in the root, where StateFiles finds them.
	inRoot bool
}

// runscStateFiles: the socket is named after the first container of a runtime sandbox.
// It is in /run if its path below the root would be too long for a socket.
var runscStateFiles = []string{"ID_sandbox:*", runscSocket("ID"), "/run/" + runscSocket("ID")}

// kataStateFiles: Kata 1 ignores --root. What is mounted in the last one is the
// guest's, and comes from the node.
var kataStateFiles = []string{
	"/run/kata-containers/containers-mapping/ID", "/run/vc/sbs/ID", "/run/vc/vm/ID", "/var/lib/vc/sbs/ID", "/run/kata-containers/shared/sandboxes/ID",
}

func runscSocket(id string) string { return "runsc-" + id + ".sock" }

// knownQuirks returns the quirks of the runtimes that crius knows, by the name
// that they report.
func knownQuirks(name string) quirks {
	switch name {
	case "runsc":
		return quirks{
			systemd:     "--systemd-cgroup",
			sandboxed:   true,
			start:       true,
			log:         []string{"--log-format=json", "--log"},
			wait:        "wait",
			tellSize:    true,
			innerPID:    "--internal-pid-file",
			forward:     []string{"port-forward", "--stream"},
			swapFirst:   true,
			hostNetwork: []string{"--network=host"},
			helper:      "gofer",
			saves:       true,
			stateFiles:  runscStateFiles,
			inRoot:      true,
		}
	case "crun":
		return quirks{systemd: "--systemd-cgroup", stateFiles: []string{"ID"}, inRoot: true, lateSize: true}
	case "kata-runtime": // Kata 1; later versions have no command line
		return quirks{sandboxed: true, machine: true, stateFiles: kataStateFiles}
	}
	// The convention of runc, which crun and youki follow.
	return quirks{systemd: "--systemd-cgroup", stateFiles: []string{"ID"}, inRoot: name == "runc" || name == "youki", holds: name == "runc"}
}

// quirksOf identifies a runtime by the first word of its answer to --version.
func quirksOf(answer string) quirks { return knownQuirks(version.Program(answer)) }

// onHostNetwork reports whether the container uses the node's network.
func onHostNetwork(namespaces []specs.LinuxNamespace) bool {
	return !slices.ContainsFunc(namespaces, func(n specs.LinuxNamespace) bool { return n.Type == specs.NetworkNamespace })
}
