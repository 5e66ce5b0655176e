package spec

import (
	"path"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Device is a resolved device node.
type Device struct {
	specs.LinuxDevice        // Path is the path in the container
	Access            string // access that the device cgroup allows: some of r, w and m
}

// devices writes the device nodes and the rules of the device cgroup. The
// runtime itself makes the standard nodes (null, zero, full, random, urandom,
// tty, ptmx).
func devices(in *Input, s *specs.Spec) error {
	list := slices.Concat(in.Defaults.Devices, in.requestedDevices())
	everything := in.privileged() && !in.Defaults.PrivilegedWithoutHostDevices
	if everything {
		list = slices.Concat(in.Facts.HostDevices, list)
	}
	list = lastPerPath(list)

	s.Linux.Resources.Devices = []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}
	allowed := everything || in.privileged() && in.Defaults.AllDevicesAllowed
	if allowed {
		s.Linux.Resources.Devices = []specs.LinuxDeviceCgroup{{Allow: true, Access: "rwm"}}
	} else {
		s.Linux.Resources.Devices = append(s.Linux.Resources.Devices, standardDevices()...)
	}
	for _, d := range list {
		if !allowed {
			s.Linux.Resources.Devices = append(s.Linux.Resources.Devices, allowDevice(d.Type, d.Major, d.Minor, d.Access))
		}
		if !runtimeMakes(d.Path) && !mountedOver(s.Mounts, d.Path) {
			s.Linux.Devices = append(s.Linux.Devices, cloneDevice(d.LinuxDevice))
		}
	}
	return nil
}

// requestedDevices returns the devices of the request. With DeviceOwnership
// they belong to the container's user instead of their owner on the node, so
// that no init container has to change it (kubernetes/kubernetes#92211).
func (in *Input) requestedDevices() []Device {
	if !in.Defaults.DeviceOwnership {
		return in.Facts.Devices
	}
	owned := slices.Clone(in.Facts.Devices)
	for i := range owned {
		if uid := in.security().GetRunAsUser(); uid != nil {
			owned[i].UID = new(uint32(uid.GetValue()))
		}
		if gid := in.security().GetRunAsGroup(); gid != nil {
			owned[i].GID = new(uint32(gid.GetValue()))
		}
	}
	return owned
}

// lastPerPath keeps the last device of each path.
func lastPerPath(list []Device) []Device {
	var out []Device
	for i, d := range list {
		if !slices.ContainsFunc(list[i+1:], func(later Device) bool { return later.Path == d.Path }) {
			out = append(out, d)
		}
	}
	return out
}

// standardDevices are the rules that apply to every container: it may make any
// node and open a few harmless ones.
func standardDevices() []specs.LinuxDeviceCgroup {
	const any = -1
	return []specs.LinuxDeviceCgroup{
		allowDevice("c", any, any, "m"),
		allowDevice("b", any, any, "m"),
		allowDevice("c", 1, 3, "rwm"),     // null
		allowDevice("c", 1, 5, "rwm"),     // zero
		allowDevice("c", 1, 7, "rwm"),     // full
		allowDevice("c", 1, 8, "rwm"),     // random
		allowDevice("c", 1, 9, "rwm"),     // urandom
		allowDevice("c", 5, 0, "rwm"),     // tty
		allowDevice("c", 5, 2, "rwm"),     // ptmx
		allowDevice("c", 136, any, "rwm"), // pts
	}
}

// allowDevice leaves out negative numbers, which mean any.
func allowDevice(kind string, major, minor int64, access string) specs.LinuxDeviceCgroup {
	r := specs.LinuxDeviceCgroup{Allow: true, Type: kind, Access: access}
	if major >= 0 {
		r.Major = &major
	}
	if minor >= 0 {
		r.Minor = &minor
	}
	return r
}

func runtimeMakes(devicePath string) bool {
	return slices.Contains([]string{
		"/dev/console", "/dev/full", "/dev/null", "/dev/ptmx", "/dev/random", "/dev/tty",
		"/dev/urandom", "/dev/zero",
	}, devicePath)
}

// mountedOver reports whether a bind mount covers the path or a directory above
// it: a node made there would be made on the node's own file system.
func mountedOver(mounts []specs.Mount, devicePath string) bool {
	return slices.ContainsFunc(mounts, func(m specs.Mount) bool {
		return m.Type == "bind" && (m.Destination == devicePath || strings.HasPrefix(devicePath, m.Destination+"/"))
	})
}

func cloneDevice(d specs.LinuxDevice) specs.LinuxDevice {
	d.FileMode, d.UID, d.GID = clonePtr(d.FileMode), clonePtr(d.UID), clonePtr(d.GID)
	return d
}

func clonePtr[T any](p *T) *T {
	if p == nil {
		return nil
	}
	v := *p
	return &v
}

// validateDevice returns the request's device with defaults filled in: no
// container path means the same path as on the node, no permissions mean all.
func validateDevice(d *cri.Device) (host, container, access string, err error) {
	host, container, access = d.GetHostPath(), d.GetContainerPath(), d.GetPermissions()
	if container == "" {
		container = host
	}
	if access == "" {
		access = "rwm"
	}
	for _, p := range []string{host, container} {
		if !path.IsAbs(p) || path.Clean(p) == "/" || strings.ContainsRune(p, 0) {
			return "", "", "", invalid("device path %q is not absolute", p)
		}
	}
	if strings.Trim(access, "rwm") != "" {
		return "", "", "", invalid("device %s: permissions %.20q must be of r, w and m", host, access)
	}
	return path.Clean(host), path.Clean(container), access, nil
}

// ParseDevice reads host[:container][:permissions], the form used in the
// configuration.
func ParseDevice(s string) (*cri.Device, error) {
	parts := strings.Split(s, ":")
	d := &cri.Device{HostPath: parts[0]}
	switch {
	case len(parts) == 3:
		d.ContainerPath, d.Permissions = parts[1], parts[2]
	case len(parts) == 2 && path.IsAbs(parts[1]):
		d.ContainerPath = parts[1]
	case len(parts) == 2:
		d.Permissions = parts[1]
	case len(parts) > 3:
		return nil, invalid("device %q: must be of the form host:container:permissions", s)
	}
	_, _, _, err := validateDevice(d)
	return d, err
}
