// Package top shows the pods that use the most CPU or memory.
package top

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/pod"
)

// period is the time over which CPU use is averaged.
const period = time.Second

// Command is crius top.
func Command(load cli.Load) *cobra.Command {
	var watch bool
	order := orderFlag("cpu")
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show the pods that use the most CPU and memory",
		Long: "List the running pods by what they use: CPU, averaged over a second, in CPUs (0.5 is half a CPU); " +
			"memory without the page cache that can be reclaimed at once (the working set, by which the kubelet evicts); and processes and threads. " +
			"A pod that is being checkpointed is marked: its containers are frozen.",
		Args: cli.Operands,
	}
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "refresh every second until interrupted")
	cmd.Flags().Var(&order, "sort", "what to sort by: "+strings.Join(order.values(), ", "))
	cli.Complete(cmd, "sort", order.values())
	format := cli.FormatFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		loaded, err := load(cmd)
		if err != nil {
			return err
		}
		out := cmd.OutOrStdout()
		if watch && *format == "text" {
			out = cli.NewPages(out)
		}
		return cli.Ask(cmd.Context(), loaded.Config.API.Listen, func(ctx context.Context, server cli.Server) error {
			before, err := measure(ctx, server)
			for err == nil && cli.Pause(ctx, period) {
				var now []*cri.PodSandboxStats
				if now, err = measure(ctx, server); err != nil {
					break
				}
				list := compare(before, now)
				mark(list, cli.Checkpoints(ctx, server))
				slices.SortFunc(list, order.compare)
				err = format.Print(out, list, func(w io.Writer) { cli.Table(w, func(w io.Writer) { write(w, list) }) })
				if !watch {
					return err
				}
				before = now
			}
			if ctx.Err() != nil {
				return nil //nolint:nilerr // an interrupt ends it normally
			}
			return err
		})
	}
	return cmd
}

// use is the resource use of a pod; nil: unknown.
type use struct {
	Pod       string   `json:"pod"`
	ID        string   `json:"id"`
	CPUs      *float64 `json:"cpus"`
	Memory    *uint64  `json:"memoryBytes"`
	Processes *uint64  `json:"processes"`

	Checkpointing bool `json:"checkpointing,omitempty"` // of a container at least, which is frozen
}

func measure(ctx context.Context, server cli.Server) ([]*cri.PodSandboxStats, error) {
	answer, err := server.ListPodSandboxStats(ctx, &cri.ListPodSandboxStatsRequest{})
	return answer.GetStats(), err
}

// compare returns the use of all running pods. It computes CPU rates from both samples,
// since the age of the server's own rate depends on its last client.
func compare(before, now []*cri.PodSandboxStats) []use {
	earlier := map[string]*cri.CpuUsage{}
	for _, p := range before {
		earlier[p.GetAttributes().GetId()] = p.GetLinux().GetCpu()
	}
	list := []use{}
	for _, p := range now {
		linux := p.GetLinux()
		if linux.GetCpu() == nil && linux.GetMemory() == nil { // not running
			continue
		}
		u := use{
			Pod: cli.PodName(p.GetAttributes().GetMetadata()), ID: p.GetAttributes().GetId(),
			Memory: number(linux.GetMemory().GetWorkingSetBytes()), Processes: number(linux.GetProcess().GetProcessCount()),
		}
		u.CPUs = rate(earlier[u.ID], linux.GetCpu())
		list = append(list, u)
	}
	return list
}

// rate returns nil if the samples cannot be compared: the pod is new, or one of its
// containers is, whose CPU time counts from its start.
func rate(before, now *cri.CpuUsage) *float64 {
	total := func(u *cri.CpuUsage) uint64 { return u.GetUsageCoreNanoSeconds().GetValue() }
	if before == nil || now == nil || now.Timestamp <= before.Timestamp || total(now) < total(before) {
		return nil
	}
	return new(float64(total(now)-total(before)) / float64(now.Timestamp-before.Timestamp))
}

func number(v *cri.UInt64Value) *uint64 {
	if v == nil {
		return nil
	}
	return &v.Value
}

func write(w io.Writer, list []use) {
	fmt.Fprintln(w, "CPU\tMEMORY\tPROCESSES\tPOD")
	for _, u := range list {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n",
			known(u.CPUs, func(v float64) string { return fmt.Sprintf("%.2f", v) }),
			known(u.Memory, func(v uint64) string { return cli.MiB(v) }),
			known(u.Processes, func(v uint64) string { return fmt.Sprint(v) }),
			cli.Printable(u.Pod)+u.state())
	}
}

// mark marks the pods that are being checkpointed: frozen processes use no CPU.
func mark(list []use, checkpoints []pod.Checkpointing) {
	for _, c := range checkpoints {
		for i := range list {
			list[i].Checkpointing = list[i].Checkpointing || list[i].ID == c.PodID
		}
	}
}

func (u use) state() string {
	if u.Checkpointing {
		return " (being checkpointed)"
	}
	return ""
}

func known[T any](v *T, text func(T) string) string {
	if v == nil {
		return "-"
	}
	return text(*v)
}

// orderFlag is the column by which pods are sorted, the largest first.
type orderFlag string

func (orderFlag) values() []string { return []string{"cpu", "memory", "name"} }

// String implements pflag.Value, as do Type and Set.
func (o orderFlag) String() string { return string(o) }

// Type describes the values in help texts.
func (o orderFlag) Type() string { return "string" }

// Set refuses unknown columns.
func (o *orderFlag) Set(s string) error {
	if !slices.Contains(o.values(), s) {
		return fmt.Errorf("must be one of %s", strings.Join(o.values(), ", "))
	}
	*o = orderFlag(s)
	return nil
}

// compare orders pods by this column, and equal ones by the others.
func (o orderFlag) compare(a, b use) int {
	cpu, memory := largest(a.CPUs, b.CPUs), largest(a.Memory, b.Memory)
	name := cmp.Or(cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.ID, b.ID))
	switch o {
	case "memory":
		return cmp.Or(memory, cpu, name)
	case "name":
		return name
	}
	return cmp.Or(cpu, memory, name)
}

// largest orders the largest first and unknown values last.
func largest[T cmp.Ordered](a, b *T) int {
	switch {
	case a == nil && b == nil:
		return 0
	case a == nil:
		return 1
	case b == nil:
		return -1
	}
	return cmp.Compare(*b, *a)
}
