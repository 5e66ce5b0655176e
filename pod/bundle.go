package pod

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/lsm"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/nri"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/annotation"
	"github.com/crius-run/crius/oci/cdi"
	"github.com/crius-run/crius/oci/classes"
	"github.com/crius-run/crius/oci/hooks"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/pod/files"
	"github.com/crius-run/crius/pod/hostpath"
	"github.com/crius-run/crius/pod/profile"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/storage"
)

// planContainer is the first record of a container: all that is known without
// having made anything.
func planContainer(id string, s *Sandbox, cfg *cri.ContainerConfig, image *storage.Image) (records.ContainerPlan, error) {
	e := s.engine
	logPath, err := files.LogPath(s.plan.Config.M, cfg)
	if err != nil {
		return records.ContainerPlan{}, err
	}
	if err := s.enoughMemory(cfg.GetLinux().GetResources()); err != nil {
		return records.ContainerPlan{}, err
	}
	asked, err := s.asked()
	if err != nil {
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
	plan := records.ContainerPlan{
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
		Workload:    records.Message[*cri.LinuxContainerResources]{M: asked.Workload(cfg.GetMetadata().GetName(), cfg.GetLinux().GetResources())},
		StopSignal:  signal,
		StopNumber:  int(number),
	}
	if err := s.planTuning(&plan, asked); err != nil {
		return records.ContainerPlan{}, err
	}
	return plan, nil
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

// sources are what a container's spec is made from beside its plan.
type sources struct {
	image         *storage.Image
	seccomp       *spec.Profile // that the pod asks for by annotation; nil: none
	privilegedPod bool          // what the pod's configuration says at the time of the create
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
func (s *Sandbox) specInput(ctx context.Context, asked annotation.Asked) (spec.Input, error) {
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
	defaults.AllowedAnnotations = asked.Allowed
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
		Asked:    spec.Asked{Umask: asked.Umask, WritableCgroups: asked.WritableCgroups, InfraCPUs: s.infraCPUs(asked), LogVolume: asked.LogVolume},
		Facts:    facts,
		Defaults: defaults,
	}, nil
}

// infraCPUs are those of the pod's infra container; empty: all. In one that holds a sandbox
// all containers run.
func (s *Sandbox) infraCPUs(asked annotation.Asked) string {
	if s.plan.Sandboxed {
		return asked.InfraCPUs()
	}
	return cmp.Or(asked.InfraCPUs(), s.engine.cfg.InfraCPUs)
}

// asked is what the pod asks for by annotations, as far as the configuration allows it
// now.
func (s *Sandbox) asked() (annotation.Asked, error) {
	return annotation.Read(s.plan.Config.M.GetAnnotations(), annotation.Rules{
		Allowed:   s.runtime.Handler().AllowedAnnotations,
		Devices:   s.engine.cfg.AllowedDevices,
		Workloads: s.engine.cfg.Workloads,
	})
}

// seccompProfile gets the profile that the pod asks for by annotation, for a container whose
// request leaves it unconfined; nil: none.
func seccompProfile(ctx context.Context, s *Sandbox, cfg *cri.ContainerConfig) (*spec.Profile, error) {
	asked, err := s.asked()
	if err != nil {
		return nil, err
	}
	ref := asked.SeccompProfile(cfg.GetMetadata().GetName())
	if ref == "" || !spec.LeftUnconfined(cfg.GetLinux().GetSecurityContext()) {
		return nil, nil //nolint:nilnil // see above
	}
	ctx, cancel := until(ctx, s.engine.pulling)
	defer cancel()
	return trace.Get(ctx, "load seccomp profile", func(ctx context.Context) (*spec.Profile, error) {
		return profile.Load(ctx, s.engine.deps.Images, ref, s.plan.Config.M.GetMetadata().GetNamespace())
	})
}

// resolve finds out what the container's spec depends on. The root file system
// must be mounted.
func (c *Container) resolve(ctx context.Context, image *storage.Image) (spec.Input, error) {
	cfg := c.plan.Config.M
	security := cfg.GetLinux().GetSecurityContext()
	asked, err := c.sandbox.asked()
	if err != nil {
		return spec.Input{}, err
	}
	in, err := c.sandbox.specInput(ctx, asked)
	if err != nil {
		return in, err
	}
	in.Asked.Resources = asked.Resources(cfg.GetMetadata().GetName(), c.now().Resources.M)
	in.Request.Container, in.Request.Image = cfg, image.Config
	in.Facts.Rootfs, in.Facts.CgroupsPath = c.ref.Rootfs(), c.plan.CgroupsPath
	if err := hostpath.CheckPropagation(cfg.GetMounts()); err != nil {
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
	if in.Facts.NodeMounts, err = c.copyNodeFiles(ctx, asked); err != nil {
		return in, err
	}
	wanted := slices.Concat(asked.Devices, cfg.GetDevices()) // of one path the last one counts
	cdiNames, err := cdi.Devices(cfg)
	if err != nil {
		return in, err
	}
	var cdiDirs []string
	if len(cdiNames) > 0 {
		cdiDirs = c.engine.cfg.CDISpecDirs
	}
	if err := c.engine.paths.CheckDevices(ctx, wanted, cdiDirs...); err != nil {
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
	if err := trace.Call(ctx, "add user to /etc/passwd", func() error { return nameUser(c.ref.Rootfs(), user, c.plan.Config.M.GetWorkingDir()) }); err != nil {
		return user, fmt.Errorf("add the user to /etc/passwd and /etc/group: %w", err)
	}
	return user, nil
}

// nameUser gives the user and group that the container runs as a name in its
// root file system, if they have none: many programs ask for that of their own
// user, and a cluster that allots user ids cannot put them into images.
func nameUser(rootfs string, user spec.Identity, home string) error {
	return errors.Join(
		spec.AddAccount(rootfs, "/etc/passwd", user.PasswdLine(cmp.Or(home, "/"))),
		spec.AddAccount(rootfs, "/etc/group", user.GroupLine()),
	)
}

// io says what the container's streams are.
func (c *Container) io() oci.IO {
	cfg := c.plan.Config.M
	return oci.IO{
		LogFile:       c.plan.LogPath,
		LogDir:        filepath.Clean(c.sandbox.plan.Config.M.GetLogDirectory()),
		JournalFields: oci.JournalFields(c.id, c.sandbox.plan.Config.M.GetMetadata(), cfg.GetMetadata()),
		Terminal:      cfg.GetTty(),
		Stdin:         cfg.GetStdin(),
		StdinOnce:     cfg.GetStdinOnce(),
	}
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

// makeSpec makes the container's spec, with what is installed on the node for all
// containers or was asked for by name. Only NRI plugins change it further.
func (c *Container) makeSpec(ctx context.Context, in spec.Input) (*nri.Spec, error) {
	ociSpec, err := spec.Container(in)
	if err != nil {
		return nil, err
	}
	c.plan.Tuning.AddTo(ociSpec)
	if err := c.sandbox.addClasses(ctx, in.Request.Container, ociSpec); err != nil {
		return nil, err
	}
	if profile := ociSpec.Process.ApparmorProfile; profile != "" {
		err := trace.Do(ctx, "load AppArmor profile", func(ctx context.Context) error { return lsm.Ensure(ctx, profile) })
		if err != nil {
			return nil, err
		}
	}
	devices, err := cdi.Devices(in.Request.Container)
	if err != nil {
		return nil, err
	}
	if err := cdi.Inject(ociSpec, c.engine.cfg.CDISpecDirs, devices); err != nil {
		return nil, err
	}
	return ociSpec, c.sandbox.addHooks(ctx, in.Request.Container, ociSpec)
}

// addClasses puts a container of the pod into the classes that annotations name.
func (s *Sandbox) addClasses(ctx context.Context, request *cri.ContainerConfig, ociSpec *nri.Spec) error {
	return s.engine.classes.AddTo(ctx, ociSpec, classes.Container{
		Name: request.GetMetadata().GetName(), Annotations: request.GetAnnotations(), PodAnnotations: s.plan.Config.M.GetAnnotations(),
	})
}

// addHooks gives a container of the pod, or its infra container if the request is
// nil, the hooks that are installed on the node. They are read each time, which finds
// what was installed a moment ago.
func (s *Sandbox) addHooks(ctx context.Context, request *cri.ContainerConfig, ociSpec *nri.Spec) error {
	set, err := hooks.Read(s.engine.cfg.HookDirs)
	if err != nil || len(set) == 0 {
		return err
	}
	c := hooks.Container{
		Annotations: maps.Clone(s.plan.Config.M.GetAnnotations()),
		BindMounts:  slices.ContainsFunc(request.GetMounts(), func(m *cri.Mount) bool { return m.GetHostPath() != "" }),
	}
	if c.Annotations == nil {
		c.Annotations = map[string]string{}
	}
	maps.Copy(c.Annotations, request.GetAnnotations())
	return trace.Do(ctx, "add OCI hooks", func(ctx context.Context) error { return set.Inject(ctx, ociSpec, c) })
}
