package integration

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
)

// withCgroupView asks for a cgroup namespace and a mount mode.
func withCgroupView(privileged bool, namespace *cri.CgroupNamespace, mode cri.CgroupMountMode) containerChange {
	return func(c *cri.ContainerConfig) {
		sc := c.Linux.SecurityContext
		sc.Privileged, sc.CgroupMountMode, sc.NamespaceOptions.CgroupnsOptions = privileged, mode, namespace
	}
}

// cgroupNamespace returns the cgroup namespace of the container's first process.
func (c *container) cgroupNamespace(t *testing.T) string {
	t.Helper()
	for _, pid := range c.pod.w.processesOf(t, c.id) {
		if link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/cgroup", pid)); err == nil {
			return link
		}
	}
	t.Fatal("no process of the container")
	return ""
}

// cgroupMountOptions returns the options of the container's mounts of cgroups, and how many there are.
func (c *container) cgroupMountOptions(t *testing.T) (options []string, mounts int) {
	t.Helper()
	for line := range strings.Lines(c.procfs(t, "mountinfo")) {
		fields := strings.Fields(line)
		if strings.HasPrefix(fields[4], "/sys/fs/cgroup") && strings.Contains(line, " - cgroup") {
			options, mounts = append(options, strings.Split(fields[5], ",")...), mounts+1
		}
	}
	return options, mounts
}

// KEP-5714: a container sees the node's cgroups, or its own as the root.
func TestCgroupNamespaces(t *testing.T) {
	t.Parallel()
	w := shared(t)
	nodes, err := os.Readlink("/proc/self/ns/cgroup")
	must(t, err)
	each(t, func(t *testing.T, runtime string) {
		i := slices.IndexFunc(w.statusOf(t).RuntimeHandlers, func(h *cri.RuntimeHandler) bool { return h.Name == runtime })
		equal(t, "cgroup_namespaces of the handler", w.statusOf(t).RuntimeHandlers[i].Features.GetCgroupNamespaces(), true)
		for _, privileged := range []bool{false, true} {
			p := w.run(t, runtime, func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.Privileged = privileged })
			for _, mode := range []cri.NamespaceMode{cri.NamespaceMode_CONTAINER, cri.NamespaceMode_NODE} {
				c := p.start(t, "sleep", withCgroupView(privileged, &cri.CgroupNamespace{Mode: mode}, 0))
				own := mode == cri.NamespaceMode_CONTAINER
				equal(t, fmt.Sprintf("%s with privileged %v: a namespace of its own", mode, privileged), c.cgroupNamespace(t) != nodes, own)
				for line := range strings.Lines(c.exec(t, "cat /proc/1/cgroup")) {
					if path := strings.SplitN(strings.TrimSpace(line), ":", 3)[2]; own && path != "/" {
						t.Errorf("the container sees its cgroup as %s", line)
					}
				}
				options, mounts := c.cgroupMountOptions(t)
				if mounts == 0 || slices.Contains(options, "rw") != privileged {
					t.Errorf("%s with privileged %v: %d mounts of cgroups with %v", mode, privileged, mounts, options)
				}
			}
			for _, mode := range []cri.NamespaceMode{cri.NamespaceMode_POD, cri.NamespaceMode_TARGET} {
				_, err := p.try(t.Context(), steps("sleep"), withCgroupView(privileged, &cri.CgroupNamespace{Mode: mode}, 0))
				wantCode(t, err, codes.InvalidArgument, "cgroupns_options.mode")
			}
		}
		config := w.podConfig(t, func(c *cri.PodSandboxConfig) {
			c.Linux.SecurityContext.NamespaceOptions.CgroupnsOptions = &cri.CgroupNamespace{Mode: cri.NamespaceMode_CONTAINER}
		})
		_, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: runtime})
		wantCode(t, err, codes.InvalidArgument, "cgroupns_options")
	})
}

// KEP-5474: a container that asks for it may make cgroups below its own, where the kernel keeps it
// there, and is refused elsewhere. The node says which it is.
func TestCgroupMountModes(t *testing.T) {
	t.Parallel()
	w := shared(t)
	nodes, err := cgroup.Options()
	must(t, err)
	delegates := cgroup.Detect() == cgroup.V2 && slices.Contains(nodes, cgroup.NSDelegate)
	equal(t, "cgroup_mount_mode of the node", w.statusOf(t).Features.GetCgroupMountMode(), delegates)
	each(t, func(t *testing.T, runtime string) {
		const readOnly, readWrite = cri.CgroupMountMode_CGROUP_MOUNT_MODE_READ_ONLY, cri.CgroupMountMode_CGROUP_MOUNT_MODE_READ_WRITE
		p := w.run(t, runtime, func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.Privileged = true })
		reads := p.start(t, "sleep", withCgroupView(false, nil, readOnly))
		if options, mounts := reads.cgroupMountOptions(t); mounts == 0 || slices.Contains(options, "rw") {
			t.Errorf("read-only: %d mounts of cgroups with %v", mounts, options)
		}
		_, err := p.try(t.Context(), steps("sleep"), withCgroupView(true, nil, readOnly))
		wantCode(t, err, codes.InvalidArgument, "cgroup_mount_mode")
		_, err = p.try(t.Context(), steps("sleep"), withCgroupView(false, &cri.CgroupNamespace{Mode: cri.NamespaceMode_NODE}, readWrite))
		wantCode(t, err, codes.InvalidArgument, "cgroup_mount_mode")
		if !delegates {
			_, err = p.try(t.Context(), steps("sleep"), withCgroupView(false, nil, readWrite))
			wantCode(t, err, codes.Unimplemented, "nsdelegate")
			return
		}
		writes := p.start(t, "sleep", withCgroupView(false, nil, readWrite))
		options, _ := writes.cgroupMountOptions(t)
		equal(t, "writable", slices.Contains(options, "rw"), true)
		writes.exec(t, "write /sys/fs/cgroup/cgroup.procs 0")
		if r := writes.execResult(t, "write /sys/fs/cgroup/cgroup.max.descendants 1"); r.ExitCode == 0 {
			t.Error("the container changed a limit of its own cgroup")
		}
		p.start(t, "sleep", withCgroupView(true, nil, 0)) // its mount is made in the node's cgroup namespace
		after, err := cgroup.Options()
		must(t, err)
		equalSlices(t, "options of the node's cgroup mount", after, nodes)
	})
}
