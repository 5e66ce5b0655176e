//go:build tools

// Package tools pins the versions of the CRI programs with which crius is
// tested. It is a separate module, so that their dependencies never become
// crius's: build them with
//
//	go build -C test/tools -o DIR/crictl sigs.k8s.io/cri-tools/cmd/crictl
//	go test -C test/tools -c -o DIR/critest sigs.k8s.io/cri-tools/cmd/critest
package tools

import (
	_ "sigs.k8s.io/cri-tools/cmd/crictl"
	_ "sigs.k8s.io/cri-tools/cmd/critest"
)
