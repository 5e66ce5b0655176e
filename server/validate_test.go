package server

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci/spec"
)

// wantBad checks that err refuses the field at path and says what to do.
func wantBad(t *testing.T, err error, path string) {
	t.Helper()
	if !errors.Is(err, fault.Invalid) {
		t.Errorf("%s: accepted (%v)", path, err)
		return
	}
	if !strings.HasPrefix(err.Error(), path+" ") {
		t.Errorf("%s: refused another field: %v", path, err)
	}
	if !strings.Contains(err.Error(), ";") {
		t.Errorf("%s: does not say what to do: %v", path, err)
	}
	if len(err.Error()) > 500 {
		t.Errorf("%s: message of %d bytes", path, len(err.Error()))
	}
}

func TestRefusedPods(t *testing.T) {
	t.Parallel()
	type config = cri.PodSandboxConfig
	long := strings.Repeat("x", 1<<16)
	refused := []struct {
		path   string
		change func(*config)
	}{
		{"metadata", func(c *config) { c.Metadata = nil }},
		{"metadata.name", func(c *config) { c.Metadata.Name = "" }},
		{"metadata.name", func(c *config) { c.Metadata.Name = "a/b" }},
		{"metadata.name", func(c *config) { c.Metadata.Name = ".." }},
		{"metadata.name", func(c *config) { c.Metadata.Name = "." }},
		{"metadata.name", func(c *config) { c.Metadata.Name = "a\nb" }},
		{"metadata.name", func(c *config) { c.Metadata.Name = "a\u0085b" }},
		{"metadata.name", func(c *config) { c.Metadata.Name = "a b" }},
		{"metadata.name", func(c *config) { c.Metadata.Name = "a\x00b" }},
		{"metadata.name", func(c *config) { c.Metadata.Name = long }},
		{"metadata.namespace", func(c *config) { c.Metadata.Namespace = "../etc" }},
		{"metadata.uid", func(c *config) { c.Metadata.Uid = "1\t2" }},
		{"hostname", func(c *config) { c.Hostname = strings.Repeat("x", 65) }},
		{"hostname", func(c *config) { c.Hostname = "web\n127.0.0.1 evil" }},
		{"hostname", func(c *config) { c.Hostname = "wéb" }},
		{"hostname", func(c *config) { c.Hostname = "a/b" }},
		{"log_directory", func(c *config) { c.LogDirectory = "var/log" }},
		{"log_directory", func(c *config) { c.LogDirectory = "/var/log/../../etc" }},
		{"log_directory", func(c *config) { c.LogDirectory = "/var//log" }},
		{"log_directory", func(c *config) { c.LogDirectory = "/var/log\x00" }},
		{"log_directory", func(c *config) { c.LogDirectory = "/" + long }},
		{"dns_config.servers[1]", func(c *config) { c.DnsConfig.Servers = []string{"10.0.0.1", "10.0.0.1\noptions x"} }},
		{"dns_config.servers[0]", func(c *config) { c.DnsConfig.Servers = []string{""} }},
		{"dns_config.searches[0]", func(c *config) { c.DnsConfig.Searches = []string{"a b"} }},
		{"dns_config.searches[0]", func(c *config) { c.DnsConfig.Searches = []string{long} }},
		{"dns_config.options[0]", func(c *config) { c.DnsConfig.Options = []string{"ndots:5\r"} }},
		{"dns_config.options", func(c *config) { c.DnsConfig.Options = make([]string, maxDNS+1) }},
		{"port_mappings[0].protocol", func(c *config) { c.PortMappings[0].Protocol = 3 }},
		{"port_mappings[0].container_port", func(c *config) { c.PortMappings[0].ContainerPort = -1 }},
		{"port_mappings[0].container_port", func(c *config) { c.PortMappings[0].ContainerPort = 65536 }},
		{"port_mappings[0].container_port", func(c *config) { c.PortMappings[0].ContainerPort = 0 }},
		{"port_mappings[0].host_port", func(c *config) { c.PortMappings[0].HostPort = -1 }},
		{"port_mappings[0].host_port", func(c *config) { c.PortMappings[0].HostPort = 65536 }},
		{"port_mappings[0].host_ip", func(c *config) { c.PortMappings[0].HostIp = "10.0.0" }},
		{"port_mappings", func(c *config) { c.PortMappings = make([]*cri.PortMapping, maxEntries+1) }},
		{"labels", func(c *config) { c.Labels[""] = "x" }},
		{"labels", func(c *config) { c.Labels["x"] = strings.Repeat("x", maxMetadata+1) }},
		{"annotations", func(c *config) { c.Annotations[strings.Repeat("x", maxMetadata+1)] = "" }},
		{"linux.cgroup_parent", func(c *config) { c.Linux.CgroupParent = "/kubepods/../../system.slice" }},
		{"linux.cgroup_parent", func(c *config) { c.Linux.CgroupParent = "/a\nb" }},
		{"linux.cgroup_parent", func(c *config) { c.Linux.CgroupParent = "/" + long }},
		{"linux.sysctls", func(c *config) { c.Linux.Sysctls = map[string]string{"a": "b\x00c"} }},
		{"linux.sysctls", func(c *config) { c.Linux.Sysctls = map[string]string{"a\x00": "b"} }},
		{"linux.overhead.cpu_period", func(c *config) { c.Linux.Overhead.CpuPeriod = -1 }},
		{"linux.resources.memory_limit_in_bytes", func(c *config) { c.Linux.Resources.MemoryLimitInBytes = -2 }},
		{"linux.security_context.run_as_group", func(c *config) { c.Linux.SecurityContext.RunAsUser = nil }},
		{"linux.security_context.run_as_user", func(c *config) { c.Linux.SecurityContext.RunAsUser.Value = -1 }},
		{"linux.security_context.run_as_user", func(c *config) { c.Linux.SecurityContext.RunAsUser.Value = 1 << 32 }},
		{"linux.security_context.run_as_group", func(c *config) { c.Linux.SecurityContext.RunAsGroup.Value = 1 << 31 }},
		{"linux.security_context.supplemental_groups[0]", func(c *config) { c.Linux.SecurityContext.SupplementalGroups[0] = -1 }},
		{"linux.security_context.supplemental_groups_policy", func(c *config) { c.Linux.SecurityContext.SupplementalGroupsPolicy = 2 }},
		{"linux.security_context.seccomp.profile_type", func(c *config) { c.Linux.SecurityContext.Seccomp.ProfileType = 4 }},
		{"linux.security_context.seccomp.oci_ref", func(c *config) { c.Linux.SecurityContext.Seccomp.ProfileType = cri.SecurityProfile_OCI }},
		{"linux.security_context.seccomp.oci_ref", func(c *config) { c.Linux.SecurityContext.Seccomp.OciRef = "r/p@sha256:1" }},
		{"linux.security_context.apparmor.profile_type", func(c *config) { c.Linux.SecurityContext.Apparmor.ProfileType = cri.SecurityProfile_OCI }},
		{"linux.security_context.namespace_options.cgroupns_options", func(c *config) {
			c.Linux.SecurityContext.NamespaceOptions.CgroupnsOptions = &cri.CgroupNamespace{Mode: cri.NamespaceMode_CONTAINER}
		}},
		{"linux.security_context.seccomp.localhost_ref", func(c *config) { c.Linux.SecurityContext.Seccomp.LocalhostRef = "" }},
		{"linux.security_context.seccomp.localhost_ref", func(c *config) { c.Linux.SecurityContext.Seccomp.LocalhostRef = "p.json" }},
		{"linux.security_context.apparmor.localhost_ref", func(c *config) { c.Linux.SecurityContext.Apparmor.LocalhostRef = "" }},
		{"linux.security_context.namespace_options.network", func(c *config) { c.Linux.SecurityContext.NamespaceOptions.Network = 3 }},
		{"linux.security_context.namespace_options.network", func(c *config) { c.Linux.SecurityContext.NamespaceOptions.Network = 4 }},
		{"linux.security_context.namespace_options.ipc", func(c *config) { c.Linux.SecurityContext.NamespaceOptions.Ipc = 3 }},
		{"linux.security_context.namespace_options.pid", func(c *config) {
			c.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_TARGET
			c.Linux.SecurityContext.NamespaceOptions.TargetId = idOf(1)
		}},
	}
	const userns = "linux.security_context.namespace_options.userns_options."
	for _, u := range []struct {
		path   string
		change func(*cri.UserNamespace)
	}{
		{"mode", func(u *cri.UserNamespace) { u.Mode = cri.NamespaceMode_CONTAINER }},
		{"mode", func(u *cri.UserNamespace) { u.Mode = cri.NamespaceMode_TARGET }},
		{"uids", func(u *cri.UserNamespace) { u.Uids = nil }},
		{"gids", func(u *cri.UserNamespace) { u.Gids = append(u.Gids, u.Gids[0]) }},
		{"uids[0].container_id", func(u *cri.UserNamespace) { u.Uids[0].ContainerId = 1 }},
		{"gids[0].length", func(u *cri.UserNamespace) { u.Gids[0].Length = 0 }},
		{"uids[0].length", func(u *cri.UserNamespace) { u.Uids[0].HostId, u.Uids[0].Length = 1, math.MaxUint32 }},
	} {
		refused = append(refused, struct {
			path   string
			change func(*config)
		}{userns + u.path, func(c *config) { u.change(c.Linux.SecurityContext.NamespaceOptions.UsernsOptions) }})
	}
	for _, r := range refused {
		c := maximalSandboxConfig()
		r.change(c)
		wantBad(t, checkRunPodSandbox(&cri.RunPodSandboxRequest{Config: c}), "config."+r.path)
		// The same configuration is repeated with every container.
		wantBad(t, checkCreateContainer(&cri.CreateContainerRequest{
			PodSandboxId: idOf(1), Config: maximalContainerConfig(), SandboxConfig: c}), "sandbox_config."+r.path)
	}
	wantBad(t, checkRunPodSandbox(&cri.RunPodSandboxRequest{Config: maximalSandboxConfig(), RuntimeHandler: "a\x00"}), "runtime_handler")
}

