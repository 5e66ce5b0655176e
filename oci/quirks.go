package oci

import (
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/oci/version"
)

// quirks are how a family of OCI runtimes wants to be driven, in what families
// differ in.
type quirks struct {
	// systemd is the global flag that makes it ask systemd for cgroups; empty: it
	// has none.
	systemd string
	// sandboxed: all containers of a pod live in a runtime sandbox, with a kernel of its
	// own, which the runtime makes for the first of them and finds again by the
	// annotations of the others. Only the runtime can send them a signal.
	sandboxed bool
	// start: the streams of a container in a sandbox are given to the verb start,
	// and not to create.
	start bool
	// log are global flags after which comes the path of a file for its errors,
	// which are JSON objects with a msg. Needed where standard error is the
	// container's.
	log []string
	// wait is the verb that ends when a container in a sandbox does, and prints
	// how. Empty: the pid that create has left is a process that ends with it.
	wait string
	// tellSize: processes on the terminal of a container in a sandbox get no SIGWINCH
	// when its size changes.
	tellSize bool
	// innerPID is the flag of exec for a file with the command's pid inside the
	// runtime sandbox; the pid on the host is that of a helper, whose death the command survives.
	innerPID string
	// forward is the verb, with its flag, that connects a unix socket with a port
	// of the sandbox's own network. Empty: the pod's address leads there.
	forward []string
	// swapFirst: update raises the limit of memory before that of memory and swap
	// together, which cgroup v1 refuses.
	swapFirst bool
	// hostNetwork are the global flags for a sandbox in the node's network.
	hostNetwork []string
	// helper is the word on the command line of a process that it leaves beside a
	// container, and whose zombie its delete takes for alive.
	helper string
	// stateFiles is where in its root, or elsewhere, it keeps what it knows of a
	// container: patterns in which ID stands for the id.
	stateFiles []string
}

// runscStateFiles: the socket is named after the first container of a sandbox. It is in
// /run if its path below the root would be too long for a socket.
var runscStateFiles = []string{"ID_sandbox:*", runscSocket("ID"), "/run/" + runscSocket("ID")}

func runscSocket(id string) string { return "runsc-" + id + ".sock" }

// knownQuirks are those of which crius knows, by what they call themselves.
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
			stateFiles:  runscStateFiles,
		}
	case "kata-runtime": // of Kata 1; later ones have no command line
		return quirks{sandboxed: true, stateFiles: []string{"ID"}}
	}
	// What runc has laid down, and crun and youki follow.
	return quirks{systemd: "--systemd-cgroup", stateFiles: []string{"ID"}}
}

// quirksOf knows a runtime by the first word of its answer to --version.
func quirksOf(answer string) quirks { return knownQuirks(version.Program(answer)) }

// onHostNetwork reports whether the container has the node's network.
func onHostNetwork(namespaces []specs.LinuxNamespace) bool {
	return !slices.ContainsFunc(namespaces, func(n specs.LinuxNamespace) bool { return n.Type == specs.NetworkNamespace })
}
