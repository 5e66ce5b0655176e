package spec

import (
	"path"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/selinux"
)

// SELinux is how the node separates pods by SELinux.
type SELinux struct {
	selinux.Contexts
	// HostNetwork: containers on the node's network are confined as well.
	HostNetwork bool
}

// FileContext is the context of the files of a pod with this level, and of a container
// of it, which may be nil: the file type of containers, at their level. A nil receiver,
// a node without SELinux, has none. Options that cannot be part of a context are
// fault.Invalid.
func (s *SELinux) FileContext(level string, pod *cri.PodSandboxConfig, container *cri.ContainerConfig) (string, error) {
	if s == nil {
		return "", nil
	}
	options := seLinuxOptions(pod, container)
	for name, value := range map[string]string{
		"user": options.GetUser(), "role": options.GetRole(), "type": options.GetType(), "level": options.GetLevel(),
	} {
		// What is in it becomes part of a mount option.
		if len(value) > maxContextPart || strings.ContainsFunc(value, notInContexts) || name != "level" && strings.ContainsAny(value, ":,") {
			return "", invalid("selinux_options: %s %.80q cannot be part of an SELinux context", name, value)
		}
	}
	return selinux.At(selinux.At(s.File, level), options.GetLevel()), nil
}

// maxContextPart bounds a part of a context: a level with all 1024 categories, one by
// one, has less.
const maxContextPart = 8 << 10

func notInContexts(r rune) bool {
	letter := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
	return !letter && !strings.ContainsRune("_.-:,", r)
}

// seLinuxOptions are the container's, or those of its pod where it brings none.
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

// free tells whether the pod is in the node's PID, IPC or network namespace, which
// the types of containers are not made for.
func (s *SELinux) free(pod *cri.PodSandboxConfig) bool {
	options := pod.GetLinux().GetSecurityContext().GetNamespaceOptions()
	return options.GetPid() == cri.NamespaceMode_NODE || options.GetIpc() == cri.NamespaceMode_NODE ||
		options.GetNetwork() == cri.NamespaceMode_NODE && !s.HostNetwork
}

// Relabels are the host paths of mounts that are to get the container's file context
// (CRI: Mount.selinux_relabel).
func Relabels(container *cri.ContainerConfig) []string {
	var paths []string
	for _, m := range container.GetMounts() {
		if m.GetSelinuxRelabel() && m.GetHostPath() != "" {
			paths = append(paths, m.GetHostPath())
		}
	}
	return paths
}

// seLinuxLabels gives the process its context, and the runtime that of the file
// systems that it mounts.
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

// takesSELinux tells whether the handler can set a context: gVisor refuses any.
func (in *Input) takesSELinux() bool {
	if f := in.linuxFeatures(); f != nil && f.Selinux != nil && f.Selinux.Enabled != nil {
		return *f.Selinux.Enabled
	}
	return !in.Facts.OwnKernel || in.Facts.VirtualMachine
}

// initSystem tells whether a container runs an init system, which does what others may
// not (it mounts, and writes to its cgroup).
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
