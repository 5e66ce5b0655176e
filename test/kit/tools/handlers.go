package tools

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
)

// Runtime handlers that are not in every node. Those whose name begins with
// "shim-" are driven by containerd's shim protocol.
const (
	CurrentRunc    = "runc-current"
	Gvisor         = "runsc"
	RuncShim       = "shim-runc"         // containerd's own shim, as Debian has it
	CurrentShim    = "shim-runc-current" // that of the current containerd, which reads everything from its standard input
	GvisorShim     = "shim-runsc"
	Kata           = "shim-kata"  // a stand-in for Kata's shim
	Kata1          = "shim-kata1" // one for that of Kata 1
	KataCLI        = "kata-runtime"
	Wasm           = "shim-wasm" // a stand-in for a shim on runwasi
	shimNamePrefix = "shim-"
)

// IsShim reports whether a handler is driven by containerd's shim protocol.
func IsShim(handler string) bool { return strings.HasPrefix(handler, shimNamePrefix) }

// KillsChildren reports whether a command that exceeds its time limit is killed
// with its children. In a sandbox that a shim has made, and in any virtual machine,
// these are out of reach, and end with their container.
func KillsChildren(handler string) bool {
	switch handler {
	case GvisorShim, Kata, Kata1, KataCLI:
		return false
	}
	return true
}

// Handler returns the configuration of a handler, whose runtime it builds if
// necessary. It is a template for test/kit/node.
func Handler(ctx context.Context, name string) (config string, err error) {
	kind, path, further := "oci", "", ""
	if IsShim(name) {
		kind = "shim"
	}
	switch name {
	case CurrentRunc:
		path, err = Runc(ctx)
	case Gvisor: // which by default allows neither a pod's profile nor set-user-id
		path, err = Runsc(ctx)
		further = `options = ["--oci-seccomp", "--allow-suid"]` + "\n"
	case RuncShim:
		path, err = exec.LookPath("containerd-shim-runc-v2")
	case CurrentShim:
		path, err = Containerd(ctx)
		path = filepath.Join(filepath.Dir(path), "containerd-shim-runc-v2")
	case GvisorShim:
		path, further, err = gvisorShim(ctx)
	case Kata:
		path, err = KataShim(ctx)
	case Kata1:
		path, err = OldKataShim(ctx)
	case Wasm:
		path, err = WasmShim(ctx)
	case KataCLI:
		path, err = KataRuntime(ctx)
		further = `options = ["--kata-config={{.Path "kata"}}"]` + "\n"
	default:
		err = fmt.Errorf("tests have no handler %q", name)
	}
	return fmt.Sprintf("[runtime.handlers.%s]\ntype = %q\npath = %q\n", name, kind, path) + further, err
}

func gvisorShim(ctx context.Context) (path, options string, err error) {
	if path, err = RunscShim(ctx); err != nil {
		return "", "", err
	}
	config, err := RunscShimConfig(ctx)
	return path, fmt.Sprintf("options = [\"--TypeUrl=io.containerd.runsc.v1.options\", %q]\n", "--ConfigPath="+config), err
}
