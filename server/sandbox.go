package server

import (
	"context"
	"time"

	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/pod/view"
)

// sandboxAPI is the part of RuntimeService for pods.
type sandboxAPI struct {
	engine Engine
}

func (s *sandboxAPI) RunPodSandbox(ctx context.Context, req *cri.RunPodSandboxRequest) (*cri.RunPodSandboxResponse, error) {
	if err := checkRunPodSandbox(req); err != nil {
		return nil, err
	}
	id, err := s.engine.RunSandbox(ctx, req.GetRuntimeHandler(), req.GetConfig())
	if err != nil {
		return nil, createFault(err)
	}
	return &cri.RunPodSandboxResponse{PodSandboxId: id}, nil
}

func (s *sandboxAPI) StopPodSandbox(ctx context.Context, req *cri.StopPodSandboxRequest) (*cri.StopPodSandboxResponse, error) {
	known, err := knownID("pod_sandbox_id", req.GetPodSandboxId())
	if known {
		err = s.engine.StopSandbox(ctx, req.GetPodSandboxId())
	}
	if err != nil {
		return nil, err
	}
	return &cri.StopPodSandboxResponse{}, nil
}

func (s *sandboxAPI) RemovePodSandbox(ctx context.Context, req *cri.RemovePodSandboxRequest) (*cri.RemovePodSandboxResponse, error) {
	known, err := knownID("pod_sandbox_id", req.GetPodSandboxId())
	if known {
		err = s.engine.RemoveSandbox(ctx, req.GetPodSandboxId())
	}
	if err != nil {
		return nil, err
	}
	return &cri.RemovePodSandboxResponse{}, nil
}

func (s *sandboxAPI) UpdatePodSandboxResources(ctx context.Context, req *cri.UpdatePodSandboxResourcesRequest) (*cri.UpdatePodSandboxResourcesResponse, error) {
	if err := checkUpdatePodSandboxResources(req); err != nil {
		return nil, err
	}
	if err := s.engine.UpdateSandboxResources(ctx, req.GetPodSandboxId(), req.GetOverhead(), req.GetResources()); err != nil {
		return nil, err
	}
	return &cri.UpdatePodSandboxResourcesResponse{}, nil
}

func (s *sandboxAPI) PodSandboxStatus(_ context.Context, req *cri.PodSandboxStatusRequest) (*cri.PodSandboxStatusResponse, error) {
	if err := checkID("pod_sandbox_id", req.GetPodSandboxId()); err != nil {
		return nil, err
	}
	now := time.Now() // before the lookup: anything newer is in an event
	view, err := s.engine.Sandbox(req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	containers, err := s.engine.SandboxContainers(view.ID)
	if err != nil {
		return nil, err
	}
	resp := &cri.PodSandboxStatusResponse{
		Status:             sandboxStatus(view),
		ContainersStatuses: containerStatuses(containers),
		Timestamp:          nanos(now),
	}
	if req.GetVerbose() {
		spec, _ := s.engine.PodSpec(view.ID) // missing if it cannot be read
		resp.Info, err = sandboxInfo(view, spec)
	}
	return resp, err
}

func (s *sandboxAPI) StreamPodSandboxes(req *cri.StreamPodSandboxesRequest, out grpc.ServerStreamingServer[cri.StreamPodSandboxesResponse]) error {
	sandboxes, err := s.sandboxList(req.GetFilter())
	if err != nil {
		return err
	}
	return sandboxes.send(out)
}

func (s *sandboxAPI) sandboxList(filter *cri.PodSandboxFilter) (listing, error) {
	if err := in("filter", wellFormed(filter)); err != nil {
		return nil, err
	}
	views := matching(s.engine.Sandboxes(), filter, sandboxMatches)
	return listingOf(views, func(v *view.Sandbox) *view.Memo { return v.Memo }, fillSandbox)
}
