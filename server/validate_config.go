package server

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/oci/spec"
)

// The configuration of a pod and of a container. Checks that depend on the
// node, the image, the handler or the pod are elsewhere; the checks here hold
// for any node.

func checkRunPodSandbox(req *cri.RunPodSandboxRequest) error {
	return cmp.Or(wellFormed(req), in("config", checkSandboxConfig(req.GetConfig())))
}

func checkCreateContainer(req *cri.CreateContainerRequest) error {
	// A program's strings first: the error for one that is too long names its
	// purpose.
	err := cmp.Or(in("config", checkProgram(req.GetConfig())), wellFormed(req), in("config", checkContainerConfig(req.GetConfig())))
	if req.GetSandboxConfig() != nil {
		err = cmp.Or(err, in("sandbox_config", checkSandboxConfig(req.GetSandboxConfig())))
	}
	return cmp.Or(err, checkID("pod_sandbox_id", req.GetPodSandboxId()))
}

func checkSandboxConfig(c *cri.PodSandboxConfig) error {
	if c.GetMetadata() == nil {
		return in("metadata", bad("is missing; send the pod's name, namespace and uid"))
	}
	return cmp.Or(
		in("metadata.name", checkName(c.GetMetadata().GetName())),
		in("metadata.namespace", checkOptionalName(c.GetMetadata().GetNamespace())),
		in("metadata.uid", checkOptionalName(c.GetMetadata().GetUid())),
		in("hostname", checkHostname(c.GetHostname())),
		in("log_directory", checkLogDirectory(c.GetLogDirectory())),
		in("dns_config", checkDNS(c.GetDnsConfig())),
		each("port_mappings", c.GetPortMappings(), maxEntries, checkPortMapping),
		in("labels", checkMetadata(c.GetLabels())),
		in("annotations", checkMetadata(c.GetAnnotations())),
		in("linux", checkLinuxSandbox(c.GetLinux())),
		checkSize(c, maxPod),
	)
}

func checkLinuxSandbox(l *cri.LinuxPodSandboxConfig) error {
	sc := l.GetSecurityContext()
	return cmp.Or(
		in("cgroup_parent", checkCgroupParent(l.GetCgroupParent())),
		in("overhead", checkResources(l.GetOverhead())),
		in("resources", checkResources(l.GetResources())),
		in("security_context.namespace_options", checkNamespaces(sc.GetNamespaceOptions())),
		in("security_context.namespace_options.pid", checkSandboxPID(sc.GetNamespaceOptions().GetPid())),
		in("security_context.namespace_options.cgroupns_options", checkSandboxCgroupns(sc.GetNamespaceOptions().GetCgroupnsOptions())),
		in("security_context", checkIdentity(sc.GetRunAsUser(), sc.GetRunAsGroup(), "", sc.GetSupplementalGroups())),
		in("security_context.seccomp", checkSeccomp(sc.GetSeccomp())),
		in("security_context.apparmor", checkApparmor(sc.GetApparmor())),
	)
}

func checkContainerConfig(c *cri.ContainerConfig) error {
	if c.GetMetadata() == nil {
		return in("metadata", bad("is missing; send the container's name"))
	}
	if c.GetImage() == nil {
		return in("image", bad("is missing; send the image to run"))
	}
	return cmp.Or(
		in("metadata.name", checkName(c.GetMetadata().GetName())),
		in("image", checkImage(c.GetImage())),
		in("working_dir", checkOptionalPath(c.GetWorkingDir())),
		each("mounts", c.GetMounts(), maxMounts, checkMount),
		each("devices", c.GetDevices(), maxMounts, checkDevice),
		each("CDI_devices", c.GetCDIDevices(), maxMounts, checkCDIDevice),
		in("labels", checkMetadata(c.GetLabels())),
		in("annotations", checkMetadata(c.GetAnnotations())),
		in("log_path", checkLogPath(c.GetLogPath())),
		in("linux", checkLinuxContainer(c.GetLinux())),
		checkSize(c, maxContainer),
	)
}

// checkProgram refuses what the kernel passes to no program (execve(2)). The
// image, the node and plugins may add to it: the result is checked again later.
func checkProgram(c *cri.ContainerConfig) error {
	size := spec.ExecSize(len(c.GetEnvs()), 0)
	for _, e := range c.GetEnvs() {
		size += len(e.GetKey()) + len("=") + len(e.GetValue())
	}
	return cmp.Or(
		each("envs", c.GetEnvs(), maxEntries, checkEnv),
		each("command", c.GetCommand(), maxEntries, checkArgument),
		each("args", c.GetArgs(), maxEntries, checkArgument),
		checkExecSize(size+sizeOf(c.GetCommand())+sizeOf(c.GetArgs())),
	)
}

