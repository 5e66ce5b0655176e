package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/cmd/crius/cli"
)

func (p *program) eventsCommand() *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Show pods and containers and their events",
		Long: "List the pods and containers of the running server, ordered by their latest event. With --follow, continue " +
			"with new events: created, started, stopped, deleted. JSON output is one CRI ContainerEventResponse per line.",
		Args: cli.Operands,
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "show new events until interrupted")
	format := cli.FormatFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		loaded, err := p.loadForClient(cmd)
		if err != nil {
			return err
		}
		return cli.Ask(cmd.Context(), loaded.Config.API.Listen, func(ctx context.Context, server cli.Server) error {
			return showEvents(ctx, server, eventsView{follow, *format == "json", cmd.OutOrStdout()})
		})
	}
	return cmd
}

type eventsView struct {
	follow, json bool
	out          io.Writer
}

// showEvents subscribes before it lists, so that it misses no event in between.
func showEvents(ctx context.Context, server cri.RuntimeServiceClient, view eventsView) error {
	var stream cri.RuntimeService_GetContainerEventsClient
	if view.follow {
		var err error
		if stream, err = server.GetContainerEvents(ctx, &cri.GetEventsRequest{}); err != nil {
			return err
		}
		if _, err := stream.Header(); err != nil {
			return err
		}
	}
	if err := showPresent(ctx, server, view); err != nil || !view.follow {
		return err
	}
	for {
		event, err := stream.Recv()
		if ctx.Err() != nil {
			return nil //nolint:nilerr // an interrupt ends it normally
		}
		if err != nil {
			return err
		}
		if err := view.show(event); err != nil {
			return err
		}
	}
}

// showPresent shows an event for each existing pod and container: the last one that it
// would have had.
func showPresent(ctx context.Context, server cri.RuntimeServiceClient, view eventsView) error {
	pods, err := server.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return err
	}
	var events []*cri.ContainerEventResponse
	for _, item := range pods.Items {
		pod, err := server.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: item.Id})
		if err != nil {
			continue // removed since
		}
		kind := cri.ContainerEventType_CONTAINER_STARTED_EVENT
		if pod.Status.GetState() != cri.PodSandboxState_SANDBOX_READY {
			kind = cri.ContainerEventType_CONTAINER_STOPPED_EVENT
		}
		events = append(events, &cri.ContainerEventResponse{
			ContainerId: item.Id, ContainerEventType: kind, CreatedAt: item.CreatedAt, PodSandboxStatus: pod.Status, ContainersStatuses: pod.ContainersStatuses,
		})
		for _, c := range pod.ContainersStatuses {
			events = append(events, &cri.ContainerEventResponse{
				ContainerId: c.Id, ContainerEventType: lastEvent(c.State), CreatedAt: max(c.CreatedAt, c.StartedAt, c.FinishedAt),
				PodSandboxStatus: pod.Status, ContainersStatuses: pod.ContainersStatuses,
			})
		}
	}
	slices.SortStableFunc(events, func(a, b *cri.ContainerEventResponse) int { return cmp.Compare(a.CreatedAt, b.CreatedAt) })
	for _, event := range events {
		if err := view.show(event); err != nil {
			return err
		}
	}
	return nil
}

func lastEvent(state cri.ContainerState) cri.ContainerEventType {
	switch state {
	case cri.ContainerState_CONTAINER_CREATED:
		return cri.ContainerEventType_CONTAINER_CREATED_EVENT
	case cri.ContainerState_CONTAINER_RUNNING:
		return cri.ContainerEventType_CONTAINER_STARTED_EVENT
	default:
		return cri.ContainerEventType_CONTAINER_STOPPED_EVENT
	}
}

func (view eventsView) show(e *cri.ContainerEventResponse) error {
	if view.json {
		text, err := protojson.Marshal(e)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(view.out, "%s\n", text)
		return err
	}
	_, err := fmt.Fprintln(view.out, describeEvent(e))
	return err
}

// describeEvent formats an event as one line: its time, its kind and its object.
func describeEvent(e *cri.ContainerEventResponse) string {
	when := time.Unix(0, e.CreatedAt).Format("2006-01-02 15:04:05.000")
	kind := strings.ToLower(strings.TrimSuffix(strings.TrimPrefix(e.ContainerEventType.String(), "CONTAINER_"), "_EVENT"))
	meta := e.PodSandboxStatus.GetMetadata()
	pod := fmt.Sprintf("%q", meta.GetNamespace()+"/"+meta.GetName())
	line := fmt.Sprintf("%s %-8s", when, kind)
	if e.ContainerId == e.PodSandboxStatus.GetId() {
		return fmt.Sprintf("%s pod %s %.13s", line, pod, e.ContainerId)
	}
	i := slices.IndexFunc(e.ContainersStatuses, func(s *cri.ContainerStatus) bool { return s.Id == e.ContainerId })
	if i < 0 { // deleted
		return fmt.Sprintf("%s container %.13s of pod %s", line, e.ContainerId, pod)
	}
	s := e.ContainersStatuses[i]
	line = fmt.Sprintf("%s container %q %.13s of pod %s", line, s.GetMetadata().GetName(), e.ContainerId, pod)
	if e.ContainerEventType == cri.ContainerEventType_CONTAINER_STOPPED_EVENT {
		line += fmt.Sprintf(": %s, code %d", s.Reason, s.ExitCode)
	}
	return line
}
