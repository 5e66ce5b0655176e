package pod

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/internal/regular"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/spec"
)

// validatePod refuses what can never work before anything is made.
func (c *Config) validatePod(cfg *cri.PodSandboxConfig) error {
	if err := spec.ValidatePod(cfg); err != nil {
		return err
	}
	if err := spec.CheckPodSeccomp(cfg.GetLinux().GetSecurityContext()); err != nil {
		return err
	}
	if _, err := resolvConf(cfg.GetDnsConfig()); err != nil {
		return err
	}
	_, err := spec.CgroupsPath(c.CgroupDriver, spec.CgroupPrefix, c.cgroupParent(cfg), "0")
	return err
}

// needsInfra reports whether the pod needs a container of its own: the first
// process of a PID namespace that its containers share.
func needsInfra(cfg *cri.PodSandboxConfig) bool {
	return cfg.GetLinux().GetSecurityContext().GetNamespaceOptions().GetPid() == cri.NamespaceMode_POD
}

func (c *Config) cgroupParent(cfg *cri.PodSandboxConfig) string {
	if parent := cmp.Or(cfg.GetLinux().GetCgroupParent(), c.CgroupParent); parent != "" {
		return parent
	}
	if c.CgroupDriver == "systemd" {
		return "system.slice"
	}
	return "/crius"
}

func (e *Engine) sysctlsOf(cfg *cri.PodSandboxConfig) map[string]string {
	// validatePod has refused what Sysctls could.
	sysctls, _ := spec.Sysctls(e.defaults.Sysctls, cfg)
	return sysctls
}

func (s *Sandbox) shmDir() string { return filepath.Join(s.runDir(), "shm") }

// filesDir has the files that the pod's containers see and may write to.
func (s *Sandbox) filesDir() string {
	if !s.plan.OwnFiles {
		return s.runDir()
	}
	return filepath.Join(s.runDir(), "files")
}

func (s *Sandbox) resolvConfFile() string { return filepath.Join(s.filesDir(), "resolv.conf") }
func (s *Sandbox) hostnameFile() string   { return filepath.Join(s.filesDir(), "hostname") }

func (s *Sandbox) makeRunDir(context.Context) error {
	return errors.Join(os.Mkdir(s.runDir(), 0o700), s.letIn(s.runDir()))
}

// mountShm makes the /dev/shm of the pod's IPC namespace; the node's own goes
// with the node's namespace.
func (s *Sandbox) mountShm(context.Context) error {
	label, err := s.fileContext()
	if err != nil {
		return err
	}
	asked, err := s.asked()
	if err != nil {
		return err
	}
	if err := mount.Shm(s.shmDir(), cmp.Or(asked.ShmSize, s.engine.cfg.ShmSize), label); err != nil {
		return err
	}
	return s.give(s.shmDir())
}

// mountFiles makes room for the pod's files that its containers can use up
// without harm to the node (CVE-2020-8557).
func (s *Sandbox) mountFiles(context.Context) error {
	label, err := s.fileContext()
	if err != nil {
		return err
	}
	return errors.Join(mount.Files(s.filesDir(), label), s.letIn(s.filesDir()))
}