func checkArgument(arg string) error {
	if len(arg) > spec.MaxExecString() {
		return bad("has %d bytes; send at most %d, which is all that the kernel passes to a program", len(arg), spec.MaxExecString())
	}
	return nil
}

func sizeOf(args []string) int {
	size := spec.ExecSize(len(args), 0)
	for _, arg := range args {
		size += len(arg)
	}
	return size
}

func checkExecSize(size int) error {
	if size > spec.MaxExec {
		return bad("has arguments and variables of %d bytes in total; send at most %d, which is all that the kernel passes to a program", size, spec.MaxExec)
	}
	return nil
}

// checkSize bounds what the server keeps of a pod or container for its
// lifetime.
func checkSize(config proto.Message, most int) error {
	if size := proto.Size(config); size > most {
		return bad("has %d bytes in total; send at most %d", size, most)
	}
	return nil
}

func checkLinuxContainer(l *cri.LinuxContainerConfig) error {
	sc := l.GetSecurityContext()
	return cmp.Or(
		in("resources", checkResources(l.GetResources())),
		in("security_context.namespace_options", checkNamespaces(sc.GetNamespaceOptions())),
		in("security_context", checkCgroupView(sc)),
		in("security_context", checkIdentity(sc.GetRunAsUser(), sc.GetRunAsGroup(), sc.GetRunAsUsername(), sc.GetSupplementalGroups())),
		in("security_context.seccomp", checkSeccomp(sc.GetSeccomp())),
		in("security_context.apparmor", checkApparmor(sc.GetApparmor())),
	)
}

func checkName(name string) error {
	if name == "" {
		return bad("is empty; send a name")
	}
	return checkOptionalName(name)
}

// checkOptionalName checks what may become part of a file's or cgroup's name
// and of a log line. The kubelet sends DNS names; crictl and tests send others,
// and may leave out namespace and uid.
func checkOptionalName(name string) error {
	if len(name) > maxName {
		return bad("has %d bytes; send at most %d", len(name), maxName)
	}
	if name == "." || name == ".." || strings.Contains(name, "/") || strings.ContainsFunc(name, isBlank) {
		return bad("is %q; leave out slashes, white space and control characters", brief(name))
	}
	return nil
}

// checkHostname accepts an empty name, which crictl sends for pod networks too.
func checkHostname(name string) error {
	if len(name) > maxHostname {
		return bad("has %d bytes; send at most %d", len(name), maxHostname)
	}
	if strings.ContainsFunc(name, func(r rune) bool {
		return r > unicode.MaxASCII || !unicode.IsLetter(r) && !unicode.IsDigit(r) && !strings.ContainsRune("-._", r)
	}) {
		return bad("is %q; use only letters, digits, hyphens, dots and underscores", brief(name))
	}
	return nil
}

// checkLogDirectory and checkLogPath are the first half of the protection
// against CVE-2025-0750; the second is how the file is opened.
func checkLogDirectory(dir string) error {
	if dir == "" {
		return nil
	}
	if len(dir) > maxPath || !filepath.IsAbs(dir) || filepath.Clean(dir) != dir && filepath.Clean(dir)+"/" != dir {
		return bad("is %q; send an absolute path without . and .. components", brief(dir))
	}
	return nil
}

func checkLogPath(path string) error {
	if path == "" {
		return nil
	}
	if len(path) > maxPath || !filepath.IsLocal(path) || filepath.Clean(path) != path || path == "." {
		return bad("is %q; send a path below sandbox_config.log_directory without . and .. components", brief(path))
	}
	return nil
}

func checkPath(path string) error {
	if path == "" {
		return bad("is empty; send an absolute path")
	}
	return checkOptionalPath(path)
}

func checkOptionalPath(path string) error {
	if path != "" && (len(path) > maxPath || !filepath.IsAbs(path)) {
		return bad("is %q; send an absolute path of at most %d bytes", brief(path), maxPath)
	}
	return nil
}

// checkDNS keeps an entry from adding lines or words to resolv.conf.
func checkDNS(c *cri.DNSConfig) error {
	entry := func(text string) error {
		if text == "" || len(text) > maxName || strings.ContainsFunc(text, isBlank) {
			return bad("is %q; send one word of at most %d bytes", brief(text), maxName)
		}
		return nil
	}
	return cmp.Or(
		each("servers", c.GetServers(), maxDNS, entry),
		each("searches", c.GetSearches(), maxDNS, entry),
		each("options", c.GetOptions(), maxDNS, entry),
	)
}

