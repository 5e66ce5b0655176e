package blueprint

import (
	"cmp"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/annotation"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/oci/tuning"
	"github.com/crius-run/crius/pod/files"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/storage"
)

// ContainerRequest is a request for a container of a pod.
type ContainerRequest struct {
	ID      string
	PodID   string
	Pod     *records.PodPlan
	Handler oci.Handler // the pod's
	Config  *cri.ContainerConfig
	Image   *storage.Image
	At      time.Time
	Labels  Labels
	Tuner   Tuner
}

// Container plans a container, except for its image volumes.
func (p *Planner) Container(r ContainerRequest) (records.ContainerPlan, error) {
	logPath, err := files.LogPath(r.Pod.Config.M, r.Config)
	if err != nil {
		return records.ContainerPlan{}, err
	}
	if err := EnoughMemory(r.Handler, r.Pod.Handler, r.Config.GetLinux().GetResources()); err != nil {
		return records.ContainerPlan{}, err
	}
	asked, err := p.Asked(r.Pod, r.Handler)
	if err != nil {
		return records.ContainerPlan{}, err
	}
	layerSize, err := r.layerSize(asked)
	if err != nil {
		return records.ContainerPlan{}, err
	}
	imageSignal := ""
	if r.Image.Config != nil {
		imageSignal = r.Image.Config.StopSignal
	}
	number, signal, err := spec.StopSignal(r.Config.GetStopSignal(), imageSignal)
	if err != nil {
		return records.ContainerPlan{}, err
	}
	cgroupsPath, cgroup, err := p.Cgroup(r.Pod.Config.M, p.CgroupPrefix, r.ID)
	if err != nil {
		return records.ContainerPlan{}, err
	}
	label, err := r.Labels.Files(r.Pod, r.Config)
	if err != nil {
		return records.ContainerPlan{}, err
	}
	plan := records.ContainerPlan{
		SandboxID:   r.PodID,
		Handler:     r.Pod.Handler,
		Config:      records.Message[*cri.ContainerConfig]{M: r.Config},
		ImageID:     r.Image.ID,
		ImageRef:    imageRef(r.Config.GetImage(), r.Image),
		CreatedAt:   r.At,
		BootID:      p.Boot,
		LogPath:     logPath,
		CgroupsPath: cgroupsPath,
		Cgroup:      cgroup,
		MountLabel:  label,
		Workload:    records.Message[*cri.LinuxContainerResources]{M: asked.Workload(r.Config.GetMetadata().GetName(), r.Config.GetLinux().GetResources())},
		StopSignal:  signal,
		StopNumber:  int(number),
		Origin:      r.Pod.Origin,
		Foreign:     r.Image.Foreign,

		WritableSize: layerSize,
	}
	if err := r.tune(&plan, asked); err != nil {
		return records.ContainerPlan{}, err
	}
	return plan, nil
}

// layerSize returns the size that the container's annotation asks for, or else the pod's. containerd
// reads the container's alone, which users of Kubernetes cannot set.
func (r *ContainerRequest) layerSize(asked annotation.Asked) (int64, error) {
	const key = annotation.LayerSizeKey
	text, requested := r.Config.GetAnnotations()[key]
	if requested && slices.Contains(r.Handler.AllowedContainerAnnotations, key) {
		size, err := annotation.ParseLayerSize(text)
		if err != nil {
			return 0, fmt.Errorf("annotation %s of the container: %w", key, err)
		}
		return size, nil
	}
	if requested {
		slog.Warn("annotation of the container has no effect: allowed_container_annotations of the handler does not name it",
			"pod", r.PodID, "container", r.ID, "handler", r.Pod.Handler, "annotation", key)
	}
	return asked.LayerSize(r.Config.GetMetadata().GetName()), nil
}

// tune plans what is done for the container's CPUs. The CPUs of a runtime sandbox are those of its
// own kernel.
func (r *ContainerRequest) tune(plan *records.ContainerPlan, asked annotation.Asked) error {
	name := r.Config.GetMetadata().GetName()
	wishes := asked.TuningOf(name)
	var limits *cri.LinuxContainerResources
	if !r.Pod.Sandboxed {
		var err error
		plan.Tuning, limits, err = r.Tuner.Plan(tuning.Container{
			Name:         name,
			CgroupParent: r.Pod.Config.M.GetLinux().GetCgroupParent(),
			Limits:       FirstLimits(plan),
			Wishes:       wishes,
			PinExecs:     r.Handler.ExecCPUAffinity == oci.FirstCPU,
		})
		if err != nil {
			return err
		}
	}
	if plan.Tuning == nil && wishes.Any() {
		slog.Info("annotations for CPUs have no effect on a container without CPUs of its own", "pod", r.PodID, "name", name)
	}
	if limits != nil {
		plan.Workload.M = MergeLimits(plan.Workload.M, limits)
	}
	return nil
}

// imageRef returns the image's name with its digest (CRI: image_ref), preferably in the
// repository that the request names.
func imageRef(asked *cri.ImageSpec, image *storage.Image) string {
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

// IO returns what the streams of the container id are.
func IO(id string, pod *records.PodPlan, c *records.ContainerPlan) oci.IO {
	cfg := c.Config.M
	return oci.IO{
		LogFile:       c.LogPath,
		LogDir:        filepath.Clean(pod.Config.M.GetLogDirectory()),
		JournalFields: oci.JournalFields(id, pod.Config.M.GetMetadata(), cfg.GetMetadata()),
		Terminal:      cfg.GetTty(),
		Stdin:         cfg.GetStdin(),
		StdinOnce:     cfg.GetStdinOnce(),
	}
}
