// Package lists lists the pods and containers of a node, each with its full name.
package lists

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/cmd/crius/cli"
	engine "github.com/crius-run/crius/pod"
)

// PodsCommand is crius pods.
func PodsCommand(load cli.Load) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "pods",
		Short: "List the pods",
		Long: "List the pods of the running server by name: each with its id, its state, its age, its runtime handler and its addresses. " +
			"A pod that the kubelet has made again is listed once for each attempt, the latest first.",
		Args: cli.Operands,
	}
	show(cmd, load, pods, func(w io.Writer, list []pod) {
		fmt.Fprintln(w, "POD\tID\tSTATE\tAGE\tATTEMPT\tHANDLER\tADDRESSES")
		for _, p := range list {
			fmt.Fprintf(w, "%s\t%.13s\t%s\t%s\t%d\t%s\t%s\n", cli.Printable(p.Name), p.ID, p.State, age(p.Created), p.Attempt, cmp.Or(p.Handler, "(default)"), orDash(strings.Join(p.Addresses, ",")))
		}
	})
	return cmd
}

// ContainersCommand is crius ps.
func ContainersCommand(load cli.Load) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "ps",
		Short: "List the containers",
		Long: "List the containers of the running server by pod: each with its id, its state, its age and its image. " +
			"Without --all only containers that are running are listed. An exited container is listed with its exit code, and with the reason unless that is Completed or Error.",
		Args: cli.Operands,
	}
	cmd.Flags().BoolVarP(&all, "all", "a", false, "list containers that are not running, too")
	find := func(ctx context.Context, server cli.Server) ([]container, error) { return containers(ctx, server, all) }
	show(cmd, load, find, func(w io.Writer, list []container) {
		fmt.Fprintln(w, "POD\tCONTAINER\tID\tSTATE\tAGE\tIMAGE")
		for _, c := range list {
			fmt.Fprintf(w, "%s\t%s\t%.13s\t%s\t%s\t%s\n", cli.Printable(c.Pod), cli.Printable(c.Name), c.ID, cli.Printable(c.state()), age(c.Created), orDash(cli.Printable(c.Image)))
		}
	})
	return cmd
}

// show has the command print the list that find returns.
func show[T any](cmd *cobra.Command, load cli.Load, find func(context.Context, cli.Server) ([]T, error), write func(io.Writer, []T)) {
	format := cli.FormatFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		loaded, err := load(cmd)
		if err != nil {
			return err
		}
		return cli.Ask(cmd.Context(), loaded.Config.API.Listen, func(ctx context.Context, server cli.Server) error {
			list, err := find(ctx, server)
			if err != nil {
				return err
			}
			return format.Print(cmd.OutOrStdout(), list, func(w io.Writer) { cli.Table(w, func(w io.Writer) { write(w, list) }) })
		})
	}
}

// pod is a pod in the list.
type pod struct {
	Name      string    `json:"name"` // NAMESPACE/NAME
	UID       string    `json:"uid"`
	ID        string    `json:"id"`
	State     string    `json:"state"` // ready or notready
	Created   time.Time `json:"createdAt"`
	Attempt   uint32    `json:"attempt"`
	Handler   string    `json:"handler"` // empty: the default one
	Addresses []string  `json:"addresses"`
}

func pods(ctx context.Context, server cli.Server) ([]pod, error) {
	resp, err := server.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return nil, err
	}
	list := []pod{}
	for _, p := range resp.Items {
		status, err := server.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: p.Id})
		if grpcstatus.Code(err) == codes.NotFound {
			continue // removed since
		}
		if err != nil {
			return nil, err
		}
		list = append(list, pod{
			Name: cli.PodName(p.GetMetadata()), UID: p.GetMetadata().GetUid(), ID: p.Id, State: word(status.Status.GetState()), Created: time.Unix(0, p.CreatedAt),
			Attempt: p.GetMetadata().GetAttempt(), Handler: p.RuntimeHandler, Addresses: addresses(status.Status.GetNetwork()),
		})
	}
	slices.SortFunc(list, func(a, b pod) int { return cmp.Or(cmp.Compare(a.Name, b.Name), b.Created.Compare(a.Created)) })
	return list, nil
}

func addresses(network *cri.PodSandboxNetworkStatus) []string {
	all := []string{}
	if first := network.GetIp(); first != "" {
		all = append(all, first)
	}
	for _, other := range network.GetAdditionalIps() {
		all = append(all, other.Ip)
	}
	return all
}

// container is a container in the list.
type container struct {
	Pod     string    `json:"pod"` // NAMESPACE/NAME
	Name    string    `json:"name"`
	ID      string    `json:"id"`
	State   string    `json:"state"` // created, running, exited or unknown
	Exit    *exit     `json:"exit,omitempty"`
	Created time.Time `json:"createdAt"`
	Image   string    `json:"image"`

	Checkpointing bool `json:"checkpointing,omitempty"`
}

// exit is how a container ended.
type exit struct {
	Code   int32  `json:"code"`
	Reason string `json:"reason"`
}

func containers(ctx context.Context, server cli.Server, all bool) ([]container, error) {
	pods, err := server.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return nil, err
	}
	names := map[string]string{}
	for _, p := range pods.Items {
		names[p.Id] = cli.PodName(p.GetMetadata())
	}
	resp, err := server.ListContainers(ctx, &cri.ListContainersRequest{})
	if err != nil {
		return nil, err
	}
	checkpoints := cli.Checkpoints(ctx, server)
	list := []container{}
	for _, c := range resp.Containers {
		if !all && c.State != cri.ContainerState_CONTAINER_RUNNING {
			continue
		}
		one := container{Pod: names[c.PodSandboxId], Name: c.GetMetadata().GetName(), ID: c.Id, State: word(c.State), Created: time.Unix(0, c.CreatedAt), Image: c.GetImage().GetUserSpecifiedImage()}
		one.Image = cmp.Or(one.Image, c.GetImage().GetImage())
		if c.State == cri.ContainerState_CONTAINER_EXITED {
			status, err := server.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: c.Id})
			if grpcstatus.Code(err) == codes.NotFound {
				continue // removed since
			}
			if err != nil {
				return nil, err
			}
			one.Exit = &exit{status.Status.GetExitCode(), status.Status.GetReason()}
		}
		one.Checkpointing = slices.ContainsFunc(checkpoints, func(d engine.Checkpointing) bool { return d.ID == c.Id })
		list = append(list, one)
	}
	slices.SortFunc(list, func(a, b container) int {
		return cmp.Or(cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Name, b.Name), b.Created.Compare(a.Created))
	})
	return list, nil
}

// state is the state with the exit code, and with a reason that says more than that.
func (c container) state() string {
	switch {
	case c.Checkpointing:
		return c.State + ", being checkpointed"
	case c.Exit == nil:
		return c.State
	case c.Exit.Reason == "" || c.Exit.Reason == "Completed" || c.Exit.Reason == "Error":
		return fmt.Sprintf("%s %d", c.State, c.Exit.Code)
	}
	return fmt.Sprintf("%s %d, %s", c.State, c.Exit.Code, c.Exit.Reason)
}

// word is the last part of the name of a state: CONTAINER_RUNNING is running.
func word(state fmt.Stringer) string {
	_, name, _ := strings.Cut(state.String(), "_")
	return strings.ToLower(name)
}

func age(created time.Time) string { return cli.Brief(time.Since(created).Truncate(time.Second)) }

func orDash(text string) string { return cmp.Or(text, "-") }
