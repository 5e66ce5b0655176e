package pod

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/cdi"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/pod/files"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/storage"
)

// planContainer is the first record of a container: all that is known without
// having made anything.
func (e *Engine) planContainer(id string, s *Sandbox, cfg *cri.ContainerConfig, image *storage.Image) (records.ContainerPlan, error) {
	logPath, err := files.LogPath(s.plan.Config.M, cfg)
	if err != nil {
		return records.ContainerPlan{}, err
	}
	if err := s.enoughMemory(cfg.GetLinux().GetResources()); err != nil {
		return records.ContainerPlan{}, err
	}
	imageSignal := ""
	if image.Config != nil {
		imageSignal = image.Config.StopSignal
	}
	number, signal, err := spec.StopSignal(cfg.GetStopSignal(), imageSignal)
	if err != nil {
		return records.ContainerPlan{}, err
	}
	cgroupsPath, cgroup, err := e.cfg.cgroupOf(s.plan.Config.M, e.cfg.CgroupPrefix, id)
	if err != nil {
		return records.ContainerPlan{}, err
	}
	label, err := e.labels.Files(&s.plan, cfg)
	if err != nil {
		return records.ContainerPlan{}, err
	}
	return records.ContainerPlan{
		SandboxID:   s.id,
		Handler:     s.plan.Handler,
		Config:      records.Message[*cri.ContainerConfig]{M: cfg},
		ImageID:     image.ID,
		ImageRef:    digestedName(cfg.GetImage(), image),
		CreatedAt:   time.Now(),
		BootID:      e.boot,
		LogPath:     logPath,
		CgroupsPath: cgroupsPath,
		Cgroup:      cgroup,
		MountLabel:  label,
		StopSignal:  signal,
		StopNumber:  int(number),
	}, nil
}

// enoughMemory refuses a limit below what the runtime itself needs.
func (s *Sandbox) enoughMemory(r *cri.LinuxContainerResources) error {
	least := s.runtime.Handler().MinMemory
	if limit := r.GetMemoryLimitInBytes(); limit > 0 && limit < least {
		return fmt.Errorf("memory_limit_in_bytes %d is less than %d, the minimum for runtime handler %s: %w", limit, least, s.plan.Handler, fault.Invalid)
	}
	return nil
}

// digestedName is the image's name with its digest (CRI: image_ref): of the
// repository that the user named, if it is among the image's.
func digestedName(asked *cri.ImageSpec, image *storage.Image) string {
	name := cmp.Or(asked.GetUserSpecifiedImage(), asked.GetImage())
	repository, _, _ := strings.Cut(name, "@")
	if colon := strings.LastIndex(repository, ":"); colon > strings.LastIndex(repository, "/") {
		repository = repository[:colon]
	}
	for _, digested := range image.RepoDigests {
		if strings.HasPrefix(digested, repository+"@") {
			return digested
		}
	}
	if len(image.RepoDigests) > 0 {
		return image.RepoDigests[0]
	}
	return image.ID
}

// makeDirs makes the places that belong to the container.
func (c *Container) makeDirs() error {
	if err := os.MkdirAll(c.ref.Rootfs(), 0o700); err != nil {
		return err
	}
	if err := c.sandbox.files.LetIn(c.ref.Dir); err != nil {
		return err
	}
	if c.plan.LogPath == "" {
		return nil
	}
	return files.MakeLogDir(c.sandbox.plan.Config.M.GetLogDirectory(), c.plan.Config.M.GetLogPath())
}