func checkPortMapping(p *cri.PortMapping) error {
	if p.GetContainerPort() < 0 || p.GetContainerPort() > math.MaxUint16 {
		return in("container_port", bad("is %d; send a port up to 65535", p.GetContainerPort()))
	}
	if p.GetHostPort() < 0 || p.GetHostPort() > math.MaxUint16 {
		return in("host_port", bad("is %d; send a port up to 65535, or 0 for none", p.GetHostPort()))
	}
	if p.GetHostPort() != 0 && p.GetContainerPort() == 0 {
		return in("container_port", bad("is missing; send the container port for host_port %d", p.GetHostPort()))
	}
	if p.GetHostIp() != "" {
		if _, err := netip.ParseAddr(p.GetHostIp()); err != nil {
			return in("host_ip", bad("is %q; send an IP address", brief(p.GetHostIp())))
		}
	}
	return nil
}

func checkCgroupParent(parent string) error {
	if len(parent) > maxPath || strings.ContainsFunc(parent, unicode.IsControl) || slices.Contains(strings.Split(parent, "/"), "..") {
		return bad("is %q; send a cgroup path without .. components", brief(parent))
	}
	return nil
}

// checkSandboxPID refuses TARGET: only containers can target another container.
func checkSandboxPID(mode cri.NamespaceMode) error {
	if mode == cri.NamespaceMode_TARGET {
		return bad("is TARGET; send POD, CONTAINER or NODE for a pod")
	}
	return nil
}

// checkSandboxCgroupns refuses options for the pod: CRI has them for containers only.
func checkSandboxCgroupns(o *cri.CgroupNamespace) error {
	if o != nil {
		return bad("is set; send it with the containers that want it, not with the pod")
	}
	return nil
}

// checkCgroupView refuses what CRI allows no runtime to do (KEP-5474, KEP-5714).
func checkCgroupView(sc *cri.LinuxContainerSecurityContext) error {
	const mountMode, mode = "cgroup_mount_mode", "namespace_options.cgroupns_options.mode"
	if sc.GetPrivileged() && sc.GetCgroupMountMode() == cri.CgroupMountMode_CGROUP_MOUNT_MODE_READ_ONLY {
		return in(mountMode, bad("is CGROUP_MOUNT_MODE_READ_ONLY with privileged; a privileged container's cgroup mount is always writable"))
	}
	options := sc.GetNamespaceOptions().GetCgroupnsOptions()
	if options == nil {
		return nil
	}
	switch options.GetMode() {
	case cri.NamespaceMode_CONTAINER:
	case cri.NamespaceMode_NODE:
		if !sc.GetPrivileged() && sc.GetCgroupMountMode() == cri.CgroupMountMode_CGROUP_MOUNT_MODE_READ_WRITE {
			return in(mountMode, bad("is CGROUP_MOUNT_MODE_READ_WRITE in the node's cgroup namespace, where only a privileged container may write; send CONTAINER as cgroupns_options.mode"))
		}
	default:
		return in(mode, bad("is %s; send CONTAINER or NODE", options.GetMode()))
	}
	return nil
}

// checkNamespaces accepts CONTAINER for network and ipc: no kubelet sends it
// and other runtimes treat it as POD.
func checkNamespaces(o *cri.NamespaceOption) error {
	if o.GetNetwork() == cri.NamespaceMode_TARGET {
		return in("network", bad("is TARGET; send POD or NODE"))
	}
	if o.GetIpc() == cri.NamespaceMode_TARGET {
		return in("ipc", bad("is TARGET; send POD or NODE"))
	}
	if o.GetPid() == cri.NamespaceMode_TARGET {
		if err := checkID("target_id", o.GetTargetId()); err != nil {
			return err
		}
	}
	return in("userns_options", checkUserns(o.GetUsernsOptions()))
}

// checkUserns follows KEP-127: the kubelet maps one range, from id 0 on.
func checkUserns(u *cri.UserNamespace) error {
	switch {
	case u == nil:
		return nil
	case u.GetMode() == cri.NamespaceMode_NODE:
		if len(u.GetUids())+len(u.GetGids()) != 0 {
			return bad("has mappings in mode NODE; leave them out or send mode POD")
		}
		return nil
	case u.GetMode() != cri.NamespaceMode_POD:
		return in("mode", bad("is %s; send POD or NODE", u.GetMode()))
	}
	return cmp.Or(in("uids", checkUsernsRange(u.GetUids())), in("gids", checkUsernsRange(u.GetGids())))
}