// make1s returns n bytes, which take six times as many in JSON.
func make1s(n int) []byte { return bytes.Repeat([]byte{1}, n) }

// The message contains the name of the variable, and nothing of its value.
func TestRefusedVariablesAreNamed(t *testing.T) {
	t.Parallel()
	for _, value := range [][]byte{make1s(1 << 20), make1s(2 << 20), []byte("s3cret\x00"), []byte("s3cret\xff")} {
		c := maximalContainerConfig()
		c.Envs[0] = &cri.KeyValue{Key: "BIG", Value: value}
		err := checkCreateContainer(&cri.CreateContainerRequest{PodSandboxId: idOf(1), Config: c})
		if !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), `"BIG"`) || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("value of %d bytes: %.200v", len(value), err)
		}
	}
}

func TestRefusedUpdates(t *testing.T) {
	t.Parallel()
	large := &cri.LinuxContainerResources{Unified: map[string]string{"memory.high": strings.Repeat("x", 1<<20), "memory.max": "1"}}
	wantBad(t, checkUpdateContainerResources(&cri.UpdateContainerResourcesRequest{ContainerId: idOf(1), Linux: large}), "linux")
	wantBad(t, checkUpdatePodSandboxResources(&cri.UpdatePodSandboxResourcesRequest{PodSandboxId: idOf(1), Overhead: large}), "overhead")
	wantBad(t, checkUpdatePodSandboxResources(&cri.UpdatePodSandboxResourcesRequest{PodSandboxId: idOf(1), Resources: large}), "resources")
}

