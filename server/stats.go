package server

import (
	"context"
	"fmt"
	"strings"

	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/pod/usage"
	"github.com/crius-run/crius/pod/view"
)

// statsAPI is the part of RuntimeService for usage. Its lists have all pods and
// containers: those that do not run have attributes, and containers their
// writable layer, but neither CPU nor memory, by which crictl recognizes them.
type statsAPI struct {
	engine Engine
	usage  Usage
}

func (s *statsAPI) ContainerStats(ctx context.Context, req *cri.ContainerStatsRequest) (*cri.ContainerStatsResponse, error) {
	if err := checkID("container_id", req.GetContainerId()); err != nil {
		return nil, err
	}
	found, err := s.engine.Container(req.GetContainerId())
	if err != nil {
		return nil, err
	}
	stats := s.usage.ContainerStats(ctx, func(v *view.Container) bool { return v.ID == found.ID })
	if len(stats) == 0 {
		return nil, fmt.Errorf("container %s was removed meanwhile: %w", found.ID, fault.NotFound)
	}
	return &cri.ContainerStatsResponse{Stats: containerStats(stats[0])}, nil
}

func (s *statsAPI) ListContainerStats(ctx context.Context, req *cri.ListContainerStatsRequest) (*cri.ListContainerStatsResponse, error) {
	stats, err := s.listContainers(ctx, req.GetFilter())
	return &cri.ListContainerStatsResponse{Stats: stats}, err
}

func (s *statsAPI) StreamContainerStats(req *cri.StreamContainerStatsRequest, out grpc.ServerStreamingServer[cri.StreamContainerStatsResponse]) error {
	stats, err := s.listContainers(out.Context(), req.GetFilter())
	if err != nil {
		return err
	}
	return inChunks(stats, messageSize, func(chunk []*cri.ContainerStats) error {
		return out.Send(&cri.StreamContainerStatsResponse{ContainerStats: chunk})
	})
}

func (s *statsAPI) listContainers(ctx context.Context, filter *cri.ContainerStatsFilter) ([]*cri.ContainerStats, error) {
	if err := in("filter", wellFormed(filter)); err != nil {
		return nil, err
	}
	return manyContainerStats(s.usage.ContainerStats(ctx, func(v *view.Container) bool {
		return strings.HasPrefix(v.ID, filter.GetId()) &&
			strings.HasPrefix(v.SandboxID, filter.GetPodSandboxId()) &&
			hasLabels(v.Config.GetLabels(), filter.GetLabelSelector())
	})), nil
}

