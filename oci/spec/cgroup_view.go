package spec

import (
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
)

const cgroupMount = "/sys/fs/cgroup"

// cgroupView is what a container sees of the cgroup hierarchy.
type cgroupView struct {
	own      bool // through a cgroup namespace of its own: its cgroup is the root
	node     bool // as the node sees it, since the request asks for that
	writable bool
}

// cgroupView returns the view that the request asks for (KEP-5474, KEP-5714), or the default one:
// on cgroup v2 a namespace of the container's own, unless it is privileged. On v1 runtimes bind
// the container's own directories instead.
func (in *Input) cgroupView() (cgroupView, error) {
	view := cgroupView{
		own:      in.Facts.Host.CgroupV2 && !in.privileged(),
		writable: in.privileged() || in.writableCgroups(),
	}
	if in.writableCgroups() && !in.Facts.Host.CgroupV2 {
		return view, unimplemented("writable cgroups, requested by the handler's cgroup_writable or the annotation cgroup2-mount-hierarchy-rw.crio.io, require cgroup v2, but this node has v1")
	}
	if err := in.applyCgroupNamespace(&view); err != nil {
		return view, err
	}
	if err := in.applyCgroupMountMode(&view); err != nil {
		return view, err
	}
	if view.node && view.writable && !in.privileged() {
		return view, invalid("cgroupns_options: mode NODE would let the container change the node's cgroups: only a privileged container can have it with a writable cgroup mount")
	}
	return view, nil
}

func (in *Input) applyCgroupNamespace(view *cgroupView) error {
	options := in.security().GetNamespaceOptions().GetCgroupnsOptions()
	if options == nil {
		return nil
	}
	switch mode := options.GetMode(); {
	case mode != cri.NamespaceMode_CONTAINER && mode != cri.NamespaceMode_NODE:
		return invalid("cgroupns_options: mode %s is not supported, only CONTAINER and NODE are", mode)
	case in.Facts.OwnKernel:
		return unimplemented("cgroupns_options: the pod's runtime handler runs containers on a kernel of its own, which does not have the node's cgroups")
	case !in.Facts.CgroupNamespaces:
		return unimplemented("cgroupns_options: the pod's runtime handler does not support cgroup namespaces")
	default:
		view.own, view.node = mode == cri.NamespaceMode_CONTAINER, mode == cri.NamespaceMode_NODE
		return nil
	}
}

func (in *Input) applyCgroupMountMode(view *cgroupView) error {
	mode := in.security().GetCgroupMountMode()
	switch {
	case mode == cri.CgroupMountMode_CGROUP_MOUNT_MODE_UNSPECIFIED:
		return nil
	case in.Facts.OwnKernel:
		return unimplemented("cgroup_mount_mode: the pod's runtime handler runs containers on a kernel of its own, which does not have the node's cgroups")
	case mode == cri.CgroupMountMode_CGROUP_MOUNT_MODE_READ_ONLY:
		if in.privileged() {
			return invalid("cgroup_mount_mode: a privileged container's cgroup mount is always writable")
		}
		view.writable = false
		return nil
	case mode != cri.CgroupMountMode_CGROUP_MOUNT_MODE_READ_WRITE:
		return invalid("cgroup_mount_mode %d is unknown", mode)
	case !in.Facts.Host.CgroupV2:
		return unimplemented("cgroup_mount_mode: a writable cgroup mount requires cgroup v2 with the mount option nsdelegate, but this node has cgroup v1")
	case !slices.Contains(in.Facts.CgroupOptions, cgroup.NSDelegate):
		return unimplemented("cgroup_mount_mode: a writable cgroup mount requires the mount option nsdelegate on this node's %s: mount -o remount,nsdelegate %s", cgroupMount, cgroupMount)
	default:
		view.writable = true
		return nil
	}
}

// mount returns the mount of the cgroup file system.
func (v cgroupView) mount(in *Input) specs.Mount {
	access := "ro"
	if v.writable {
		access = "rw"
	}
	m := specs.Mount{Destination: cgroupMount, Type: "cgroup", Source: "cgroup", Options: []string{"nosuid", "noexec", "nodev", "relatime", access}}
	switch {
	case !in.Facts.Host.CgroupV2 || v.own || in.Facts.OwnKernel:
	case in.privileged():
		// A mount that is made outside of a cgroup namespace sets the options of the node's hierarchy.
		m.Options = append(m.Options, in.Facts.CgroupOptions...)
	default:
		m.Type, m.Source = "bind", cgroupMount
		m.Options = append([]string{"rbind", "rprivate"}, m.Options...)
	}
	return m
}
