package spec

import (
	"path"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/selinux"
)

// SELinux configures how the node separates pods by SELinux.
type SELinux struct {
	selinux.Contexts
	// HostNetwork: containers on the node's network are confined as well.
	HostNetwork bool
}

// FileContext returns the SELinux context for files of a pod with this level,
// or of one of its containers (nil: of the pod): the file type of containers,
// at their level. It returns an empty context for a nil receiver, which means a
// node without SELinux. Options that cannot be part of a context are
// fault.Invalid.
func (s *SELinux) FileContext(level string, pod *cri.PodSandboxConfig, container *cri.ContainerConfig) (string, error) {
	if s == nil {
		return "", nil
	}
	options := seLinuxOptions(pod, container)
	for name, value := range map[string]string{
		"user": options.GetUser(), "role": options.GetRole(), "type": options.GetType(), "level": options.GetLevel(),
	} {
		// The value becomes part of a mount option.
		if len(value) > maxContextPart || strings.ContainsFunc(value, notInContexts) || name != "level" && strings.ContainsAny(value, ":,") {
			return "", invalid("selinux_options: %s %.80q cannot be part of an SELinux context", name, value)
		}
	}
	return selinux.At(selinux.At(s.File, level), options.GetLevel()), nil
}

// maxContextPart bounds a part of a context: even a level that lists all 1024
// categories is shorter.
const maxContextPart = 8 << 10

func notInContexts(r rune) bool {
	letter := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
	return !letter && !strings.ContainsRune("_.-:,", r)
}

// seLinuxOptions returns the container's options, or the pod's if the container
// has none.
func seLinuxOptions(pod *cri.PodSandboxConfig, container *cri.ContainerConfig) *cri.SELinuxOption {
	if own := container.GetLinux().GetSecurityContext().GetSelinuxOptions(); own != nil {
		return own
	}
	return pod.GetLinux().GetSecurityContext().GetSelinuxOptions()
}

// Confines reports whether SELinux confines a container, so that its own files need its
// label. A container that is privileged or in the node's PID, IPC or network namespace is
// not confined, unless its request names an SELinux type.
func (s *SELinux) Confines(pod *cri.PodSandboxConfig, container *cri.ContainerConfig) bool {
	privileged := container.GetLinux().GetSecurityContext().GetPrivileged()
	return s != nil && (seLinuxOptions(pod, container).GetType() != "" || !privileged && !s.free(pod))
}

// free reports whether the pod is in the node's PID, IPC or network namespace,
// for which container types are not made.
func (s *SELinux) free(pod *cri.PodSandboxConfig) bool {
	options := pod.GetLinux().GetSecurityContext().GetNamespaceOptions()
	return options.GetPid() == cri.NamespaceMode_NODE || options.GetIpc() == cri.NamespaceMode_NODE ||
		options.GetNetwork() == cri.NamespaceMode_NODE && !s.HostNetwork
}

// Relabels returns the host paths of mounts that must get the container's file
// context (CRI: Mount.selinux_relabel).
func Relabels(container *cri.ContainerConfig) []string {
	var paths []string
	for _, m := range container.GetMounts() {
		if m.GetSelinuxRelabel() && m.GetHostPath() != "" {
			paths = append(paths, m.GetHostPath())
		}
	}
	return paths
}

// seLinuxLabels writes the context of the process and that of the file systems
// that the runtime mounts.
func seLinuxLabels(in *Input, s *specs.Spec) error {
	policy := in.Defaults.SELinux
	if policy == nil || !in.takesSELinux() {
		return nil
	}
	options, level := seLinuxOptions(in.Request.Pod, in.Request.Container), in.Facts.SELinuxLevel
	context := selinux.At(policy.Process, level)
	switch {
	case in.privileged() || policy.free(in.Request.Pod):
		if context = policy.Privileged; context == "" && options.GetType() != "" {
			context = policy.Process
		}
	case in.Facts.VirtualMachine:
		context = selinux.At(policy.KVM, level)
	case initSystem(s.Process.Args):
		context = selinux.At(policy.Init, level)
	}
	s.Process.SelinuxLabel = selinux.With(context, options.GetUser(), options.GetRole(), options.GetType(), options.GetLevel())
	var err error
	s.Linux.MountLabel, err = policy.FileContext(level, in.Request.Pod, in.Request.Container)
	return err
}

// takesSELinux reports whether the handler can set a context: gVisor refuses
// any.
func (in *Input) takesSELinux() bool {
	if f := in.linuxFeatures(); f != nil && f.Selinux != nil && f.Selinux.Enabled != nil {
		return *f.Selinux.Enabled
	}
	return !in.Facts.OwnKernel || in.Facts.VirtualMachine
}

// initSystem reports whether a container runs an init system, which needs more
// rights than other programs (it mounts, and writes to its cgroup).
func initSystem(args []string) bool {
	if len(args) == 0 {
		return false
	}
	switch path.Clean(args[0]) {
	case "init", "/init", "/sbin/init", "/usr/sbin/init", "/usr/local/sbin/init",
		"systemd", "/lib/systemd/systemd", "/usr/lib/systemd/systemd", "/bin/systemd", "/usr/bin/systemd":
		return true
	}
	return false
}
