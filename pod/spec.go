package pod

import (
	"context"
	"maps"
	"slices"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/lsm"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/nri"
	"github.com/crius-run/crius/oci/cdi"
	"github.com/crius-run/crius/oci/classes"
	"github.com/crius-run/crius/oci/hooks"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/pod/profile"
)

// makeSpec makes the container's spec, including what is installed on the node for all
// containers or was requested by name. Only NRI plugins change it further.
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
	spec.ShowMappings(&in, ociSpec)
	devices, err := cdi.Devices(in.Request.Container)
	if err != nil {
		return nil, err
	}
	if err := cdi.Inject(ociSpec, c.engine.policy().CDISpecDirs, devices); err != nil {
		return nil, err
	}
	return ociSpec, c.sandbox.addHooks(ctx, in.Request.Container, ociSpec)
}

// addClasses adds the classes that annotations name to the spec of a container of the pod.
func (s *Sandbox) addClasses(ctx context.Context, request *cri.ContainerConfig, ociSpec *nri.Spec) error {
	return s.engine.classes.AddTo(ctx, ociSpec, classes.Container{
		Name: request.GetMetadata().GetName(), Annotations: request.GetAnnotations(), PodAnnotations: s.plan.Config.M.GetAnnotations(),
	})
}

// addHooks adds the hooks that are installed on the node to the spec of a container of the pod,
// or of its infra container if request is nil. It reads them each time, so that new ones take
// effect at once.
func (s *Sandbox) addHooks(ctx context.Context, request *cri.ContainerConfig, ociSpec *nri.Spec) error {
	set, err := hooks.Read(s.engine.policy().HookDirs)
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

// pulledProfile loads the profile of a registry that a security context in a pod's request names,
// from the store; nil: it names none.
func (e *Engine) pulledProfile(ctx context.Context, wanted *cri.SecurityProfile, pod *cri.PodSandboxConfig) (*spec.Profile, error) {
	return profile.Pulled(ctx, e.deps.Profiles, wanted, pod.GetMetadata().GetNamespace())
}

// seccompProfile loads the profile that the pod requests by annotation for a container whose
// request leaves it unconfined; nil: none.
func (s *Sandbox) seccompProfile(ctx context.Context, cfg *cri.ContainerConfig) (*spec.Profile, error) {
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
