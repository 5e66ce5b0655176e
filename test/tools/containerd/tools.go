//go:build tools

// Package tools pins the version of a current containerd, which is measured beside crius and whose configuration is
// imported, and those of its dependencies. It is a separate module, because nothing else needs them; package
// test/kit/tools builds it.
package tools

import (
	_ "github.com/containerd/containerd/v2/cmd/containerd"
	_ "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2"
)
