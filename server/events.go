package server

import (
	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/pod/view"
)

// eventAPI is the part of RuntimeService for events.
type eventAPI struct {
	engine Engine
}

// GetContainerEvents sends events until the client leaves. A client that does
// not keep up is disconnected with ResourceExhausted: it must list and listen
// again, which the kubelet does after any error.
func (s *eventAPI) GetContainerEvents(_ *cri.GetEventsRequest, out grpc.ServerStreamingServer[cri.ContainerEventResponse]) error {
	listener, err := s.engine.Listen()
	if err != nil {
		return err
	}
	defer listener.Close()
	// So that the client knows since when it listens.
	if err := out.SendHeader(nil); err != nil {
		return err
	}
	for {
		event, err := listener.Next(out.Context())
		if err != nil {
			return err
		}
		if err := out.Send(containerEvent(event)); err != nil {
			return err
		}
	}
}

func containerEvent(e *view.Event) *cri.ContainerEventResponse {
	return &cri.ContainerEventResponse{
		ContainerId:        e.ID,
		ContainerEventType: e.Type,
		CreatedAt:          nanos(e.At),
		PodSandboxStatus:   sandboxStatus(e.Sandbox),
		ContainersStatuses: containerStatuses(e.Containers),
	}
}

func containerStatuses(views []*view.Container) []*cri.ContainerStatus {
	return translated(views, fillContainerStatus)
}