// specInput is what the specs of all containers of a pod have in common.
func (s *Sandbox) specInput(ctx context.Context) (spec.Input, error) {
	abilities, err := s.runtime.Probe(ctx)
	if err != nil {
		return spec.Input{}, err
	}
	hostname, err := s.plan.Hostname()
	if err != nil {
		return spec.Input{}, err
	}
	handler := s.runtime.Handler()
	defaults, err := defaultsOf(handler, s.plan.Handler, s.engine.defaults)
	if err != nil {
		return spec.Input{}, err
	}
	asked, err := s.asked()
	if err != nil {
		return spec.Input{}, err
	}
	paths := s.plan.Namespaces.Paths()
	facts := spec.Facts{
		PodID:      s.id,
		Hostname:   hostname,
		Namespaces: spec.Namespaces{Net: paths.Net, IPC: paths.IPC, UTS: paths.UTS, User: paths.User},
		Files: spec.Files{
			ResolvConf: s.files.ResolvConf(),
			Hostname:   s.files.Hostname(),
			Shm:        "/dev/shm",
		},
		Host:     s.engine.host,
		Features: abilities.Features,
		IDMap:    abilities.IDMap,

		OwnKernel: s.plan.Sandboxed,

		VirtualMachine: s.plan.Sandboxed && handler.Type == "shim",
		SELinuxLevel:   s.plan.SELinuxLevel,
	}
	if s.plan.Namespaces.IPC {
		facts.Files.Shm = s.files.Shm()
	}
	if abilities.RecursiveReadOnly {
		facts.MountOptions = []string{"rro"}
	}
	if infra := s.now().infra; infra != nil && s.plan.Sandboxed && infra.PID() != 0 {
		// The node's namespace of that process is not what is joined: the runtime goes
		// by the path being the same for all containers.
		facts.Namespaces.PID = fmt.Sprintf("/proc/%d/ns/pid", infra.PID())
	}
	return spec.Input{
		Request:  spec.Request{Pod: s.plan.Config.M},
		Asked:    asked,
		Facts:    facts,
		Defaults: defaults,
	}, nil
}

// asked is what the pod asks for by annotations, as far as its handler allows it now.
func (s *Sandbox) asked() (spec.Asked, error) {
	return spec.ReadAsked(s.plan.Config.M.GetAnnotations(), s.runtime.Handler().AllowedAnnotations, s.engine.cfg.AllowedDevices)
}

// resolve finds out what the container's spec depends on. The root file system
// must be mounted.
func (c *Container) resolve(ctx context.Context, image *storage.Image) (spec.Input, error) {
	cfg := c.plan.Config.M
	security := cfg.GetLinux().GetSecurityContext()
	in, err := c.sandbox.specInput(ctx)
	if err != nil {
		return in, err
	}
	in.Request.Container, in.Request.Image = cfg, image.Config
	in.Facts.Rootfs, in.Facts.CgroupsPath = c.ref.Rootfs(), c.plan.CgroupsPath
	if err := checkPropagation(cfg.GetMounts()); err != nil {
		return in, err
	}
	if err := spec.CheckRootfs(c.ref.Rootfs(), cfg.GetMounts()); err != nil {
		return in, err
	}
	imageUser := ""
	if image.Config != nil {
		imageUser = image.Config.User
	}
	if in.Facts.User, err = c.lookUpUser(ctx, imageUser); err != nil {
		return in, err
	}
	if in.Facts.BindVolumes, err = c.makeVolumes(ctx, in); err != nil {
		return in, err
	}
	wanted := slices.Concat(in.Asked.Devices, cfg.GetDevices()) // of one path the last one counts
	if err := c.lookAtDevices(ctx, wanted); err != nil {
		return in, err
	}
	if in.Facts.Devices, err = spec.ResolveDevices(wanted); err != nil {
		return in, fmt.Errorf("resolve devices: %w", err)
	}
	if security.GetPrivileged() {
		if in.Facts.HostDevices, err = spec.HostDevices(); err != nil {
			return in, fmt.Errorf("list the node's devices: %w", err)
		}
	}
	if in.Facts.Seccomp, err = spec.ResolveSeccomp(security); err != nil {
		return in, fmt.Errorf("load seccomp profile: %w", err)
	}
	return in, nil
}

// holdPIDNamespace sets the path of the PID namespace that the container shares with
// another container, if it does. Until release the path stays valid even if the pid is
// reused.
func (c *Container) holdPIDNamespace(in *spec.Input) (release func(), err error) {
	holder := c.sandbox.now().infra
	if options := c.plan.Config.M.GetLinux().GetSecurityContext().GetNamespaceOptions(); options.GetPid() == cri.NamespaceMode_TARGET {
		if holder, err = c.target(options.GetTargetId()); err != nil {
			return nil, err
		}
	}
	if holder == nil || c.sandbox.plan.Sandboxed {
		return func() {}, nil
	}
	file, err := holder.PIDNamespace()
	if err != nil {
		return nil, fmt.Errorf("join PID namespace: %w", err)
	}
	in.Facts.Namespaces.PID = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), file.Fd())
	return func() { file.Close() }, nil
}

