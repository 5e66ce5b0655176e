package server

import (
	"context"

	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/server/trail"
)

// containerAPI is the part of RuntimeService for containers.
type containerAPI struct {
	engine        Engine
	trail         *trail.Trail
	maxExecOutput int // bytes of both streams of an ExecSync together
}

func (s *containerAPI) CreateContainer(ctx context.Context, req *cri.CreateContainerRequest) (*cri.CreateContainerResponse, error) {
	if err := checkCreateContainer(req); err != nil {
		return nil, err
	}
	id, err := s.engine.CreateContainer(ctx, req.GetPodSandboxId(), req.GetConfig(), req.GetSandboxConfig())
	if err != nil {
		return nil, createFault(err)
	}
	return &cri.CreateContainerResponse{ContainerId: id}, nil
}

func (s *containerAPI) StartContainer(ctx context.Context, req *cri.StartContainerRequest) (*cri.StartContainerResponse, error) {
	if err := checkID("container_id", req.GetContainerId()); err != nil {
		return nil, err
	}
	if err := s.engine.StartContainer(ctx, req.GetContainerId()); err != nil {
		return nil, err
	}
	return &cri.StartContainerResponse{}, nil
}

func (s *containerAPI) StopContainer(ctx context.Context, req *cri.StopContainerRequest) (*cri.StopContainerResponse, error) {
	grace, err := checkTimeout("timeout", req.GetTimeout())
	if err != nil {
		return nil, err
	}
	known, err := knownID("container_id", req.GetContainerId())
	if known {
		err = s.engine.StopContainer(ctx, req.GetContainerId(), grace)
	}
	if err != nil {
		return nil, err
	}
	return &cri.StopContainerResponse{}, nil
}

func (s *containerAPI) RemoveContainer(ctx context.Context, req *cri.RemoveContainerRequest) (*cri.RemoveContainerResponse, error) {
	known, err := knownID("container_id", req.GetContainerId())
	if known {
		err = s.engine.RemoveContainer(ctx, req.GetContainerId())
	}
	if err != nil {
		return nil, err
	}
	return &cri.RemoveContainerResponse{}, nil
}

func (s *containerAPI) ContainerStatus(_ context.Context, req *cri.ContainerStatusRequest) (*cri.ContainerStatusResponse, error) {
	if err := checkID("container_id", req.GetContainerId()); err != nil {
		return nil, err
	}
	view, err := s.engine.Container(req.GetContainerId())
	if err != nil {
		return nil, err
	}
	resp := &cri.ContainerStatusResponse{Status: containerStatus(view)}
	if req.GetVerbose() {
		// A container that is being removed may have lost its bundle: the rest is
		// still worth reporting.
		spec, _ := s.engine.RuntimeSpec(view.ID)
		resp.Info, err = containerInfo(view, spec)
	}
	return resp, err
}

func (s *containerAPI) StreamContainers(req *cri.StreamContainersRequest, out grpc.ServerStreamingServer[cri.StreamContainersResponse]) error {
	containers, err := s.containerList(req.GetFilter())
	if err != nil {
		return err
	}
	return containers.send(out)
}

func (s *containerAPI) containerList(filter *cri.ContainerFilter) (listing, error) {
	if err := in("filter", wellFormed(filter)); err != nil {
		return nil, err
	}
	views := matching(s.engine.Containers(), filter, containerMatches)
	return listingOf(views, func(v *view.Container) *view.Memo { return v.Memo }, fillContainer)
}

func (s *containerAPI) UpdateContainerResources(ctx context.Context, req *cri.UpdateContainerResourcesRequest) (*cri.UpdateContainerResourcesResponse, error) {
	if err := checkUpdateContainerResources(req); err != nil {
		return nil, err
	}
	if err := s.engine.UpdateContainerResources(ctx, req.GetContainerId(), req.GetLinux()); err != nil {
		return nil, err
	}
	return &cri.UpdateContainerResourcesResponse{}, nil
}

func (s *containerAPI) ReopenContainerLog(ctx context.Context, req *cri.ReopenContainerLogRequest) (*cri.ReopenContainerLogResponse, error) {
	if err := checkID("container_id", req.GetContainerId()); err != nil {
		return nil, err
	}
	entry := s.trail.Begin(ctx, trail.Request{Verb: trail.ReopenLog, ID: req.GetContainerId()})
	err := s.engine.ReopenContainerLog(ctx, req.GetContainerId())
	entry.End(nil, err)
	if err != nil {
		return nil, err
	}
	return &cri.ReopenContainerLogResponse{}, nil
}

func (s *containerAPI) ExecSync(ctx context.Context, req *cri.ExecSyncRequest) (*cri.ExecSyncResponse, error) {
	timeout, err := checkExecSync(req)
	if err != nil {
		return nil, err
	}
	entry := s.trail.Begin(ctx, trail.Request{Verb: trail.ExecSync, ID: req.GetContainerId(), Command: req.GetCmd()})
	result, err := s.engine.ExecSync(ctx, req.GetContainerId(), req.GetCmd(), timeout)
	recordExec(entry, result, err)
	if err != nil {
		return nil, err
	}
	return execReply(result, s.maxExecOutput), nil
}

func recordExec(entry *trail.Entry, result *oci.ExecResult, err error) {
	if err != nil {
		entry.End(nil, err)
		return
	}
	entry.Out(len(result.Stdout) + len(result.Stderr))
	entry.End(&result.ExitCode, nil)
}
