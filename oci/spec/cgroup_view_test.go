package spec

import (
	"errors"
	"slices"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

// TestCgroupViews: what a container that asks for nothing gets, and what KEP-5474 and KEP-5714 let
// it ask for.
func TestCgroupViews(t *testing.T) {
	t.Parallel()
	const (
		unspecified = cri.CgroupMountMode_CGROUP_MOUNT_MODE_UNSPECIFIED
		readOnly    = cri.CgroupMountMode_CGROUP_MOUNT_MODE_READ_ONLY
		readWrite   = cri.CgroupMountMode_CGROUP_MOUNT_MODE_READ_WRITE
	)
	type node struct{ v2, delegates, own, lacks, handler bool }
	v1, v2, delegating := node{}, node{v2: true}, node{v2: true, delegates: true}
	own, sandboxed, lacking := cri.NamespaceMode_CONTAINER, node{v2: true, delegates: true, own: true}, node{v2: true, lacks: true}
	handler := node{v2: true, handler: true}
	some := func(mode cri.NamespaceMode) *cri.CgroupNamespace { return &cri.CgroupNamespace{Mode: mode} }
	// view is what a spec says: its cgroup namespace, and the type and access of the mount.
	type view struct {
		namespace    bool
		kind, access string
	}
	for name, c := range map[string]struct {
		node       node
		privileged bool
		namespace  *cri.CgroupNamespace
		mode       cri.CgroupMountMode
		want       view
		err        error
	}{
		"v1":                            {v1, false, nil, unspecified, view{false, "cgroup", "ro"}, nil},
		"v1, privileged":                {v1, true, nil, unspecified, view{false, "cgroup", "rw"}, nil},
		"v1, own":                       {v1, false, some(own), unspecified, view{true, "cgroup", "ro"}, nil},
		"v1, node's":                    {v1, false, some(nodeMode), unspecified, view{false, "cgroup", "ro"}, nil},
		"v1, read-only":                 {v1, false, nil, readOnly, view{false, "cgroup", "ro"}, nil},
		"v1, writable":                  {v1, false, nil, readWrite, view{}, fault.Unimplemented},
		"v1, privileged, writable":      {v1, true, nil, readWrite, view{}, fault.Unimplemented},
		"v2":                            {v2, false, nil, unspecified, view{true, "cgroup", "ro"}, nil},
		"v2, privileged":                {v2, true, nil, unspecified, view{false, "cgroup", "rw"}, nil},
		"v2, privileged, own":           {v2, true, some(own), unspecified, view{true, "cgroup", "rw"}, nil},
		"v2, own":                       {v2, false, some(own), readOnly, view{true, "cgroup", "ro"}, nil},
		"v2, node's":                    {v2, false, some(nodeMode), unspecified, view{false, "bind", "ro"}, nil},
		"v2, privileged, node's":        {v2, true, some(nodeMode), unspecified, view{false, "cgroup", "rw"}, nil},
		"v2 that does not delegate":     {v2, false, nil, readWrite, view{}, fault.Unimplemented},
		"privileged, no delegation":     {v2, true, nil, readWrite, view{}, fault.Unimplemented},
		"writable":                      {delegating, false, nil, readWrite, view{true, "cgroup", "rw"}, nil},
		"writable, own":                 {delegating, false, some(own), readWrite, view{true, "cgroup", "rw"}, nil},
		"writable, node's":              {delegating, false, some(nodeMode), readWrite, view{}, fault.Invalid},
		"writable, node's, privileged":  {delegating, true, some(nodeMode), readWrite, view{false, "cgroup", "rw"}, nil},
		"read-only, privileged":         {delegating, true, nil, readOnly, view{}, fault.Invalid},
		"unknown mount mode":            {delegating, false, nil, 9, view{}, fault.Invalid},
		"the pod's":                     {delegating, false, some(podMode), unspecified, view{}, fault.Invalid},
		"a target's":                    {delegating, true, some(target), unspecified, view{}, fault.Invalid},
		"own kernel":                    {sandboxed, false, nil, unspecified, view{true, "cgroup", "ro"}, nil},
		"own kernel, privileged":        {sandboxed, true, nil, unspecified, view{false, "cgroup", "rw"}, nil},
		"own kernel, own":               {sandboxed, false, some(own), unspecified, view{}, fault.Unimplemented},
		"own kernel, node's":            {sandboxed, true, some(nodeMode), unspecified, view{}, fault.Unimplemented},
		"own kernel, writable":          {sandboxed, false, nil, readWrite, view{}, fault.Unimplemented},
		"own kernel, read-only":         {sandboxed, false, nil, readOnly, view{}, fault.Unimplemented},
		"runtime without namespaces":    {lacking, true, some(own), unspecified, view{}, fault.Unimplemented},
		"handler's writable":            {handler, false, nil, unspecified, view{true, "cgroup", "rw"}, nil},
		"handler's writable, read-only": {handler, false, nil, readOnly, view{true, "cgroup", "ro"}, nil},
		"handler's writable, node's":    {handler, false, some(nodeMode), unspecified, view{}, fault.Invalid},
	} {
		in := typical()
		in.Facts.Host.CgroupV2, in.Facts.OwnKernel, in.Facts.CgroupNamespaces = c.node.v2, c.node.own, !c.node.lacks
		in.Defaults.WritableCgroups = c.node.handler
		if in.Facts.CgroupOptions = []string{"memory_recursiveprot"}; c.node.delegates {
			in.Facts.CgroupOptions = append(in.Facts.CgroupOptions, "nsdelegate")
		}
		sc := in.Request.Container.Linux.SecurityContext
		sc.Privileged, sc.CgroupMountMode, sc.NamespaceOptions.CgroupnsOptions = c.privileged, c.mode, c.namespace
		in.Request.Pod.Linux.SecurityContext.Privileged = c.privileged
		s, err := Container(in)
		if c.err != nil {
			if !errors.Is(err, c.err) {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		m := mountAt(t, s, "/sys/fs/cgroup")
		got := view{kind: m.Type}
		_, got.namespace = namespacePaths(s)[specs.CgroupNamespace]
		for _, access := range []string{"ro", "rw"} {
			if slices.Contains(m.Options, access) {
				got.access += access
			}
		}
		if got != c.want {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
		// Options of a mount in the node's cgroup namespace become those of the node.
		sets := c.node.v2 && !c.node.own && m.Type == "cgroup" && !got.namespace
		if slices.Contains(m.Options, "memory_recursiveprot") != sets || slices.Contains(m.Options, "nsdelegate") != (sets && c.node.delegates) {
			t.Errorf("%s: mount options %q", name, m.Options)
		}
	}
}
