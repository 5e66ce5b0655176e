package server

import (
	"reflect"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/pod/usage"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/storage"
)

// someUsage has a different value in every field.
func someUsage() cgroup.Usage {
	n := uint64(100)
	next := func() *uint64 { n++; return new(n) }
	psi := func() *cgroup.Pressure {
		stall := func() *cgroup.Stall {
			return &cgroup.Stall{Avg10: float64(*next()), Avg60: float64(*next()), Avg300: float64(*next()), Total: *next()}
		}
		return &cgroup.Pressure{Some: stall(), Full: stall()}
	}
	return cgroup.Usage{
		Time: time.Unix(0, 1_000),
		CPU:  &cgroup.CPU{Total: *next(), Rate: next(), Pressure: psi()},
		Memory: &cgroup.Memory{Usage: *next(), WorkingSet: next(), Limit: new(uint64(10_000)), RSS: next(),
			Faults: next(), MajorFaults: next(), Pressure: psi()},
		Swap:  &cgroup.Swap{Usage: *next(), Limit: new(uint64(20_000))},
		IO:    psi(),
		Tasks: next(),
	}
}

func someContainerStats() *usage.ContainerStats {
	return &usage.ContainerStats{
		View:  &view.Container{ID: idOf(2), SandboxID: idOf(1), Config: maximalContainerConfig()},
		Usage: someUsage(),
		Layer: &storage.FsUsage{Mountpoint: "/ctr", UsedBytes: 11, InodesUsed: 12, Timestamp: time.Unix(0, 13)},
	}
}

func someSandboxStats() *usage.SandboxStats {
	return &usage.SandboxStats{
		View:  &view.Sandbox{ID: idOf(1), Config: maximalSandboxConfig()},
		Usage: someUsage(),
		Network: &usage.NetworkStats{
			Time:    time.Unix(0, 14),
			Default: network.Interface{Name: "eth0", RxBytes: 1, RxErrors: 2, TxBytes: 3, TxErrors: 4},
			Others:  []network.Interface{{Name: "net1", RxBytes: 5, RxErrors: 6, TxBytes: 7, TxErrors: 8}},
		},
		Containers: []*usage.ContainerStats{someContainerStats()},
	}
}

func TestContainerStatsAreComplete(t *testing.T) {
	t.Parallel()
	s := someContainerStats()
	m := containerStats(s)
	wantFilled(t, m)
	a := m.Attributes
	if a.Id != idOf(2) || !proto.Equal(a.Metadata, s.View.Config.Metadata) || !reflect.DeepEqual(a.Labels, s.View.Config.Labels) || !reflect.DeepEqual(a.Annotations, s.View.Config.Annotations) {
		t.Errorf("attributes: %v", a)
	}
	u := s.Usage
	for what, pair := range map[string][2]uint64{
		"cpu":              {m.Cpu.UsageCoreNanoSeconds.Value, u.CPU.Total},
		"cpu rate":         {m.Cpu.UsageNanoCores.Value, *u.CPU.Rate},
		"cpu time":         {uint64(m.Cpu.Timestamp), 1_000},
		"memory time":      {uint64(m.Memory.Timestamp), 1_000},
		"memory":           {m.Memory.UsageBytes.Value, u.Memory.Usage},
		"working set":      {m.Memory.WorkingSetBytes.Value, *u.Memory.WorkingSet},
		"available":        {m.Memory.AvailableBytes.Value, 10_000 - *u.Memory.WorkingSet},
		"rss":              {m.Memory.RssBytes.Value, *u.Memory.RSS},
		"faults":           {m.Memory.PageFaults.Value, *u.Memory.Faults},
		"major faults":     {m.Memory.MajorPageFaults.Value, *u.Memory.MajorFaults},
		"swap":             {m.Swap.SwapUsageBytes.Value, u.Swap.Usage},
		"swap available":   {m.Swap.SwapAvailableBytes.Value, 20_000 - u.Swap.Usage},
		"swap time":        {uint64(m.Swap.Timestamp), 1_000},
		"io time":          {uint64(m.Io.Timestamp), 1_000},
		"layer":            {m.WritableLayer.UsedBytes.Value, 11},
		"layer's inodes":   {m.WritableLayer.InodesUsed.Value, 12},
		"layer's time":     {uint64(m.WritableLayer.Timestamp), 13},
		"cpu some total":   {m.Cpu.Psi.Some.Total, u.CPU.Pressure.Some.Total},
		"cpu full avg10":   {uint64(m.Cpu.Psi.Full.Avg10), uint64(u.CPU.Pressure.Full.Avg10)},
		"mem some avg60":   {uint64(m.Memory.Psi.Some.Avg60), uint64(u.Memory.Pressure.Some.Avg60)},
		"mem full avg300":  {uint64(m.Memory.Psi.Full.Avg300), uint64(u.Memory.Pressure.Full.Avg300)},
		"io full total":    {m.Io.Psi.Full.Total, u.IO.Full.Total},
		"io's mount point": {uint64(len(m.WritableLayer.FsId.Mountpoint)), uint64(len("/ctr"))},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s is %d, want %d", what, pair[0], pair[1])
		}
	}
}