// lookUpUser resolves the user that the container runs as, and adds entries to
// passwd and group if they are missing. It reads files of the image into memory, so only
// a few containers do this at the same time.
func (c *Container) lookUpUser(ctx context.Context, imageUser string) (spec.Identity, error) {
	select {
	case c.engine.userLookups <- struct{}{}:
		defer func() { <-c.engine.userLookups }()
	case <-ctx.Done():
		return spec.Identity{}, context.Cause(ctx)
	}
	user, err := spec.ResolveUser(c.ref.Rootfs(), c.plan.Config.M.GetLinux().GetSecurityContext(), imageUser)
	if err != nil {
		return user, fmt.Errorf("resolve user: %w", err)
	}
	if err := trace.Call(ctx, "name user", func() error { return c.nameUser(user) }); err != nil {
		return user, fmt.Errorf("add the user to /etc/passwd and /etc/group: %w", err)
	}
	return user, nil
}

// lookAtDevices accesses the paths of the container's devices in a separate process
// before the server does, since the access may hang.
func (c *Container) lookAtDevices(ctx context.Context, devices []*cri.Device) error {
	var paths []string
	for _, d := range devices {
		paths = append(paths, d.GetHostPath())
	}
	wanted, err := cdi.Devices(c.plan.Config.M)
	if err != nil {
		return err
	}
	if len(wanted) > 0 {
		paths = append(paths, c.engine.cfg.CDISpecDirs...)
	}
	paths = slices.DeleteFunc(paths, func(p string) bool { return !valid(p) })
	if _, err := c.engine.paths.Look(ctx, paths); err != nil {
		return fmt.Errorf("check devices: %w", err)
	}
	return nil
}

// nameUser gives the user and group that the container runs as a name in its
// root file system, if they have none: many programs ask for that of their own
// user, and a cluster that allots user ids cannot put them into images.
func (c *Container) nameUser(user spec.Identity) error {
	home := cmp.Or(c.plan.Config.M.GetWorkingDir(), "/")
	return errors.Join(
		spec.AddAccount(c.ref.Rootfs(), "/etc/passwd", user.PasswdLine(home)),
		spec.AddAccount(c.ref.Rootfs(), "/etc/group", user.GroupLine()),
	)
}

// io says what the container's streams are.
func (c *Container) io() oci.IO {
	cfg := c.plan.Config.M
	return oci.IO{
		LogFile:   c.plan.LogPath,
		LogDir:    filepath.Clean(c.sandbox.plan.Config.M.GetLogDirectory()),
		Terminal:  cfg.GetTty(),
		Stdin:     cfg.GetStdin(),
		StdinOnce: cfg.GetStdinOnce(),
	}
}

// sources starts to check the host paths of the container's mounts in the background.
// ensure waits for that, creates missing directories (as other runtimes do; hostPath
// volumes of type "" rely on it) and relabels for SELinux the paths that request it. The
// caller must always call stop.
func (c *Container) sources(ctx context.Context) (ensure func() error, stop func()) {
	var wanted, absent []string
	for _, m := range c.plan.Config.M.GetMounts() {
		source := path.Clean(m.GetHostPath())
		if valid(source) && !slices.Contains(c.engine.cfg.RejectMissingMounts, source) {
			wanted = append(wanted, source)
		}
	}
	relabel := func() error { return c.engine.labels.Relabel(ctx, c.engine.paths, &c.sandbox.plan, &c.plan) }
	if len(wanted) == 0 {
		return relabel, func() {}
	}
	looking, cancel := context.WithCancel(ctx)
	var group errgroup.Group
	group.Go(func() error {
		return trace.Do(looking, "look at host paths", func(ctx context.Context) (err error) {
			absent, err = c.engine.paths.Absent(ctx, wanted)
			return err
		})
	})
	ensure = func() error {
		err := group.Wait()
		if err == nil && len(absent) > 0 {
			err = trace.Do(ctx, "make missing host paths", func(ctx context.Context) error {
				return c.engine.paths.MakeDirs(ctx, absent)
			})
		}
		if err != nil {
			return err
		}
		return relabel()
	}
	return ensure, func() {
		cancel()
		_ = group.Wait()
	}
}

