package spec

import (
	"fmt"
	"path"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// mounts lists the mounts of every container, the pod's files and the requested
// mounts, parents before children.
func mounts(in *Input, s *specs.Spec) error {
	cgroups, err := in.cgroupView()
	if err != nil {
		return err
	}
	asked, err := requestMounts(in)
	if err != nil {
		return err
	}
	ours := slices.Concat(in.baseMounts(), kernelMounts(in, cgroups), scratchMounts(in), fileMounts(in), volumeMounts(in), nodeMounts(in))
	s.Mounts = overlay(slices.DeleteFunc(ours, in.reachesNode), asked)
	s.Linux.RootfsPropagation = rootPropagation(in.Request.Container.GetMounts())
	return nil
}

// reachesNode reports whether a mount lies in one of the request's that is shared
// with the node: it would be made on the node as well, over what that has at the
// path, and stay there (runc#2404).
func (in *Input) reachesNode(m specs.Mount) bool {
	return slices.ContainsFunc(in.Request.Container.GetMounts(), func(above *cri.Mount) bool {
		return above.GetPropagation() == cri.MountPropagation_PROPAGATION_BIDIRECTIONAL &&
			strings.HasPrefix(m.Destination, path.Clean(above.GetContainerPath())+"/")
	})
}

// kernelMounts returns the file systems that programs expect.
func kernelMounts(in *Input, cgroups cgroupView) []specs.Mount {
	access := "ro"
	if in.privileged() {
		access = "rw"
	}
	pts := []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"}
	users := in.podSecurity().GetNamespaceOptions().GetUsernsOptions()
	const ttyGroup = 5
	if !ownUserNamespace(in.Request.Pod) || mapped(users.GetGids(), ttyGroup) {
		pts = append(pts, "gid=5")
	}
	sys := specs.Mount{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", access}}
	if in.hostNetwork() && ownUserNamespace(in.Request.Pod) {
		// The kernel lets only the owner of a network namespace mount its sysfs.
		sys.Type, sys.Source = "bind", "/sys"
		sys.Options = append([]string{"rbind", "rprivate"}, sys.Options...)
	}
	return []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
		sys,
		{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: pts},
		{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
		shm(in.Facts.Files.Shm),
		cgroups.mount(in),
	}
}

func shm(source string) specs.Mount {
	m := specs.Mount{Destination: "/dev/shm", Type: "bind", Source: source, Options: []string{"rbind", "rprivate", "nosuid", "noexec", "nodev", "rw"}}
	if source == "" {
		m.Type, m.Source = "tmpfs", "shm"
		m.Options = []string{"nosuid", "noexec", "nodev", "mode=1777", "size=65536k"}
	}
	return m
}

// fileMounts returns mounts of the files that are made for the pod.
func fileMounts(in *Input) []specs.Mount {
	access := "rw"
	if in.security().GetReadonlyRootfs() || in.Defaults.ReadOnly {
		access = "ro"
	}
	files := in.Facts.Files
	var list []specs.Mount
	for _, file := range []struct{ destination, source string }{
		{"/etc/resolv.conf", files.ResolvConf},
		{"/etc/hostname", files.Hostname},
		{"/etc/hosts", files.Hosts},
	} {
		if file.source != "" {
			list = append(list, specs.Mount{
				Destination: file.destination, Type: "bind", Source: file.source,
				Options: []string{"bind", "rprivate", "nosuid", "noexec", "nodev", access},
			})
		}
	}
	return list
}

// scratchMounts returns what CRI-O mounts over a root file system that the node makes read-only, for
// programs that write there: copies in memory.
func scratchMounts(in *Input) []specs.Mount {
	if !in.Defaults.ReadOnly {
		return nil
	}
	var list []specs.Mount
	for _, dir := range []struct{ path, mode string }{{"/run", "0755"}, {"/tmp", "1777"}, {"/var/tmp", "1777"}} {
		list = append(list, specs.Mount{
			Destination: dir.path, Type: "tmpfs", Source: "tmpfs",
			Options: []string{"rw", "noexec", "nosuid", "nodev", "tmpcopyup", "mode=" + dir.mode},
		})
	}
	return list
}

// volumeMounts mounts each directory on itself: when the runtime makes a root
// file system read-only, the mounts in it stay writable.
func volumeMounts(in *Input) []specs.Mount {
	var list []specs.Mount
	for _, volume := range in.Facts.BindVolumes {
		list = append(list, specs.Mount{
			Destination: volume, Type: "bind", Source: path.Join(in.Facts.Rootfs, volume),
			Options: []string{"bind", "rprivate", "rw"},
		})
	}
	return list
}

// nodeMounts returns the node's mounts. They are writable, because runtimes
// make the targets of other mounts in them. For the same reason one is left out
// below a read-only mount of the request.
func nodeMounts(in *Input) []specs.Mount {
	var list []specs.Mount
	for _, m := range in.Facts.NodeMounts {
		if slices.ContainsFunc(in.Request.Container.GetMounts(), func(above *cri.Mount) bool {
			return above.GetReadonly() && strings.HasPrefix(m.GetContainerPath(), path.Clean(above.GetContainerPath())+"/")
		}) {
			continue
		}
		list = append(list, specs.Mount{
			Destination: m.GetContainerPath(), Type: "bind", Source: m.GetHostPath(),
			Options: []string{"bind", "rprivate", "nosuid", "nodev", "rw"},
		})
	}
	return list
}

// overlay puts asked over base: the last mount of a destination wins, and a
// requested /dev replaces everything below it in base. The result is ordered by
// depth, otherwise as given.
func overlay(base, asked []specs.Mount) []specs.Mount {
	ownDev := slices.ContainsFunc(asked, func(m specs.Mount) bool { return m.Destination == "/dev" })
	if ownDev {
		base = slices.DeleteFunc(base, func(m specs.Mount) bool { return strings.HasPrefix(m.Destination, "/dev/") })
	}
	all := slices.Concat(base, asked)
	var list []specs.Mount
	for i, m := range all {
		again := func(later specs.Mount) bool { return later.Destination == m.Destination }
		if !slices.ContainsFunc(all[i+1:], again) {
			list = append(list, m)
		}
	}
	sortByDepth(list)
	return list
}

// sortByDepth puts each mount behind those in which it may lie.
func sortByDepth(list []specs.Mount) {
	depth := func(m specs.Mount) int { return strings.Count(path.Clean(m.Destination), "/") }
	slices.SortStableFunc(list, func(a, b specs.Mount) int { return depth(a) - depth(b) })
}

func requestMounts(in *Input) ([]specs.Mount, error) {
	var list []specs.Mount
	for i, m := range in.Request.Container.GetMounts() {
		m = in.withLogs(m)
		source := m.GetHostPath()
		if i < len(in.Facts.MountSources) && in.Facts.MountSources[i] != "" {
			source = in.Facts.MountSources[i]
		}
		one, err := in.requestMount(m, source)
		if err != nil {
			return nil, fmt.Errorf("mount at %q: %w", m.GetContainerPath(), err)
		}
		list = append(list, one)
	}
	return list, nil
}

// withLogs returns the request's mount or, for the log volume, a read-only
// mount of the pod's logs instead. Only the container gets that mount: if crius
// mounted the logs into a volume of the kubelet, or followed a link that pods
// can write, a pod could decide what is unmounted on the node and where logs go
// (CVE-2025-0750).
func (in *Input) withLogs(m *cri.Mount) *cri.Mount {
	pod, volume := in.Request.Pod, in.Asked.LogVolume
	kubelets := "/pods/" + pod.GetMetadata().GetUid() + "/volumes/kubernetes.io~empty-dir/" + volume
	if volume == "" || pod.GetLogDirectory() == "" || !strings.HasSuffix(path.Clean(m.GetHostPath()), kubelets) {
		return m
	}
	return &cri.Mount{ContainerPath: m.GetContainerPath(), HostPath: pod.GetLogDirectory(), Readonly: true}
}

// coverable are files of /proc over which a mount is allowed: per-container
// statistics, as lxcfs provides them, and what checkpoints and FIPS mode need.
var coverable = []string{
	"/proc/cpuinfo", "/proc/diskstats", "/proc/loadavg", "/proc/meminfo", "/proc/slabinfo", "/proc/stat", "/proc/swaps", "/proc/uptime",
	"/proc/sys/kernel/ns_last_pid", "/proc/sys/crypto/fips_enabled",
}

// validateProcMount refuses mounts on /proc. A runtime writes security labels
// and sysctls there, and would write them elsewhere (CVE-2019-16884,
// CVE-2025-52881). runc refuses the same mounts; crun makes them.
func validateProcMount(target, source string) error {
	below := strings.HasPrefix(target, "/proc/") && !slices.Contains(coverable, target)
	if below || target == "/proc" && path.Clean(source) != "/proc" {
		return invalid("container_path must not be in /proc")
	}
	return nil
}

func (in *Input) requestMount(m *cri.Mount, source string) (specs.Mount, error) {
	target := path.Clean(m.GetContainerPath())
	if !path.IsAbs(target) || target == "/" || strings.ContainsRune(target, 0) {
		return specs.Mount{}, invalid("container_path must be absolute and below /")
	}
	if err := validateProcMount(target, source); err != nil {
		return specs.Mount{}, err
	}
	if err := validateSource(m, source); err != nil {
		return specs.Mount{}, err
	}
	options, err := in.mountOptions(m)
	if err != nil {
		return specs.Mount{}, err
	}
	if err := in.validateIDMap(m); err != nil {
		return specs.Mount{}, err
	}
	mount := specs.Mount{
		Destination: target,
		Type:        "bind",
		Source:      path.Clean(source),
		Options:     options,
		UIDMappings: idMappings(m.GetUidMappings()),
		GIDMappings: idMappings(m.GetGidMappings()),
	}
	if m.GetImage() != nil { // its files already have owners of the pod's user namespace
		mount.UIDMappings, mount.GIDMappings = nil, nil
	}
	return mount, nil
}

func validateSource(m *cri.Mount, source string) error {
	image := m.GetImage().GetImage() != ""
	switch {
	case image && m.GetHostPath() != "":
		return invalid("host_path and image are both set: set only one")
	case image && !m.GetReadonly():
		return invalid("an image can only be mounted readonly")
	case image && source == "":
		return precondition("image %q is not mounted", m.GetImage().GetImage())
	case !path.IsAbs(source) || strings.ContainsRune(source, 0):
		return invalid("host_path %q is not an absolute path", source)
	}
	return nil
}

// mountOptions translates the request's flags and admits further options only
// if they restrict access or concern access times.
func (in *Input) mountOptions(m *cri.Mount) ([]string, error) {
	propagation, ok := propagations()[m.GetPropagation()]
	if !ok {
		return nil, invalid("propagation mode %d is unknown", m.GetPropagation())
	}
	access := "rw"
	if m.GetReadonly() {
		access = "ro"
	}
	if m.GetRecursiveReadOnly() {
		if !m.GetReadonly() || m.GetPropagation() != cri.MountPropagation_PROPAGATION_PRIVATE {
			return nil, invalid("recursive_read_only needs readonly and private propagation")
		}
		if !in.knowsMountOption("rro") {
			return nil, unimplemented("the pod's runtime handler does not support recursive read-only mounts")
		}
		access = "rro"
	}
	options := []string{"rbind", propagation, access}
	if m.GetImage() != nil {
		options = append(options, "nosuid", "nodev") // its files are data, whoever owns them
	}
	for _, option := range m.GetMountOptions() {
		if !slices.Contains(MountRestrictions(), option) {
			return nil, invalid("mount option %q is not allowed, only %s are", option, strings.Join(MountRestrictions(), ", "))
		}
		if !slices.Contains(options, option) {
			options = append(options, option)
		}
	}
	return options, nil
}

func propagations() map[cri.MountPropagation]string {
	return map[cri.MountPropagation]string{
		cri.MountPropagation_PROPAGATION_PRIVATE:           "rprivate",
		cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER: "rslave",
		cri.MountPropagation_PROPAGATION_BIDIRECTIONAL:     "rshared",
	}
}

// MountRestrictions are the mount_options that a request may have: those that
// take away rights (CRI: Mount.mount_options, KEP-5855).
func MountRestrictions() []string {
	return []string{"noexec", "nodev", "nosuid"}
}

// knowsMountOption returns false if nothing says that the runtime knows the
// option: a runtime passes an option that it does not know to the file system,
// and drops it on a bind mount.
func (in *Input) knowsMountOption(option string) bool {
	if f := in.Facts.Features; f != nil && f.MountOptions != nil {
		return slices.Contains(f.MountOptions, option)
	}
	return slices.Contains(in.Facts.MountOptions, option)
}

// validateIDMap accepts id mappings only for a runtime that reports that it
// applies them: others would show the volume with the wrong owners.
func (in *Input) validateIDMap(m *cri.Mount) error {
	uids, gids := len(m.GetUidMappings()), len(m.GetGidMappings())
	if uids == 0 && gids == 0 {
		return nil
	}
	if uids == 0 || gids == 0 {
		return invalid("uidMappings and gidMappings must be given together")
	}
	if !in.Facts.IDMap {
		return unimplemented("the pod's runtime handler does not support ID-mapped mounts")
	}
	return nil
}

// rootPropagation returns a propagation at least as open as that of the most
// open volume.
func rootPropagation(asked []*cri.Mount) string {
	propagation := ""
	for _, m := range asked {
		switch m.GetPropagation() {
		case cri.MountPropagation_PROPAGATION_BIDIRECTIONAL:
			return "rshared"
		case cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER:
			propagation = "rslave"
		}
	}
	return propagation
}
