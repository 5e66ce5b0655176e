package server

import (
	"fmt"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// filled sets every field of m, at any depth, to a value that differs from its
// neighbours.
func filled[M proto.Message](m M) M {
	n := 0
	fillMessage(m.ProtoReflect(), &n)
	return m
}

func fillMessage(m protoreflect.Message, n *int) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		field := fields.Get(i)
		switch {
		case field.IsMap():
			m.Mutable(field).Map().Set(protoreflect.ValueOfString(name(n)).MapKey(), fillScalar(field.MapValue(), n))
		case field.IsList() && field.Kind() == protoreflect.MessageKind:
			fillMessage(m.Mutable(field).List().AppendMutable().Message(), n)
		case field.IsList():
			m.Mutable(field).List().Append(fillScalar(field, n))
		case field.Kind() == protoreflect.MessageKind:
			fillMessage(m.Mutable(field).Message(), n)
		default:
			m.Set(field, fillScalar(field, n))
		}
	}
}

func name(n *int) string { *n++; return fmt.Sprintf("value-%d", *n) }

func fillScalar(field protoreflect.FieldDescriptor, n *int) protoreflect.Value {
	*n++
	switch field.Kind() {
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(name(n))
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes([]byte(name(n)))
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(true)
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(1)
	case protoreflect.Int32Kind:
		return protoreflect.ValueOfInt32(int32(*n))
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(uint32(*n))
	case protoreflect.Int64Kind:
		return protoreflect.ValueOfInt64(int64(*n))
	case protoreflect.DoubleKind:
		return protoreflect.ValueOfFloat64(float64(*n) + 0.5)
	case protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(uint64(*n))
	}
	panic("CRI has a new kind of field: " + field.Kind().String())
}

// wantFilled reports every field of m that is not set, except for those listed
// by path as deliberately empty; it also reports a listed field that is set, so
// that the list stays correct.
func wantFilled(t *testing.T, m proto.Message, empty ...string) {
	t.Helper()
	var seen []string
	walkFields(m.ProtoReflect(), "", func(path string, has bool) {
		if slices.Contains(empty, path) {
			seen = append(seen, path)
			if has {
				t.Errorf("%s is set: take it off the list", path)
			}
		} else if !has {
			t.Errorf("%s is empty", path)
		}
	})
	for _, path := range empty {
		if !slices.Contains(seen, path) {
			t.Errorf("%s is listed as empty and not reached", path)
		}
	}
}

func walkFields(m protoreflect.Message, prefix string, visit func(path string, has bool)) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		field := fields.Get(i)
		path := prefix + string(field.Name())
		visit(path, m.Has(field))
		if field.Kind() != protoreflect.MessageKind || field.IsMap() || !m.Has(field) {
			continue
		}
		if !field.IsList() {
			walkFields(m.Get(field).Message(), path+".", visit)
			continue
		}
		for j := range m.Get(field).List().Len() {
			walkFields(m.Get(field).List().Get(j).Message(), path+".", visit)
		}
	}
}

// maximalSandboxConfig is valid and uses every field that a kubelet can set.
func maximalSandboxConfig() *cri.PodSandboxConfig {
	c := filled(&cri.PodSandboxConfig{})
	c.Windows = nil
	c.LogDirectory = "/var/log/pods/ns_web_1/"
	c.PortMappings[0].HostIp = "::1"
	c.Linux.CgroupParent = "/kubepods/pod1"
	sc := c.Linux.SecurityContext
	sc.NamespaceOptions.UsernsOptions = someUserns()
	sc.NamespaceOptions.CgroupnsOptions = nil // of containers only
	sc.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "/profiles/p.json"}
	sc.Apparmor = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "profile"}
	for _, r := range []*cri.LinuxContainerResources{c.Linux.Overhead, c.Linux.Resources} {
		r.Unified = map[string]string{"memory.high": "1"}
	}
	return c
}

func someUserns() *cri.UserNamespace {
	return &cri.UserNamespace{
		Mode: cri.NamespaceMode_POD,
		Uids: []*cri.IDMapping{{HostId: 65536, Length: 65536}},
		Gids: []*cri.IDMapping{{HostId: 65536, Length: 65536}},
	}
}

// maximalContainerConfig is valid and uses every field that a kubelet can set;
// a host path and an image exclude each other, so it has two mounts.
func maximalContainerConfig() *cri.ContainerConfig {
	c := filled(&cri.ContainerConfig{})
	c.WorkingDir = "/srv"
	c.LogPath = "web/0.log"
	image := c.Mounts[0]
	image.ContainerPath, image.HostPath = "/image", ""
	image.Propagation = cri.MountPropagation_PROPAGATION_PRIVATE
	image.MountOptions = []string{"noexec", "nodev", "nosuid"}
	host := proto.CloneOf(image)
	host.ContainerPath, host.HostPath = "/data", "/host/data"
	host.Image, host.ImageSubPath = nil, ""
	c.Mounts = []*cri.Mount{host, image}
	c.Devices[0] = &cri.Device{ContainerPath: "/dev/x", HostPath: "/dev/y", Permissions: "mrw"}
	c.CDIDevices[0].Name = "vendor.com/gpu=0"
	c.Linux.Resources.Unified = map[string]string{"memory.high": "1"}
	sc := c.Linux.SecurityContext
	sc.NamespaceOptions.Pid = cri.NamespaceMode_TARGET
	sc.NamespaceOptions.TargetId = idOf(3)
	sc.NamespaceOptions.UsernsOptions = someUserns()
	sc.NamespaceOptions.CgroupnsOptions.Mode = cri.NamespaceMode_CONTAINER
	sc.CgroupMountMode = cri.CgroupMountMode_CGROUP_MOUNT_MODE_READ_WRITE // the other excludes privileged
	sc.RunAsUsername = ""                                                 // excludes run_as_user
	sc.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "/profiles/p.json"}
	sc.Apparmor = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "profile"}
	c.Windows = nil
	return c
}

// The configurations above are complete. An update of CRI that adds a field
// fails here first.
func TestMaximalConfigs(t *testing.T) {
	t.Parallel()
	const security = "linux.security_context."
	profiles := []string{security + "seccomp.oci_ref", security + "seccomp.base_profile", security + "apparmor.oci_ref", security + "apparmor.base_profile"} // exclude localhost_ref
	wantFilled(t, maximalSandboxConfig(), append(profiles, "windows", security+"namespace_options.cgroupns_options",
		"linux.security_context.namespace_options.userns_options.mode", // POD is 0
		"linux.security_context.namespace_options.userns_options.uids.container_id",
		"linux.security_context.namespace_options.userns_options.gids.container_id")...)

	c := maximalContainerConfig()
	union := proto.CloneOf(c)
	union.Mounts[1].HostPath = union.Mounts[0].HostPath
	union.Mounts = union.Mounts[1:]
	wantFilled(t, union, append(profiles, "windows", "mounts.propagation", "linux.security_context.run_as_username",
		"linux.security_context.namespace_options.userns_options.mode",
		"linux.security_context.namespace_options.userns_options.uids.container_id",
		"linux.security_context.namespace_options.userns_options.gids.container_id")...)

	if err := checkRunPodSandbox(&cri.RunPodSandboxRequest{Config: maximalSandboxConfig()}); err != nil {
		t.Error(err)
	}
	if err := checkCreateContainer(&cri.CreateContainerRequest{PodSandboxId: idOf(1), Config: c, SandboxConfig: maximalSandboxConfig()}); err != nil {
		t.Error(err)
	}
}