// valid tells what may be looked at from what will be refused.
func valid(hostPath string) bool {
	return path.IsAbs(hostPath) && !strings.ContainsRune(hostPath, 0)
}

// explainCreate adds to the failure of a create what is known of the request's
// host paths: that one is missing and was not to be made, or that some lie on
// file servers, if the runtime did not end in time.
func (e *Engine) explainCreate(ctx context.Context, mounts []*cri.Mount, cause error) error {
	if errors.Is(cause, fault.Timeout) {
		if suspects := onServers(mounts); len(suspects) > 0 {
			return fmt.Errorf("%w; check that the file server of %s is reachable", cause, strings.Join(suspects, ", "))
		}
		return cause
	}
	for _, m := range mounts {
		source := path.Clean(m.GetHostPath())
		if m.GetHostPath() == "" || !slices.Contains(e.cfg.RejectMissingMounts, source) {
			continue
		}
		// One that does not answer is not missing.
		if absent, _ := e.paths.Look(context.WithoutCancel(ctx), []string{source}); len(absent) > 0 {
			return fmt.Errorf("host path %s does not exist, and pod.reject_missing_mounts keeps crius from creating it: %w (%w)", source, fault.Precondition, cause)
		}
	}
	return cause
}

// onServers are the host paths whose file systems some other machine or process
// serves, as the mount table tells: none of them is touched.
func onServers(mounts []*cri.Mount) []string {
	var served []string
	for _, m := range mounts {
		if m.GetHostPath() == "" {
			continue
		}
		on, err := mount.Of(m.GetHostPath())
		if err != nil {
			continue
		}
		kind, _, _ := strings.Cut(on.Type, ".") // fuse.sshfs
		if slices.Contains([]string{"fuse", "fuseblk", "nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "virtiofs", "glusterfs", "lustre", "afs", "ocfs2", "gfs2"}, kind) {
			served = append(served, fmt.Sprintf("%s (%s)", m.GetHostPath(), on.Type))
		}
	}
	return served
}

// checkPropagation refuses a mount whose source cannot do what is asked of it:
// without a shared (or, in one direction, slave) mount underneath, nothing would
// propagate, and the pod would find out much later.
func checkPropagation(mounts []*cri.Mount) error {
	for _, m := range mounts {
		if m.GetPropagation() == cri.MountPropagation_PROPAGATION_PRIVATE || m.GetHostPath() == "" {
			continue
		}
		source, err := mount.Of(m.GetHostPath())
		if err != nil {
			return fmt.Errorf("read mount table: %w", err)
		}
		oneWay := m.GetPropagation() == cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER
		if !source.Shared && !(oneWay && source.Slave) {
			return fmt.Errorf("mount of %s requires %s, but %s is a private mount; run mount --make-shared on it: %w",
				m.GetHostPath(), m.GetPropagation(), source.Point, fault.Invalid)
		}
	}
	return nil
}

// target is another running container of the same pod.
func (c *Container) target(id string) (oci.Task, error) {
	target, err := c.engine.containers.Find(id)
	if err != nil {
		return nil, fmt.Errorf("target container: %w", err)
	}
	if c.sandbox.plan.Sandboxed {
		return nil, fmt.Errorf("runtime handler %s cannot join the PID namespace of one container; use a pod that shares its process namespace: %w", c.plan.Handler, fault.Unimplemented)
	}
	if target.sandbox != c.sandbox {
		return nil, fmt.Errorf("target container %s is in another pod: %w", target.id, fault.Invalid)
	}
	if view := target.view.Load(); view.State != cri.ContainerState_CONTAINER_RUNNING || view.PID == 0 {
		return nil, fmt.Errorf("target container %s is not running: %w", target.id, fault.Precondition)
	}
	return target.now().task, nil
}