func TestRefusedCommands(t *testing.T) {
	t.Parallel()
	big := strings.Repeat("x", spec.MaxExecString()+1)
	many := slices.Repeat([]string{big[:100<<10]}, 62)
	wantExec := func(cmd []string, path string) {
		_, err := checkExecSync(&cri.ExecSyncRequest{ContainerId: idOf(1), Cmd: cmd})
		wantBad(t, err, path)
		wantBad(t, checkExec(&cri.ExecRequest{ContainerId: idOf(1), Cmd: cmd, Stdout: true}), path)
	}
	wantExec([]string{"true", big}, "cmd[1]")
	wantExec(many, "cmd")
	wantExec([]string{""}, "cmd")
}

func TestRefusedContainers(t *testing.T) {
	t.Parallel()
	type config = cri.ContainerConfig
	const host, image = 0, 1 // the mounts of maximalContainerConfig
	security := func(c *config) *cri.LinuxContainerSecurityContext { return c.Linux.SecurityContext }
	for _, r := range []struct {
		path   string
		change func(*config)
	}{
		{"metadata", func(c *config) { c.Metadata = nil }},
		{"metadata.name", func(c *config) { c.Metadata.Name = "" }},
		{"metadata.name", func(c *config) { c.Metadata.Name = "../x" }},
		{"image", func(c *config) { c.Image = nil }},
		{"image.image", func(c *config) { c.Image.Image = "" }},
		{"image.image", func(c *config) { c.Image.Image = "a b" }},
		{"image.image", func(c *config) { c.Image.Image = "a\nb" }},
		{"image.image", func(c *config) { c.Image.Image = strings.Repeat("x", maxImage+1) }},
		{"image.user_specified_image", func(c *config) { c.Image.UserSpecifiedImage = "a\tb" }},
		{"image.annotations", func(c *config) { c.Image.Annotations[""] = "x" }},
		{"command[0]", func(c *config) { c.Command[0] = "a\x00b" }},
		{"args[0]", func(c *config) { c.Args[0] = strings.Repeat("x", maxString+1) }},
		{"args[0]", func(c *config) { c.Args[0] = strings.Repeat("x", spec.MaxExecString()+1) }},
		{"command[0]", func(c *config) { c.Command[0] = strings.Repeat("x", spec.MaxExecString()+1) }},
		{"", func(c *config) { c.Args = slices.Repeat([]string{strings.Repeat("x", 100<<10)}, 62) }},
		{"", func(c *config) { c.Envs = slices.Repeat([]*cri.KeyValue{{Key: "A", Value: make1s(100 << 10)}}, 62) }},
		{"", func(c *config) {
			c.Annotations["a"], c.Labels["b"] = strings.Repeat("x", 1<<20-100), strings.Repeat("x", 1<<20-100)
			c.Envs = slices.Repeat([]*cri.KeyValue{{Key: "A", Value: make1s(100 << 10)}}, 60)
			c.WorkingDir, c.LogPath = "/"+strings.Repeat("x", 4000), strings.Repeat("x", 4000)
			c.Mounts = slices.Repeat([]*cri.Mount{{ContainerPath: "/" + strings.Repeat("x", 2000), HostPath: "/" + strings.Repeat("x", 2000)}}, 200)
		}},
		{"args", func(c *config) { c.Args = make([]string, maxEntries+1) }},
		{"working_dir", func(c *config) { c.WorkingDir = "srv" }},
		{"working_dir", func(c *config) { c.WorkingDir = "/" + strings.Repeat("x", maxPath) }},
		{"envs[0].key", func(c *config) { c.Envs[0].Key = "" }},
		{"envs[0].key", func(c *config) { c.Envs[0].Key = "A=b" }},
		{"envs[0].value", func(c *config) { c.Envs[0].Value = []byte("a\x00b") }},
		{"envs[0].value", func(c *config) { c.Envs[0].Value = []byte("\xff\xfe\n") }},
		{"envs[0]", func(c *config) { c.Envs[0].Value = make1s(1 << 20) }},
		{"envs[0]", func(c *config) { c.Envs[0] = &cri.KeyValue{Key: "BIG", Value: make1s(spec.MaxExecString() - 3)} }},
		{"envs[0]", func(c *config) { c.Envs[0].Key = strings.Repeat("x", spec.MaxExecString()) }},
		{"envs", func(c *config) { c.Envs = make([]*cri.KeyValue, maxEntries+1) }},
		{"mounts", func(c *config) { c.Mounts = make([]*cri.Mount, maxMounts+1) }},
		{"mounts[0].container_path", func(c *config) { c.Mounts[host].ContainerPath = "" }},
		{"mounts[0].container_path", func(c *config) { c.Mounts[host].ContainerPath = "data" }},
		{"mounts[0].container_path", func(c *config) { c.Mounts[host].ContainerPath = "../data" }},
		{"mounts[0].container_path", func(c *config) { c.Mounts[host].ContainerPath = "/data\x00" }},
		{"mounts[0].host_path", func(c *config) { c.Mounts[host].HostPath = "" }},
		{"mounts[0].host_path", func(c *config) { c.Mounts[host].HostPath = "host" }},
		{"mounts[0].propagation", func(c *config) { c.Mounts[host].Propagation = 3 }},
		{"mounts[0].recursive_read_only", func(c *config) { c.Mounts[host].Readonly = false }},
		{"mounts[0].recursive_read_only", func(c *config) { c.Mounts[host].Propagation = cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER }},
		{"mounts[0].uidMappings[0].length", func(c *config) { c.Mounts[host].UidMappings[0].Length = 0 }},
		{"mounts[0].gidMappings[0].length", func(c *config) { c.Mounts[host].GidMappings[0].ContainerId = math.MaxUint32 }},
		{"mounts[0].mount_options[1]", func(c *config) { c.Mounts[host].MountOptions = []string{"nodev", "suid"} }},
		{"mounts[0].mount_options[0]", func(c *config) { c.Mounts[host].MountOptions = []string{"nodev,rw"} }},
		{"mounts[1].host_path", func(c *config) { c.Mounts[image].HostPath = "/host" }},
		{"mounts[1].readonly", func(c *config) { c.Mounts[image].Readonly = false }},
		{"mounts[1].image.image", func(c *config) { c.Mounts[image].Image.Image = "" }},
		{"mounts[1].image_sub_path", func(c *config) { c.Mounts[image].ImageSubPath = "../etc" }},
		{"mounts[1].image_sub_path", func(c *config) { c.Mounts[image].ImageSubPath = "/etc" }},
		{"devices[0].permissions", func(c *config) { c.Devices[0].Permissions = "" }},
		{"devices[0].permissions", func(c *config) { c.Devices[0].Permissions = "rwx" }},
		{"devices[0].permissions", func(c *config) { c.Devices[0].Permissions = "rwmr" }},
		{"devices[0].container_path", func(c *config) { c.Devices[0].ContainerPath = "null" }},
		{"devices[0].host_path", func(c *config) { c.Devices[0].HostPath = "" }},
		{"devices", func(c *config) { c.Devices = make([]*cri.Device, maxMounts+1) }},
		{"CDI_devices[0].name", func(c *config) { c.CDIDevices[0].Name = "gpu0" }},
		{"CDI_devices[0].name", func(c *config) { c.CDIDevices[0].Name = "vendor.com/gpu=" }},
		{"labels", func(c *config) { c.Labels["x"] = strings.Repeat("x", maxMetadata+1) }},
		{"annotations", func(c *config) { c.Annotations[""] = "" }},
		{"log_path", func(c *config) { c.LogPath = "/var/log/0.log" }},
		{"log_path", func(c *config) { c.LogPath = "../../etc/cron.d/x" }},
		{"log_path", func(c *config) { c.LogPath = "web/../../x" }},
		{"log_path", func(c *config) { c.LogPath = "web/../0.log" }},
		{"log_path", func(c *config) { c.LogPath = "web//0.log" }},
		{"log_path", func(c *config) { c.LogPath = "web/" }},
		{"log_path", func(c *config) { c.LogPath = "./0.log" }},
		{"log_path", func(c *config) { c.LogPath = "." }},
		{"log_path", func(c *config) { c.LogPath = ".." }},
		{"log_path", func(c *config) { c.LogPath = "0.log\x00" }},
		{"stop_signal", func(c *config) { c.StopSignal = 66 }},
		{"linux.resources.cpu_period", func(c *config) { c.Linux.Resources.CpuPeriod = -1 }},
		{"linux.resources.cpu_quota", func(c *config) { c.Linux.Resources.CpuQuota = -2 }},
		{"linux.resources.cpu_shares", func(c *config) { c.Linux.Resources.CpuShares = -1 }},
		{"linux.resources.memory_limit_in_bytes", func(c *config) { c.Linux.Resources.MemoryLimitInBytes = math.MinInt64 }},
		{"linux.resources.memory_swap_limit_in_bytes", func(c *config) { c.Linux.Resources.MemorySwapLimitInBytes = -2 }},
		{"linux.resources.oom_score_adj", func(c *config) { c.Linux.Resources.OomScoreAdj = 1001 }},
		{"linux.resources.oom_score_adj", func(c *config) { c.Linux.Resources.OomScoreAdj = -1001 }},
		{"linux.resources.unified", func(c *config) { c.Linux.Resources.Unified["../memory.max"] = "1" }},
		{"linux.resources.unified", func(c *config) { c.Linux.Resources.Unified[".."] = "1" }},
		{"linux.resources.unified", func(c *config) { c.Linux.Resources.Unified["memory"] = "1" }},
		{"linux.security_context.run_as_group", func(c *config) { security(c).RunAsUser = nil }},
		{"linux.security_context.run_as_username", func(c *config) { security(c).RunAsUsername = "www" }},
		{"linux.security_context.run_as_user", func(c *config) { security(c).RunAsUser.Value = 1 << 31 }},
		{"linux.security_context.run_as_group", func(c *config) { security(c).RunAsGroup.Value = -1 }},
		{"linux.security_context.supplemental_groups[0]", func(c *config) { security(c).SupplementalGroups[0] = 1 << 32 }},
		{"linux.security_context.seccomp.localhost_ref", func(c *config) { security(c).Seccomp.LocalhostRef = "" }},
		{"linux.security_context.apparmor.localhost_ref", func(c *config) { security(c).Apparmor.LocalhostRef = "" }},
		{"linux.security_context.apparmor.profile_type", func(c *config) { security(c).Apparmor.ProfileType = -1 }},
		{"linux.security_context.apparmor.profile_type", func(c *config) { security(c).Apparmor.ProfileType = cri.SecurityProfile_OCI }},
		{"linux.security_context.apparmor.oci_ref", func(c *config) { security(c).Apparmor.OciRef = "r/p@sha256:1" }},
		{"linux.security_context.apparmor.base_profile", func(c *config) { security(c).Apparmor.BaseProfile = &cri.SecurityProfileBase{} }},
		{"linux.security_context.seccomp.oci_ref", func(c *config) { security(c).Seccomp.OciRef = "r/p@sha256:1" }},
		{"linux.security_context.seccomp.base_profile", func(c *config) {
			security(c).Seccomp = &cri.SecurityProfile{BaseProfile: &cri.SecurityProfileBase{}}
		}},
		{"linux.security_context.seccomp.oci_ref", func(c *config) {
			security(c).Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_OCI}
		}},
		{"linux.security_context.seccomp.oci_ref", func(c *config) {
			security(c).Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_OCI, OciRef: "r/p @sha256:1"}
		}},
		{"linux.security_context.seccomp.localhost_ref", func(c *config) {
			security(c).Seccomp = ociProfile(nil)
			security(c).Seccomp.LocalhostRef = "/p.json"
		}},
		{"linux.security_context.seccomp.base_profile.localhost_ref", func(c *config) {
			security(c).Seccomp = ociProfile(&cri.SecurityProfileBase{Type: cri.SecurityProfileBase_Localhost})
		}},
		{"linux.security_context.seccomp.base_profile.localhost_ref", func(c *config) {
			security(c).Seccomp = ociProfile(&cri.SecurityProfileBase{LocalhostRef: "/p.json"})
		}},
		{"linux.security_context.cgroup_mount_mode", func(c *config) { security(c).CgroupMountMode = 3 }},
		{"linux.security_context.cgroup_mount_mode", func(c *config) {
			security(c).CgroupMountMode = cri.CgroupMountMode_CGROUP_MOUNT_MODE_READ_ONLY // with privileged
		}},
		{"linux.security_context.cgroup_mount_mode", func(c *config) {
			security(c).Privileged, security(c).NamespaceOptions.CgroupnsOptions.Mode = false, cri.NamespaceMode_NODE
		}},
		{"linux.security_context.namespace_options.cgroupns_options.mode", func(c *config) {
			security(c).NamespaceOptions.CgroupnsOptions = &cri.CgroupNamespace{} // POD
		}},
		{"linux.security_context.namespace_options.cgroupns_options.mode", func(c *config) {
			security(c).NamespaceOptions.CgroupnsOptions.Mode = cri.NamespaceMode_TARGET
		}},
		{"linux.security_context.namespace_options.pid", func(c *config) { security(c).NamespaceOptions.Pid = 9 }},
		{"linux.security_context.namespace_options.target_id", func(c *config) { security(c).NamespaceOptions.TargetId = "" }},
		{"linux.security_context.namespace_options.userns_options.mode", func(c *config) {
			security(c).NamespaceOptions.UsernsOptions.Mode = cri.NamespaceMode_CONTAINER
		}},
		{"linux.security_context.namespace_options.userns_options", func(c *config) {
			security(c).NamespaceOptions.UsernsOptions.Mode = cri.NamespaceMode_NODE
		}},
	} {
		c := maximalContainerConfig()
		r.change(c)
		wantBad(t, checkCreateContainer(&cri.CreateContainerRequest{PodSandboxId: idOf(1), Config: c}), strings.TrimSuffix("config."+r.path, "."))
	}
	c := maximalContainerConfig()
	c.Linux.SecurityContext.NamespaceOptions.TargetId = "web"
	if err := checkCreateContainer(&cri.CreateContainerRequest{PodSandboxId: idOf(1), Config: c}); !errors.Is(err, fault.NotFound) {
		t.Errorf("a target that cannot be: %v", err)
	}
}

