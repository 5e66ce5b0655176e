//go:build tools

// Package tools pins the version of gVisor with which crius is tested. It is a
// separate module, because gVisor needs dependencies in versions that nothing
// else does; package test/kit/tools builds it.
package tools

import (
	_ "gvisor.dev/gvisor/runsc"
	_ "gvisor.dev/gvisor/shim"
)
