package pod

import (
	"context"
	"fmt"
	"os"
	"slices"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/annotation"
	"github.com/crius-run/crius/oci/cdi"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/pod/blueprint"
	"github.com/crius-run/crius/pod/hostpath"
	"github.com/crius-run/crius/storage"
)

// specInput returns what the specs of all containers of the pod have in common.
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
	defaults, err := defaultsOf(handler, s.plan.Handler, s.engine.planner().Defaults)
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
	return s.engine.planner().Spec(facts), nil
}

// asked returns what the pod asks for by annotations, as far as the configuration allows it
// now.
func (s *Sandbox) asked() (annotation.Asked, error) {
	return s.engine.planner().Asked(&s.plan, s.runtime.Handler())
}

// resolve finds out on the node what the container's spec depends on. The root file system must
// be mounted.
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
	if in.Asked.Ulimits = asked.Ulimits(cfg.GetMetadata().GetName()); len(in.Asked.Ulimits) > 0 {
		if err := spec.CheckOpenFiles(in.Asked.Ulimits, spec.MaxOpenFiles()); err != nil {
			return in, err
		}
	}
	in.Request.Container, in.Request.Image = cfg, image.Config
	in.Facts.Rootfs, in.Facts.CgroupsPath = c.ref.Rootfs(), c.plan.CgroupsPath
	in.Facts.OpenFiles = spec.OpenFiles() // an operator may change it while the server runs
	if err := hostpath.CheckPropagation(cfg.GetMounts()); err != nil {
		return in, err
	}
	if err := spec.CheckRootfs(c.ref.Rootfs(), cfg.GetMounts()); err != nil {
		return in, err
	}
	if in.Facts.User, err = c.lookUpUser(ctx, &in); err != nil {
		return in, err
	}
	if in.Facts.BindVolumes, err = c.makeVolumes(ctx, in); err != nil {
		return in, err
	}
	// After the volumes, of which one may be /run itself.
	if err := trace.Call(ctx, "mark root file system", func() error { return spec.MarkRootfs(&in) }); err != nil {
		return in, err
	}
	if in.Facts.NodeMounts, err = c.copyNodeFiles(ctx, asked); err != nil {
		return in, err
	}
	wanted := slices.Concat(asked.Devices, cfg.GetDevices()) // if a path is listed twice, the last entry counts
	cdiNames, err := cdi.Devices(cfg)
	if err != nil {
		return in, err
	}
	var cdiDirs []string
	if len(cdiNames) > 0 {
		cdiDirs = c.engine.policy().CDISpecDirs
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
	// A mount by somebody else may have changed them since the last container.
	writable := security.GetPrivileged() || security.GetCgroupMountMode() == cri.CgroupMountMode_CGROUP_MOUNT_MODE_READ_WRITE
	if writable && in.Facts.Host.CgroupV2 {
		if in.Facts.CgroupOptions, err = cgroup.Options(); err != nil {
			return in, fmt.Errorf("read the options of the node's cgroup mount: %w", err)
		}
	}
	if in.Facts.Seccomp, err = spec.ResolveSeccomp(security); err != nil {
		return in, fmt.Errorf("load seccomp profile: %w", err)
	}
	return in, nil
}

// holdPIDNamespace sets the path of the PID namespace that the container shares with another
// container, if any. Until release, the path stays valid even if the pid is reused.
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

// target returns the task of another running container of the same pod.
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