// writeFiles makes the files that the pod's containers see.
func (s *Sandbox) writeFiles(context.Context) error {
	cfg := s.plan.Config.M
	if dir := cfg.GetLogDirectory(); dir != "" {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	text, err := resolvConf(cfg.GetDnsConfig())
	if err != nil {
		return err
	}
	if err := os.WriteFile(s.resolvConfFile(), text, 0o644); err != nil {
		return err
	}
	hostname, err := s.hostname()
	if err != nil {
		return err
	}
	if err := os.WriteFile(s.hostnameFile(), []byte(hostname+"\n"), 0o644); err != nil {
		return err
	}
	return s.give(s.resolvConfFile(), s.hostnameFile())
}

// give makes the root of the pod's user namespace the owner of files that its
// containers see.
func (s *Sandbox) give(files ...string) error {
	uid, gid := s.plan.Namespaces.Root()
	if uid == 0 && gid == 0 {
		return nil
	}
	for _, file := range files {
		if err := os.Chown(file, uid, gid); err != nil {
			return err
		}
	}
	return nil
}

// letIn lets the root of the pod's user namespace pass through a directory of
// ours, and do nothing else there: runtimes set up a container's mounts as that
// root.
func (s *Sandbox) letIn(dir string) error {
	_, gid := s.plan.Namespaces.Root()
	if gid == 0 {
		return nil
	}
	return errors.Join(os.Chown(dir, 0, gid), os.Chmod(dir, 0o710))
}

// hostname is the pod's, or the node's for a pod that shares its network.
func (s *Sandbox) hostname() (string, error) {
	if s.plan.Namespaces.UTS && s.plan.Namespaces.Hostname != "" {
		return s.plan.Namespaces.Hostname, nil
	}
	return os.Hostname()
}

// maxResolvConf leaves room for a pod's other files, and for those who rewrite it.
const maxResolvConf = 256 << 10

// resolvConf is exactly what dns_config says, or the node's file where the
// request leaves DNS open.
func resolvConf(dns *cri.DNSConfig) ([]byte, error) {
	if dns == nil {
		text, err := regular.Read("/etc/resolv.conf", maxResolvConf)
		if errors.Is(err, os.ErrNotExist) {
			return nil, nil
		}
		return text, err
	}
	var text strings.Builder
	for _, server := range dns.GetServers() {
		fmt.Fprintf(&text, "nameserver %s\n", server)
	}
	if searches := dns.GetSearches(); len(searches) > 0 {
		fmt.Fprintf(&text, "search %s\n", strings.Join(searches, " "))
	}
	if options := dns.GetOptions(); len(options) > 0 {
		fmt.Fprintf(&text, "options %s\n", strings.Join(options, " "))
	}
	for _, list := range [][]string{dns.GetServers(), dns.GetSearches(), dns.GetOptions()} {
		for _, word := range list {
			if strings.ContainsAny(word, " \t\r\n\x00") {
				return nil, fmt.Errorf("dns_config: %.80q has white space in it: %w", word, fault.Invalid)
			}
		}
	}
	if text.Len() > maxResolvConf {
		return nil, fmt.Errorf("dns_config: the resolv.conf has %d bytes, more than %d: %w", text.Len(), maxResolvConf, fault.Invalid)
	}
	return []byte(text.String()), nil
}

// makeNamespaces makes and pins the namespaces that the containers share. No
// process is needed to hold them.
func (s *Sandbox) makeNamespaces(context.Context) error {
	n := s.plan.Namespaces
	if !n.Net && !n.IPC && !n.UTS && len(n.UIDs) == 0 {
		return nil
	}
	_, err := ns.Create(n)
	return err
}

// infraRef is the pod's own container. It bears the pod's id.
func (s *Sandbox) infraRef() oci.Ref {
	ref := oci.Ref{
		ID:       s.id,
		Dir:      filepath.Join(s.runDir(), "infra"),
		ExitFile: filepath.Join(s.runDir(), "infra-exit.json"),
	}
	if cfg := s.plan.Config.M; cfg != nil {
		ref.CgroupPath, ref.Cgroup, _ = s.engine.cfg.cgroupOf(cfg, s.plan.CgroupPrefix, s.id)
	}
	return ref
}

// cgroupOf is where a container of the pod lives: as the runtime wants it
// named, and below the cgroup mount. An empty prefix is crius's own.
func (c *Config) cgroupOf(cfg *cri.PodSandboxConfig, prefix, id string) (path, cgroupfs string, err error) {
	path, err = spec.CgroupsPath(c.CgroupDriver, cmp.Or(prefix, spec.CgroupPrefix), c.cgroupParent(cfg), id)
	if err != nil {
		return "", "", err
	}
	cgroupfs, err = spec.CgroupfsPath(c.CgroupDriver, path)
	return path, cgroupfs, err
}

func (s *Sandbox) makeNetworkCgroup(context.Context) error { return cgroup.Make(s.infraRef().Cgroup) }

// pausePath is where the infra container sees its program.
const pausePath = "/pause"

// startInfra runs the pod's own container if it needs one. Its program is the
// monitor's binary, mounted read-only over an empty root: no image is pulled
// for it, and none can be missing.
func (s *Sandbox) startInfra(ctx context.Context) error {
	defer cgroup.Warm()()
	ref := s.infraRef()
	err := trace.Call(ctx, "make infra directory", func() error {
		label, err := s.fileContext()
		if err != nil {
			return err
		}
		return errors.Join(os.MkdirAll(ref.Rootfs(), 0o755), os.Chmod(ref.Rootfs(), 0o755), setLabel(ref.Rootfs(), label),
			s.give(ref.Rootfs()), s.letIn(ref.Dir))
	})
	if err != nil {
		return err
	}
	in, err := s.specInput(ctx)
	if err != nil {
		return err
	}
	in.Facts.Rootfs = ref.Rootfs()
	in.Facts.CgroupsPath = ref.CgroupPath
	ociSpec, err := spec.Sandbox(in, []string{pausePath, "pause"})
	if err != nil {
		return err
	}
	ociSpec.Mounts = append(ociSpec.Mounts, oci.ReadOnlyFile(s.engine.pauseProgram(), pausePath))
	if err := s.addHooks(ctx, nil, ociSpec); err != nil {
		return err
	}
	task, err := trace.Get(ctx, "runtime create", func(ctx context.Context) (oci.Task, error) {
		return s.runtime.Create(ctx, ref, ociSpec, oci.IO{})
	})
	if task != nil {
		s.change(func(now *livePod) { now.infra, now.unreachable = task, false })
	}
	if err != nil {
		return err
	}
	if err := trace.Do(ctx, "runtime start", task.Start); err != nil {
		return err
	}
	s.engine.background.Go("watch infra container", func() { s.watchInfra(task) })
	return nil
}

// watchInfra ends the pod when its infra container dies: with it the PID
// namespace is gone, and all containers in it are dead or dying.
func (s *Sandbox) watchInfra(task oci.Task) {
	s.engine.background.Insist("watch infra container", func() { s.awaitInfra(task) })
}

func (s *Sandbox) awaitInfra(task oci.Task) {
	select {
	case <-s.engine.background.Closing().Done():
		return
	case <-s.ending.Done():
		return
	case <-task.Exited():
	}
	slog.Warn("infra container died, pod not ready", "pod", s.id)
	s.end()
	s.publish()
	s.tell()
}