func checkUsernsRange(ids []*cri.IDMapping) error {
	if len(ids) != 1 {
		return bad("has %d mappings; send one", len(ids))
	}
	if ids[0].GetContainerId() != 0 {
		return in("[0].container_id", bad("is %d; send 0, so that the container has a root user", ids[0].GetContainerId()))
	}
	return in("[0]", checkIDMapping(ids[0]))
}

func checkIDMapping(m *cri.IDMapping) error {
	if m.GetLength() == 0 {
		return in("length", bad("is 0; send the size of the range"))
	}
	if m.GetHostId() > math.MaxUint32-m.GetLength() || m.GetContainerId() > math.MaxUint32-m.GetLength() {
		return in("length", bad("is %d, which goes beyond the last id; send a shorter range", m.GetLength()))
	}
	return nil
}

// checkIdentity bounds ids as the Kubernetes API does. CRI: a group without a
// user must be an error; user and username exclude each other.
func checkIdentity(user, group *cri.Int64Value, username string, groups []int64) error {
	if group != nil && user == nil && username == "" {
		return in("run_as_group", bad("comes without run_as_user; send both"))
	}
	if user != nil && username != "" {
		return in("run_as_username", bad("comes with run_as_user; send one of them"))
	}
	id := func(id int64) error {
		if id < 0 || id > math.MaxInt32 {
			return bad("is %d; send an id from 0 to %d", id, math.MaxInt32)
		}
		return nil
	}
	return cmp.Or(
		in("run_as_user", id(user.GetValue())),
		in("run_as_group", id(group.GetValue())),
		each("supplemental_groups", groups, maxEntries, id),
	)
}

// checkProfile: a Localhost profile without a name must not mean none
// (CVE-2023-2431), nor may parts of an OCI profile be ignored with another type.
func checkProfile(p *cri.SecurityProfile) error {
	if p.GetProfileType() == cri.SecurityProfile_Localhost && p.GetLocalhostRef() == "" {
		return in("localhost_ref", bad("is empty; name the profile or send another profile_type"))
	}
	if p.GetProfileType() == cri.SecurityProfile_OCI {
		return nil
	}
	if p.GetOciRef() != "" {
		return in("oci_ref", bad("comes with profile_type %s; leave it out or send OCI", p.GetProfileType()))
	}
	if p.GetBaseProfile() != nil {
		return in("base_profile", bad("comes with profile_type %s; leave it out or send OCI", p.GetProfileType()))
	}
	return nil
}

func checkApparmor(p *cri.SecurityProfile) error {
	if p.GetProfileType() == cri.SecurityProfile_OCI {
		return in("profile_type", bad("is OCI, which is for seccomp; send Localhost with the name of a loaded profile"))
	}
	return checkProfile(p)
}

func checkSeccomp(p *cri.SecurityProfile) error {
	switch p.GetProfileType() {
	case cri.SecurityProfile_Localhost:
		return cmp.Or(checkProfile(p), in("localhost_ref", checkPath(p.GetLocalhostRef())))
	case cri.SecurityProfile_OCI:
		if p.GetOciRef() == "" {
			return in("oci_ref", bad("is empty; name the profile or send another profile_type"))
		}
		return cmp.Or(
			in("oci_ref", checkReference(p.GetOciRef())),
			in("localhost_ref", checkAbsent(p.GetLocalhostRef(), p.GetProfileType())),
			in("base_profile.localhost_ref", checkBaseProfile(p.GetBaseProfile())),
		)
	}
	return checkProfile(p)
}

func checkAbsent(localhostRef string, kind fmt.Stringer) error {
	if localhostRef != "" {
		return bad("comes with profile_type %s; leave it out or send Localhost", kind)
	}
	return nil
}

func checkBaseProfile(p *cri.SecurityProfileBase) error {
	switch {
	case p.GetType() == cri.SecurityProfileBase_Localhost:
		return checkPath(p.GetLocalhostRef())
	case p.GetLocalhostRef() != "":
		return bad("comes with type %s; leave it out or send Localhost", p.GetType())
	}
	return nil
}

func checkEnv(e *cri.KeyValue) error {
	if e.GetKey() == "" || strings.Contains(e.GetKey(), "=") {
		return in("key", bad("is %q; send a variable's name", brief(e.GetKey())))
	}
	if size := len(e.GetKey()) + len("=") + len(e.GetValue()); size > spec.MaxExecString() {
		return bad("is %q, which has %d bytes with its name; send at most %d, which is all that the kernel passes to a program", brief(e.GetKey()), size, spec.MaxExecString())
	}
	if bytes.IndexByte(e.GetValue(), 0) >= 0 || !utf8.Valid(e.GetValue()) {
		return in("value", bad("of %q is not text in UTF-8 without NUL bytes; send that, or put it into a file", brief(e.GetKey())))
	}
	return nil
}