func TestPodStatsAreComplete(t *testing.T) {
	t.Parallel()
	m := sandboxStats(someSandboxStats())
	wantFilled(t, m, "windows")
	linux := m.Linux
	want := &cri.NetworkUsage{
		Timestamp: 14,
		DefaultInterface: &cri.NetworkInterfaceUsage{Name: "eth0", RxBytes: &cri.UInt64Value{Value: 1}, RxErrors: &cri.UInt64Value{Value: 2},
			TxBytes: &cri.UInt64Value{Value: 3}, TxErrors: &cri.UInt64Value{Value: 4}},
		Interfaces: []*cri.NetworkInterfaceUsage{{Name: "net1", RxBytes: &cri.UInt64Value{Value: 5}, RxErrors: &cri.UInt64Value{Value: 6},
			TxBytes: &cri.UInt64Value{Value: 7}, TxErrors: &cri.UInt64Value{Value: 8}}},
	}
	if !proto.Equal(linux.Network, want) {
		t.Errorf("network is %v", linux.Network)
	}
	if linux.Process.ProcessCount.Value != *someUsage().Tasks || linux.Process.Timestamp != 1_000 {
		t.Errorf("process is %v", linux.Process)
	}
	if !proto.Equal(linux.Containers[0], containerStats(someContainerStats())) {
		t.Errorf("containers are %v", linux.Containers)
	}
}

// Unknown values are not invented, and what kubelets do not check for is
// present.
func TestStatsOfNothing(t *testing.T) {
	t.Parallel()
	c := containerStats(&usage.ContainerStats{View: &view.Container{ID: idOf(2), Config: maximalContainerConfig()}})
	if c.Attributes == nil || c.Cpu != nil || c.Memory != nil || c.Swap != nil || c.Io != nil || c.WritableLayer != nil {
		t.Errorf("container: %v", c)
	}
	s := sandboxStats(&usage.SandboxStats{View: &view.Sandbox{ID: idOf(1), Config: maximalSandboxConfig()}})
	if s.Attributes == nil || s.Linux == nil || !proto.Equal(s.Linux, &cri.LinuxPodSandboxStats{}) {
		t.Errorf("pod: %v", s)
	}
	u := someUsage()
	u.Memory.Limit, u.Swap.Limit = nil, nil
	if m, swap := memoryUsage(u), swapUsage(u); m.AvailableBytes != nil || swap.SwapAvailableBytes != nil {
		t.Errorf("without limits %v, %v are available", m.AvailableBytes, swap.SwapAvailableBytes)
	}
	u.Memory.Limit, u.Swap.Limit = new(uint64(1)), new(uint64(1))
	if m, swap := memoryUsage(u), swapUsage(u); m.AvailableBytes.GetValue() != 0 || swap.SwapAvailableBytes.GetValue() != 0 {
		t.Errorf("above the limit %v, %v are available", m.AvailableBytes, swap.SwapAvailableBytes)
	}
}

func TestStatsRequests(t *testing.T) {
	t.Parallel()
	n := start(t)
	n.engine.containers = []*view.Container{someContainerStats().View}
	n.engine.sandboxes = []*view.Sandbox{someSandboxStats().View}
	ctx := t.Context()
	for id, want := range map[string]codes.Code{"": codes.InvalidArgument, "not-an-id": codes.NotFound, idOf(9): codes.NotFound,
		idOf(2): codes.NotFound} { // found, and gone when it is measured
		_, err := n.runtime.ContainerStats(ctx, &cri.ContainerStatsRequest{ContainerId: id})
		wantCode(t, err, want)
	}
	for id, want := range map[string]codes.Code{"": codes.InvalidArgument, "not-an-id": codes.NotFound, idOf(9): codes.NotFound, idOf(1): codes.NotFound} {
		_, err := n.runtime.PodSandboxStats(ctx, &cri.PodSandboxStatsRequest{PodSandboxId: id})
		wantCode(t, err, want)
	}
	n.engine.containerStats = []*usage.ContainerStats{someContainerStats()}
	n.engine.sandboxStats = []*usage.SandboxStats{someSandboxStats()}
	if resp, err := n.runtime.ContainerStats(ctx, &cri.ContainerStatsRequest{ContainerId: idOf(2)[:63]}); err != nil || !proto.Equal(resp.Stats, containerStats(someContainerStats())) {
		t.Errorf("by a prefix: %v, %v", resp, err)
	}
	if resp, err := n.runtime.PodSandboxStats(ctx, &cri.PodSandboxStatsRequest{PodSandboxId: idOf(1)[:63]}); err != nil || !proto.Equal(resp.Stats, sandboxStats(someSandboxStats())) {
		t.Errorf("by a prefix: %v, %v", resp, err)
	}
	var old cri.ListContainerStatsResponse
	err := n.conn.Invoke(ctx, "/runtime.v1alpha2.RuntimeService/ListContainerStats", &cri.ListContainerStatsRequest{}, &old)
	if err != nil || len(old.Stats) != 1 || !proto.Equal(old.Stats[0], containerStats(someContainerStats())) {
		t.Errorf("v1alpha2: %v, %v", &old, err)
	}
	_, err = n.runtime.ListContainerStats(ctx, &cri.ListContainerStatsRequest{Filter: &cri.ContainerStatsFilter{Id: "\x00"}})
	wantCode(t, err, codes.InvalidArgument)
	_, err = n.runtime.ListPodSandboxStats(ctx, &cri.ListPodSandboxStatsRequest{Filter: &cri.PodSandboxStatsFilter{Id: "\x00"}})
	wantCode(t, err, codes.InvalidArgument)
}
