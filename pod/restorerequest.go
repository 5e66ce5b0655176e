package pod

import (
	"encoding/json"
	"fmt"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/pod/blueprint"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/storage/checkpoint"
)

// restoreRequest returns, as JSON, the request that would make the pod and these containers again, as they are now:
// with the limits in force.
func (s *Sandbox) restoreRequest(containers []*Container) ([]byte, error) {
	now := s.Now()
	req := &cri.RestorePodRequest{
		RuntimeHandler: s.plan.Handler,
		Config:         records.Pod{PodPlan: s.plan, PodState: now.PodState}.Current(),
	}
	for _, c := range containers {
		cfg := proto.CloneOf(c.plan.Config.M)
		if limits := c.Now().Resources.M; cfg.GetLinux() != nil && !proto.Equal(limits, blueprint.FirstLimits(&c.plan)) {
			cfg.Linux.Resources = limits // by updates
		}
		req.ContainerConfigs = append(req.ContainerConfigs, cfg)
	}
	return json.Marshal(records.Message[*cri.RestorePodRequest]{M: req})
}

// ReadRestoreRequest returns the request by which the pod of a checkpoint would be made again, with all its
// containers. The checkpoint signs for it. It has no path yet, and images are those of the checkpoint.
func ReadRestoreRequest(source *checkpoint.Source) (*cri.RestorePodRequest, error) {
	text, err := source.Request()
	if err != nil {
		return nil, err
	}
	req := new(cri.RestorePodRequest)
	// A field that is not known here may restrict the container: nothing is left out.
	if err := protojson.Unmarshal(text, req); err != nil {
		return nil, fmt.Errorf("%s (written by a later crius?): %w: %w", checkpoint.Request, err, fault.Precondition)
	}
	for _, c := range req.GetContainerConfigs() {
		part, ok := source.Part(c.GetMetadata().GetName())
		if !ok || len(req.ContainerConfigs) != len(source.Manifest.Containers) {
			return nil, fmt.Errorf("%s has other containers than the checkpoint: %w", checkpoint.Request, fault.Invalid)
		}
		if c.Image == nil {
			c.Image = &cri.ImageSpec{}
		}
		c.Image.Image = part.ImageID
	}
	return req, nil
}