func (s *statsAPI) PodSandboxStats(ctx context.Context, req *cri.PodSandboxStatsRequest) (*cri.PodSandboxStatsResponse, error) {
	if err := checkID("pod_sandbox_id", req.GetPodSandboxId()); err != nil {
		return nil, err
	}
	found, err := s.engine.Sandbox(req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	stats := s.usage.SandboxStats(ctx, func(v *view.Sandbox) bool { return v.ID == found.ID })
	if len(stats) == 0 {
		return nil, fmt.Errorf("pod %s was removed meanwhile: %w", found.ID, fault.NotFound)
	}
	return &cri.PodSandboxStatsResponse{Stats: sandboxStats(stats[0])}, nil
}

func (s *statsAPI) ListPodSandboxStats(ctx context.Context, req *cri.ListPodSandboxStatsRequest) (*cri.ListPodSandboxStatsResponse, error) {
	stats, err := s.listSandboxes(ctx, req.GetFilter())
	return &cri.ListPodSandboxStatsResponse{Stats: stats}, err
}

func (s *statsAPI) StreamPodSandboxStats(req *cri.StreamPodSandboxStatsRequest, out grpc.ServerStreamingServer[cri.StreamPodSandboxStatsResponse]) error {
	stats, err := s.listSandboxes(out.Context(), req.GetFilter())
	if err != nil {
		return err
	}
	return inChunks(stats, messageSize, func(chunk []*cri.PodSandboxStats) error {
		return out.Send(&cri.StreamPodSandboxStatsResponse{PodSandboxStats: chunk})
	})
}

func (s *statsAPI) listSandboxes(ctx context.Context, filter *cri.PodSandboxStatsFilter) ([]*cri.PodSandboxStats, error) {
	if err := in("filter", wellFormed(filter)); err != nil {
		return nil, err
	}
	measured := s.usage.SandboxStats(ctx, func(v *view.Sandbox) bool {
		return strings.HasPrefix(v.ID, filter.GetId()) && hasLabels(v.Config.GetLabels(), filter.GetLabelSelector())
	})
	stats := make([]*cri.PodSandboxStats, len(measured))
	for i, m := range measured {
		stats[i] = sandboxStats(m)
	}
	return stats, nil
}

// sandboxStats always sets the Linux part, which kubelets do not check for.
func sandboxStats(s *usage.SandboxStats) *cri.PodSandboxStats {
	linux := &cri.LinuxPodSandboxStats{
		Cpu:        cpuUsage(s.Usage),
		Memory:     memoryUsage(s.Usage),
		Network:    networkUsage(s),
		Containers: manyContainerStats(s.Containers),
		Io:         ioUsage(s.Usage),
	}
	if s.Usage.Tasks != nil {
		linux.Process = &cri.ProcessUsage{Timestamp: nanos(s.Usage.Time), ProcessCount: value(s.Usage.Tasks)}
	}
	return &cri.PodSandboxStats{
		Attributes: &cri.PodSandboxAttributes{
			Id:          s.View.ID,
			Metadata:    s.View.Config.GetMetadata(),
			Labels:      s.View.Config.GetLabels(),
			Annotations: s.View.Config.GetAnnotations(),
		},
		Linux: linux,
	}
}

func manyContainerStats(measured []*usage.ContainerStats) []*cri.ContainerStats {
	stats := make([]*cri.ContainerStats, len(measured))
	for i, m := range measured {
		stats[i] = containerStats(m)
	}
	return stats
}

func containerStats(s *usage.ContainerStats) *cri.ContainerStats {
	stats := &cri.ContainerStats{
		Attributes: &cri.ContainerAttributes{
			Id:          s.View.ID,
			Metadata:    s.View.Config.GetMetadata(),
			Labels:      s.View.Config.GetLabels(),
			Annotations: s.View.Config.GetAnnotations(),
		},
		Cpu:    cpuUsage(s.Usage),
		Memory: memoryUsage(s.Usage),
		Swap:   swapUsage(s.Usage),
		Io:     ioUsage(s.Usage),
	}
	if s.Layer != nil {
		stats.WritableLayer = fsUsage(*s.Layer)
	}
	return stats
}

func cpuUsage(u cgroup.Usage) *cri.CpuUsage {
	if u.CPU == nil {
		return nil
	}
	return &cri.CpuUsage{
		Timestamp:            nanos(u.Time),
		UsageCoreNanoSeconds: &cri.UInt64Value{Value: u.CPU.Total},
		UsageNanoCores:       value(u.CPU.Rate),
		Psi:                  psiStats(u.CPU.Pressure),
	}
}

// memoryUsage leaves available_bytes empty without a limit.
func memoryUsage(u cgroup.Usage) *cri.MemoryUsage {
	m := u.Memory
	if m == nil {
		return nil
	}
	usage := &cri.MemoryUsage{
		Timestamp:       nanos(u.Time),
		WorkingSetBytes: value(m.WorkingSet),
		UsageBytes:      &cri.UInt64Value{Value: m.Usage},
		RssBytes:        value(m.RSS),
		PageFaults:      value(m.Faults),
		MajorPageFaults: value(m.MajorFaults),
		Psi:             psiStats(m.Pressure),
	}
	if m.Limit != nil && m.WorkingSet != nil {
		usage.AvailableBytes = rest(*m.Limit, *m.WorkingSet)
	}
	return usage
}

// swapUsage leaves swap_available_bytes empty without a limit.
func swapUsage(u cgroup.Usage) *cri.SwapUsage {
	if u.Swap == nil {
		return nil
	}
	usage := &cri.SwapUsage{Timestamp: nanos(u.Time), SwapUsageBytes: &cri.UInt64Value{Value: u.Swap.Usage}}
	if u.Swap.Limit != nil {
		usage.SwapAvailableBytes = rest(*u.Swap.Limit, u.Swap.Usage)
	}
	return usage
}

func ioUsage(u cgroup.Usage) *cri.IoUsage {
	if u.IO == nil {
		return nil
	}
	return &cri.IoUsage{Timestamp: nanos(u.Time), Psi: psiStats(u.IO)}
}

func psiStats(p *cgroup.Pressure) *cri.PsiStats {
	if p == nil {
		return nil
	}
	return &cri.PsiStats{Full: psiData(p.Full), Some: psiData(p.Some)}
}

func psiData(s *cgroup.Stall) *cri.PsiData {
	if s == nil {
		return nil
	}
	return &cri.PsiData{Total: s.Total, Avg10: s.Avg10, Avg60: s.Avg60, Avg300: s.Avg300}
}

func networkUsage(s *usage.SandboxStats) *cri.NetworkUsage {
	n := s.Network
	if n == nil {
		return nil
	}
	usage := &cri.NetworkUsage{Timestamp: nanos(n.Time), DefaultInterface: interfaceUsage(n.Default)}
	for _, i := range n.Others {
		usage.Interfaces = append(usage.Interfaces, interfaceUsage(i))
	}
	return usage
}

func interfaceUsage(i network.Interface) *cri.NetworkInterfaceUsage {
	return &cri.NetworkInterfaceUsage{
		Name:     valid(i.Name),
		RxBytes:  &cri.UInt64Value{Value: i.RxBytes},
		RxErrors: &cri.UInt64Value{Value: i.RxErrors},
		TxBytes:  &cri.UInt64Value{Value: i.TxBytes},
		TxErrors: &cri.UInt64Value{Value: i.TxErrors},
	}
}

// rest returns what a limit leaves; usage may exceed it for a moment.
func rest(limit, used uint64) *cri.UInt64Value {
	return &cri.UInt64Value{Value: limit - min(limit, used)}
}

func value(n *uint64) *cri.UInt64Value {
	if n == nil {
		return nil
	}
	return &cri.UInt64Value{Value: *n}
}
