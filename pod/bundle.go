package pod

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"

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
	"github.com/crius-run/crius/pod/blueprint"
	"github.com/crius-run/crius/pod/files"
	"github.com/crius-run/crius/pod/hostpath"
	"github.com/crius-run/crius/pod/profile"
	"github.com/crius-run/crius/storage"
)

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
	defaults, err := defaultsOf(handler, s.plan.Handler, s.engine.planner.Defaults)
	if err != nil {
		return spec.Input{}, err
	}
	facts := blueprint.PodFacts{
		ID: s.ID, Plan: &s.plan, Files: s.files, Handler: handler, Abilities: abilities,
		Asked: asked, Defaults: defaults, Hostname: hostname,
	}
	if infra := s.Now().infra; infra != nil && s.plan.Sandboxed {
		facts.InfraPID = infra.PID()
	}
	return s.engine.planner.Spec(facts), nil
}

// asked is what the pod asks for by annotations, as far as the configuration allows it
// now.
func (s *Sandbox) asked() (annotation.Asked, error) {
	return s.engine.planner.Asked(&s.plan, s.runtime.Handler())
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
	in.Asked.Resources = asked.Resources(cfg.GetMetadata().GetName(), c.Now().Resources.M)
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
	holder := c.sandbox.Now().infra
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
		return nil, fmt.Errorf("target container %s is in another pod: %w", target.ID, fault.Invalid)
	}
	if view := target.View(); view.State != cri.ContainerState_CONTAINER_RUNNING || view.PID == 0 {
		return nil, fmt.Errorf("target container %s is not running: %w", target.ID, fault.Precondition)
	}
	return target.Now().task, nil
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
