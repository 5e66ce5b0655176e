package spec

import (
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// namespaces writes which namespaces the container joins, makes or shares with
// the node. Network, IPC and UTS belong to the pod; each container chooses its
// PID namespace.
func namespaces(in *Input, s *specs.Spec) error {
	paths := in.Facts.Namespaces
	pod := in.podSecurity().GetNamespaceOptions()

	if err := addPID(in, s); err != nil {
		return err
	}
	if !in.hostNetwork() {
		if paths.Net == "" {
			return precondition("the pod has no network namespace to join")
		}
		addNamespace(s, specs.NetworkNamespace, paths.Net)
		addNamespace(s, specs.UTSNamespace, paths.UTS)
		if paths.UTS == "" {
			s.Hostname = in.Facts.Hostname
		}
	} else if in.Facts.OwnKernel {
		addNamespace(s, specs.UTSNamespace, "")
	}
	if in.Facts.OwnKernel { // inherits nothing from a namespace of the node
		s.Hostname = in.Facts.Hostname
	}
	if pod.GetIpc() != cri.NamespaceMode_NODE {
		addNamespace(s, specs.IPCNamespace, paths.IPC)
	}
	addNamespace(s, specs.MountNamespace, "")

	cgroups, err := in.cgroupView()
	if cgroups.own {
		addNamespace(s, specs.CgroupNamespace, "")
	}
	return err
}

// addPID follows the container's own mode; a request without namespace options
// follows the pod's. POD means the pod's namespace, whatever that is.
func addPID(in *Input, s *specs.Spec) error {
	pod := in.podSecurity().GetNamespaceOptions().GetPid()
	mode := pod
	if options := in.security().GetNamespaceOptions(); options != nil {
		mode = options.GetPid()
	}
	if mode == cri.NamespaceMode_POD && pod == cri.NamespaceMode_NODE {
		mode = cri.NamespaceMode_NODE
	}
	path := in.Facts.Namespaces.PID
	switch mode {
	case cri.NamespaceMode_NODE:
	case cri.NamespaceMode_CONTAINER:
		addNamespace(s, specs.PIDNamespace, "")
	case cri.NamespaceMode_POD:
		if path == "" {
			return precondition("the container shares the pod's PID namespace, but the pod was created without one")
		}
		addNamespace(s, specs.PIDNamespace, path)
	case cri.NamespaceMode_TARGET:
		if path == "" {
			return precondition("target container %q has no PID namespace to join", in.security().GetNamespaceOptions().GetTargetId())
		}
		addNamespace(s, specs.PIDNamespace, path)
	default:
		return invalid("PID namespace mode %d is unknown", mode)
	}
	return nil
}

func addNamespace(s *specs.Spec, kind specs.LinuxNamespaceType, path string) {
	s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: kind, Path: path})
}

// ownUserNamespace reports whether the pod has its own user namespace.
func ownUserNamespace(pod *cri.PodSandboxConfig) bool {
	users := pod.GetLinux().GetSecurityContext().GetNamespaceOptions().GetUsernsOptions()
	return users != nil && users.GetMode() == cri.NamespaceMode_POD
}

func userNamespace(in *Input, s *specs.Spec) error {
	users := in.podSecurity().GetNamespaceOptions().GetUsernsOptions()
	if err := validateUserNamespace(users); err != nil {
		return err
	}
	// A container's options repeat the pod's; it cannot have another user
	// namespace.
	if own := in.security().GetNamespaceOptions().GetUsernsOptions(); own != nil && !sameUsers(own, users) {
		return invalid("userns_options of the container differ from the pod's")
	}
	if !ownUserNamespace(in.Request.Pod) {
		return nil
	}
	if f := in.linuxFeatures(); f != nil && f.Namespaces != nil && !slices.Contains(f.Namespaces, string(specs.UserNamespace)) {
		return unimplemented("the pod's runtime handler does not support user namespaces")
	}
	path := in.Facts.Namespaces.User
	addNamespace(s, specs.UserNamespace, path)
	if path == "" { // a joined namespace already has its mappings and accepts no others
		s.Linux.UIDMappings = idMappings(users.GetUids())
		s.Linux.GIDMappings = idMappings(users.GetGids())
	}
	return nil
}

// validateUserNamespace checks the pod's userns_options. CRI knows the modes
// POD and NODE only. POD needs one mapping each, which must map the container's
// root.
func validateUserNamespace(users *cri.UserNamespace) error {
	switch {
	case users == nil:
		return nil
	case users.GetMode() == cri.NamespaceMode_NODE:
		if len(users.GetUids())+len(users.GetGids()) > 0 {
			return invalid("userns_options: mode NODE takes no id mappings")
		}
		return nil
	case users.GetMode() != cri.NamespaceMode_POD:
		return invalid("userns_options: mode %s is not supported, only POD and NODE are", users.GetMode())
	}
	if err := validateMapping("uids", users.GetUids()); err != nil {
		return err
	}
	return validateMapping("gids", users.GetGids())
}

// sameUsers treats nil options as mode NODE.
func sameUsers(a, b *cri.UserNamespace) bool {
	node := func(u *cri.UserNamespace) bool { return u == nil || u.GetMode() == cri.NamespaceMode_NODE }
	return node(a) && node(b) || proto.Equal(a, b)
}

func validateMapping(field string, mappings []*cri.IDMapping) error {
	if len(mappings) != 1 {
		return invalid("userns_options: %s has %d mappings, want exactly one", field, len(mappings))
	}
	m := mappings[0]
	if m.GetContainerId() != 0 || m.GetLength() == 0 {
		return invalid("userns_options: %s must map id 0 of the container", field)
	}
	if m.GetHostId() == 0 {
		return invalid("userns_options: %s map the node's root into the pod", field)
	}
	if uint64(m.GetHostId())+uint64(m.GetLength()) > 1<<32-1 {
		return invalid("userns_options: %s exceeds the largest ID", field)
	}
	return nil
}

func mapped(mappings []*cri.IDMapping, id uint32) bool {
	return slices.ContainsFunc(mappings, func(m *cri.IDMapping) bool {
		return id >= m.GetContainerId() && uint64(id) < uint64(m.GetContainerId())+uint64(m.GetLength())
	})
}

func idMappings(mappings []*cri.IDMapping) []specs.LinuxIDMapping {
	var out []specs.LinuxIDMapping
	for _, m := range mappings {
		out = append(out, specs.LinuxIDMapping{
			ContainerID: m.GetContainerId(), HostID: m.GetHostId(), Size: m.GetLength(),
		})
	}
	return out
}
