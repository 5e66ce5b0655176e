//go:build tools

// Package tools pins the version of gVisor that crius is tested with. It is a
// module of its own, because gVisor needs dependencies in versions that nobody
// else does; package testkit/tools builds it.
package tools

import _ "gvisor.dev/gvisor/runsc"