func checkMount(m *cri.Mount) error {
	if err := in("container_path", checkPath(m.GetContainerPath())); err != nil {
		return err
	}
	if err := checkMountSource(m); err != nil {
		return err
	}
	if m.GetRecursiveReadOnly() && !m.GetReadonly() {
		return in("recursive_read_only", bad("is set without readonly; set both"))
	}
	if m.GetRecursiveReadOnly() && m.GetPropagation() != cri.MountPropagation_PROPAGATION_PRIVATE {
		return in("recursive_read_only", bad("is set with propagation; send PROPAGATION_PRIVATE"))
	}
	return cmp.Or(
		each("uidMappings", m.GetUidMappings(), maxMounts, checkIDMapping),
		each("gidMappings", m.GetGidMappings(), maxMounts, checkIDMapping),
		each("mount_options", m.GetMountOptions(), maxMounts, checkMountOption),
	)
}

// checkMountSource: a mount shows a host path or, read-only, an image. A path
// inside an image means nothing without an image, and kubelets send it with
// every volume that is mounted by a sub path (makeMounts in kubelet_pods.go,
// 1.36 and 1.37).
func checkMountSource(m *cri.Mount) error {
	if m.GetImage() == nil {
		return in("host_path", checkPath(m.GetHostPath()))
	}
	if m.GetHostPath() != "" {
		return in("host_path", bad("comes with image; send one of them"))
	}
	if !m.GetReadonly() {
		return in("readonly", bad("is false; an image can only be mounted read-only"))
	}
	if m.GetPropagation() != cri.MountPropagation_PROPAGATION_PRIVATE {
		return in("propagation", bad("is %s; an image mount supports only PROPAGATION_PRIVATE", m.GetPropagation()))
	}
	if sub := m.GetImageSubPath(); sub != "" && (len(sub) > maxPath || !filepath.IsLocal(sub)) {
		return in("image_sub_path", bad("is %q; send a path inside the image", brief(sub)))
	}
	return in("image", checkImage(m.GetImage()))
}

// checkMountOption accepts the options of KEP-5855, which take away rights.
func checkMountOption(option string) error {
	if !slices.Contains(spec.MountRestrictions(), option) {
		return bad("is %q; send one of %s", brief(option), strings.Join(spec.MountRestrictions(), ", "))
	}
	return nil
}

func checkDevice(d *cri.Device) error {
	p := d.GetPermissions()
	if p == "" || strings.Trim(p, "rwm") != "" || len(p) > 3 {
		return in("permissions", bad("is %q; send one or more of r, w and m", brief(p)))
	}
	return cmp.Or(in("container_path", checkPath(d.GetContainerPath())), in("host_path", checkPath(d.GetHostPath())))
}

func checkCDIDevice(d *cri.CDIDevice) error {
	vendor, device, ok := strings.Cut(d.GetName(), "=")
	if !ok || device == "" || !strings.Contains(vendor, "/") || len(d.GetName()) > maxImage {
		return in("name", bad("is %q; send a qualified name such as vendor.com/class=device", brief(d.GetName())))
	}
	return nil
}

// checkResources accepts -1 as the kernel's value for no limit.
func checkResources(r *cri.LinuxContainerResources) error {
	atLeast := func(least, value int64) error {
		if value < least {
			return bad("is %d; send %d or more", value, least)
		}
		return nil
	}
	if adj := r.GetOomScoreAdj(); adj < -1000 || adj > 1000 {
		return in("oom_score_adj", bad("is %d; send a value from -1000 to 1000", adj))
	}
	for key := range r.GetUnified() {
		// The key becomes the name of a file in the container's cgroup.
		if controller, file, ok := strings.Cut(key, "."); !ok || controller == "" || file == "" || strings.Contains(key, "/") {
			return in("unified", bad("has the key %q; send names of cgroup v2 files such as memory.high", brief(key)))
		}
	}
	return cmp.Or(
		in("cpu_period", atLeast(0, r.GetCpuPeriod())),
		in("cpu_quota", atLeast(-1, r.GetCpuQuota())),
		in("cpu_shares", atLeast(0, r.GetCpuShares())),
		in("memory_limit_in_bytes", atLeast(-1, r.GetMemoryLimitInBytes())),
		in("memory_swap_limit_in_bytes", atLeast(-1, r.GetMemorySwapLimitInBytes())),
	)
}
