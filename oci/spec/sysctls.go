package spec

import (
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// sysctlName matches a path below /proc/sys whose elements are separated by
// dots or by slashes (interface names may then contain dots). No element can be
// "..".
var sysctlName = regexp.MustCompile(`^[A-Za-z0-9]([-_A-Za-z0-9]*[A-Za-z0-9])?([./][A-Za-z0-9]([-_A-Za-z0-9]*[A-Za-z0-9])?)+$`)

// ValidateSysctls refuses sysctls that are malformed or that would not stay in
// the pod: those of a namespace that it shares with the node (CVE-2022-0532)
// and those that belong to no namespace. Values must be plain text without the
// separators used in lists of sysctls (CVE-2022-0811).
func ValidateSysctls(sysctls map[string]string, hostNet, hostIPC bool) error {
	for _, name := range slices.Sorted(maps.Keys(sysctls)) {
		if len(name) > 253 || !sysctlName.MatchString(name) {
			return invalid("sysctl %.253q is not a valid name", name)
		}
		if value := sysctls[name]; len(value) > 4096 || strings.ContainsFunc(value, notInSysctl) {
			return invalid("sysctl %s: value %.80q has characters that are not allowed or is too long", name, value)
		}
		switch sysctlNamespace(name) {
		case specs.NetworkNamespace:
			if hostNet {
				return invalid("sysctl %s would change the node: the pod shares the node's network", name)
			}
		case specs.UTSNamespace:
			if hostNet {
				return invalid("sysctl %s would change the node: the pod shares the node's network and host name", name)
			}
		case specs.IPCNamespace:
			if hostIPC {
				return invalid("sysctl %s would change the node: the pod shares the node's IPC namespace", name)
			}
		default:
			return invalid("sysctl %s belongs to no namespace of a pod: set it on the node", name)
		}
	}
	return nil
}

func notInSysctl(r rune) bool {
	return r != '\t' && (r < ' ' || r > '~') || r == '+' || r == '='
}

// sysctlNamespace returns the namespace to which a sysctl belongs, or empty.
// kernel.hostname is set by the hostname field, and runtimes refuse it as a
// sysctl.
func sysctlNamespace(name string) specs.LinuxNamespaceType {
	dotted := strings.ReplaceAll(name, "/", ".")
	switch {
	case strings.HasPrefix(dotted, "net."):
		return specs.NetworkNamespace
	case dotted == "kernel.domainname":
		return specs.UTSNamespace
	case dotted == "kernel.sem", strings.HasPrefix(dotted, "kernel.shm"),
		strings.HasPrefix(dotted, "kernel.msg"), strings.HasPrefix(dotted, "fs.mqueue."):
		return specs.IPCNamespace
	}
	return ""
}

// Sysctls returns the sysctls to set in the pod's namespaces: its own over the
// node's defaults. Defaults that do not fit the pod are left out; a requested
// one that does not fit is an error.
func Sysctls(defaults map[string]string, pod *cri.PodSandboxConfig) (map[string]string, error) {
	options := pod.GetLinux().GetSecurityContext().GetNamespaceOptions()
	hostNet := options.GetNetwork() == cri.NamespaceMode_NODE
	hostIPC := options.GetIpc() == cri.NamespaceMode_NODE
	asked := pod.GetLinux().GetSysctls()
	if err := ValidateSysctls(asked, hostNet, hostIPC); err != nil {
		return nil, err
	}
	merged := map[string]string{}
	for name, value := range defaults {
		if name == pingGroups && groupsTooLarge(pod) {
			continue
		}
		if ValidateSysctls(map[string]string{name: value}, hostNet, hostIPC) == nil {
			merged[name] = value
		}
	}
	maps.Copy(merged, asked)
	return merged, nil
}

const pingGroups = "net.ipv4.ping_group_range"

// Unprivileged returns the sysctls that let processes without capabilities bind
// ports below 1024, and send and receive ICMP echo messages, in their pod's
// network.
func Unprivileged(ports, ping bool) map[string]string {
	sysctls := map[string]string{}
	if ports {
		sysctls["net.ipv4.ip_unprivileged_port_start"] = "0"
	}
	if ping {
		sysctls[pingGroups] = "0 2147483647"
	}
	return sysctls
}

// groupsTooLarge reports whether groups of the pod have ids on the node that
// kernels before Linux 6.4 do not accept in net.ipv4.ping_group_range.
func groupsTooLarge(pod *cri.PodSandboxConfig) bool {
	if !ownUserNamespace(pod) {
		return false
	}
	return slices.ContainsFunc(pod.GetLinux().GetSecurityContext().GetNamespaceOptions().GetUsernsOptions().GetGids(), func(m *cri.IDMapping) bool {
		return uint64(m.GetHostId())+uint64(m.GetLength())-1 > math.MaxInt32
	})
}

// ParseSysctls reads a list of key=value entries for Defaults.
func ParseSysctls(entries []string) (map[string]string, error) {
	sysctls := map[string]string{}
	for _, entry := range entries {
		name, value, ok := strings.Cut(entry, "=")
		if !ok {
			return nil, invalid("sysctl %q: must be of the form key=value", entry)
		}
		sysctls[strings.TrimSpace(name)] = strings.TrimSpace(value)
	}
	return sysctls, ValidateSysctls(sysctls, false, false)
}

// sysctls hands the pod's sysctls to a runtime with a kernel of its own. Pods on
// the node's kernel have them in their namespaces already.
func sysctls(in *Input, s *specs.Spec) error {
	if !in.Facts.OwnKernel {
		return nil
	}
	merged, err := Sysctls(in.Defaults.Sysctls, in.Request.Pod)
	if len(merged) > 0 {
		s.Linux.Sysctl = merged
	}
	return err
}