// ociProfile is a seccomp profile with the base.
func ociProfile(base *cri.SecurityProfileBase) *cri.SecurityProfile {
	return &cri.SecurityProfile{ProfileType: cri.SecurityProfile_OCI, OciRef: "r/p@sha256:1", BaseProfile: base}
}

// Profiles of registries are accepted with each kind of base.
func TestSeccompProfilesOfRegistries(t *testing.T) {
	t.Parallel()
	for _, base := range []*cri.SecurityProfileBase{nil, {}, {Type: cri.SecurityProfileBase_Localhost, LocalhostRef: "/p.json"}} {
		pod, container := maximalSandboxConfig(), maximalContainerConfig()
		pod.Linux.SecurityContext.Seccomp, container.Linux.SecurityContext.Seccomp = ociProfile(base), ociProfile(base)
		if err := checkRunPodSandbox(&cri.RunPodSandboxRequest{Config: pod}); err != nil {
			t.Errorf("base %v: %v", base, err)
		}
		if err := checkCreateContainer(&cri.CreateContainerRequest{PodSandboxId: idOf(1), Config: container}); err != nil {
			t.Errorf("base %v: %v", base, err)
		}
	}
}

// What kubelets, crictl and critest send, even if rarely, is accepted.
func TestAcceptedPods(t *testing.T) {
	t.Parallel()
	type config = cri.PodSandboxConfig
	for name, change := range map[string]func(*config){
		"bare":             func(c *config) { *c = config{Metadata: &cri.PodSandboxMetadata{Name: "x"}} },
		"no hostname":      func(c *config) { c.Hostname = "" },
		"longest hostname": func(c *config) { c.Hostname = strings.Repeat("x", 64) },
		"host network":     func(c *config) { c.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE },
		"own network":      func(c *config) { c.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_CONTAINER },
		"host users": func(c *config) {
			c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = &cri.UserNamespace{Mode: cri.NamespaceMode_NODE}
		},
		"whole id space": func(c *config) {
			c.Linux.SecurityContext.NamespaceOptions.UsernsOptions.Uids[0] = &cri.IDMapping{Length: math.MaxUint32}
		},
		"no host port":       func(c *config) { c.PortMappings[0].HostPort = 0 },
		"scoped DNS server":  func(c *config) { c.DnsConfig.Servers = []string{"fe80::1%eth0"} },
		"root log directory": func(c *config) { c.LogDirectory = "/" },
		"systemd slice":      func(c *config) { c.Linux.CgroupParent = "kubepods-burstable-pod1.slice" },
		"dots in cgroup":     func(c *config) { c.Linux.CgroupParent = "/a..b/..c" },
		"any annotation":     func(c *config) { c.Annotations["line\nbreak\x00"] = "\x00\n" + strings.Repeat("x", 256<<10) },
		"group with user":    func(c *config) { c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{} },
		"seccomp default":    func(c *config) { c.Linux.SecurityContext.Seccomp = &cri.SecurityProfile{} },
	} {
		c := maximalSandboxConfig()
		change(c)
		if err := checkRunPodSandbox(&cri.RunPodSandboxRequest{Config: c}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestAcceptedContainers(t *testing.T) {
	t.Parallel()
	type config = cri.ContainerConfig
	for name, change := range map[string]func(*config){
		"bare": func(c *config) {
			*c = config{Metadata: &cri.ContainerMetadata{Name: "x"}, Image: &cri.ImageSpec{Image: "y"}}
		},
		"no log":      func(c *config) { c.LogPath = "" },
		"dots in log": func(c *config) { c.LogPath = "..web/...log" },
		"node's cgroups": func(c *config) {
			c.Linux.SecurityContext.NamespaceOptions.CgroupnsOptions.Mode = cri.NamespaceMode_NODE
		},
		"read-only cgroups": func(c *config) {
			c.Linux.SecurityContext.Privileged, c.Linux.SecurityContext.CgroupMountMode = false, cri.CgroupMountMode_CGROUP_MOUNT_MODE_READ_ONLY
		},
		"username":        func(c *config) { c.Linux.SecurityContext.RunAsUser, c.Linux.SecurityContext.RunAsUsername = nil, "www" },
		"group of a name": func(c *config) { c.Linux.SecurityContext.RunAsUser, c.Linux.SecurityContext.RunAsUsername = nil, "www" },
		"no limits": func(c *config) {
			c.Linux.Resources = &cri.LinuxContainerResources{CpuQuota: -1, MemoryLimitInBytes: -1, MemorySwapLimitInBytes: -1, OomScoreAdj: -1000}
		},
		"control env":   func(c *config) { c.Envs[0].Value = []byte("\x01\n") },
		"longest env":   func(c *config) { c.Envs[0] = &cri.KeyValue{Key: "BIG", Value: make1s(spec.MaxExecString() - 4)} },
		"odd env name":  func(c *config) { c.Envs[0].Key = "my.env-name 1" },
		"root mount":    func(c *config) { c.Mounts[0].HostPath = "/" },
		"long argument": func(c *config) { c.Args[0] = strings.Repeat("x", 128<<10-1) },
		"last signal":   func(c *config) { c.StopSignal = cri.Signal_SIGNAL_SIGRTMAX },
		"own pids": func(c *config) {
			c.Linux.SecurityContext.NamespaceOptions = &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER}
		},
		"services' envs": func(c *config) {
			for i := range 35_000 {
				c.Envs = append(c.Envs, &cri.KeyValue{Key: fmt.Sprint("SERVICE_", i), Value: []byte("tcp://10.0.0.1:80")})
			}
		},
		"image volume with digest": func(c *config) { c.Mounts[1].Image.ImageRef = "web@sha256:" + idOf(1) },
	} {
		c := maximalContainerConfig()
		change(c)
		if err := checkCreateContainer(&cri.CreateContainerRequest{PodSandboxId: idOf(1), Config: c}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Values that may be secret are never in a message.
func TestMessagesKeepSecrets(t *testing.T) {
	t.Parallel()
	auth := &cri.AuthConfig{Password: "s3cret\x00", RegistryToken: strings.Repeat("s3cret", maxString)}
	err := wellFormed(&cri.PullImageRequest{Image: &cri.ImageSpec{Image: "web"}, Auth: auth})
	if err == nil || strings.Contains(err.Error(), "s3cret") {
		t.Errorf("got %.200v", err)
	}
	c := maximalContainerConfig()
	c.Envs[0].Value = []byte("s3cret\x00")
	if err := wellFormed(c); err == nil || strings.Contains(err.Error(), "s3cret") {
		t.Errorf("got %v", err)
	}
}

func TestBoundOfMaps(t *testing.T) {
	t.Parallel()
	selector := map[string]string{}
	for i := range maxEntries + 1 {
		selector[fmt.Sprint(i)] = ""
	}
	wantBad(t, in("filter", wellFormed(&cri.ContainerFilter{LabelSelector: selector})), "filter.label_selector")
}

func TestPathOfNestedFields(t *testing.T) {
	t.Parallel()
	for want, err := range map[string]error{
		"a.b.c is":    in("a", in("b.c", bad("is"))),
		"a[1].b is":   in("a", in("[1]", in("b", bad("is")))),
		"a[0][1] is":  in("a[0]", in("[1]", bad("is"))),
		"a is":        in("a", bad("is")),
		"not found":   in("a", fault.NotFound),
		"x[2].key is": each("x", []int{0, 0, 1}, 3, func(i int) error { return map[int]error{1: in("key", bad("is"))}[i] }),
	} {
		if err.Error() != want {
			t.Errorf("%q, want %q", err, want)
		}
	}
	if in("a", nil) != nil {
		t.Error("no error became one")
	}
}

// For arbitrary bytes: no panic, and what is accepted cannot leave the log
// directory, be an empty name or end a path early.
func FuzzCreateContainer(f *testing.F) {
	for _, c := range []*cri.ContainerConfig{maximalContainerConfig(), {}, nil} {
		raw, err := proto.Marshal(&cri.CreateContainerRequest{PodSandboxId: idOf(1), Config: c, SandboxConfig: maximalSandboxConfig()})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		req := &cri.CreateContainerRequest{}
		if proto.Unmarshal(raw, req) != nil {
			t.Skip()
		}
		before := proto.CloneOf(req)
		err := checkCreateContainer(req)
		if !proto.Equal(before, req) {
			t.Error("validation changed the request")
		}
		if err != nil {
			if !errors.Is(err, fault.Invalid) && !errors.Is(err, fault.NotFound) || len(err.Error()) > 1000 || strings.HasPrefix(err.Error(), " ") {
				t.Errorf("refused with %v", err)
			}
			return
		}
		c := req.GetConfig()
		if log := c.GetLogPath(); log != "" && !strings.HasPrefix(filepath.Join("/logs", log), "/logs/") {
			t.Errorf("log path %q accepted", log)
		}
		if c.GetMetadata().GetName() == "" || c.GetImage().GetImage() == "" {
			t.Errorf("nameless container accepted: %v", c)
		}
		for _, m := range c.GetMounts() {
			if !filepath.IsAbs(m.GetContainerPath()) || m.GetImage() == nil && !filepath.IsAbs(m.GetHostPath()) ||
				m.GetImage() != nil && !m.GetReadonly() || strings.Contains(m.GetHostPath()+m.GetContainerPath(), "\x00") {
				t.Errorf("mount accepted: %v", m)
			}
		}
	})
}

func FuzzRunPodSandbox(f *testing.F) {
	for _, c := range []*cri.PodSandboxConfig{maximalSandboxConfig(), {}, nil} {
		raw, err := proto.Marshal(&cri.RunPodSandboxRequest{Config: c, RuntimeHandler: "runc"})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		req := &cri.RunPodSandboxRequest{}
		if proto.Unmarshal(raw, req) != nil {
			t.Skip()
		}
		err := checkRunPodSandbox(req)
		if err != nil {
			if !errors.Is(err, fault.Invalid) || len(err.Error()) > 1000 || strings.HasPrefix(err.Error(), " ") {
				t.Errorf("refused with %v", err)
			}
			return
		}
		c := req.GetConfig()
		if c.GetMetadata().GetName() == "" || strings.ContainsAny(c.GetHostname()+c.GetMetadata().GetName(), "\x00\n/") {
			t.Errorf("accepted: %v", c)
		}
		for _, text := range append(c.GetDnsConfig().GetServers(), append(c.GetDnsConfig().GetSearches(), c.GetDnsConfig().GetOptions()...)...) {
			if text == "" || strings.ContainsAny(text, " \t\r\n\x00") {
				t.Errorf("resolv.conf gets %q", text)
			}
		}
	})
}
