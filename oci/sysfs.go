package oci

import (
	"context"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/internal/trace"
)

// holdSysfs makes the sysfs of the network namespace that the container joins
// writable until release is called, if the container's spec has it writable. A
// runtime that mounts sysfs read-only for the first container of a pod makes
// its superblock read-only, and with that the mounts of all later containers.
// Containers that may only read it keep read-only mounts.
func holdSysfs(ctx context.Context, s *specs.Spec) (release func(), err error) {
	netns, joined := joinedNetwork(s)
	if !joined || !slices.ContainsFunc(s.Mounts, writableSysfs) {
		return func() {}, nil
	}
	err = trace.Call(ctx, "make sysfs writable", func() error {
		hold, err := ns.WritableSysfs(netns)
		release = func() { hold.Close() }
		return err
	})
	return release, err
}

// joinedNetwork returns the path of the network namespace that a container
// joins, empty for the node's. joined is false for a container that makes its
// own.
func joinedNetwork(s *specs.Spec) (path string, joined bool) {
	for _, n := range s.Linux.Namespaces {
		if n.Type == specs.NetworkNamespace {
			return n.Path, n.Path != ""
		}
	}
	return "", true
}

func writableSysfs(m specs.Mount) bool {
	return m.Type == "sysfs" && !slices.Contains(m.Options, "ro")
}
