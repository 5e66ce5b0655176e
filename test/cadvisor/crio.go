package main

import (
	"time"

	"github.com/google/cadvisor/container"
	"github.com/google/cadvisor/container/crio"
	"github.com/google/cadvisor/container/raw"
	"github.com/google/cadvisor/fs"
	info "github.com/google/cadvisor/info/v1"
	"github.com/google/cadvisor/watcher"
)

// sight is what cAdvisor sees in a cgroup.
type sight struct {
	Type       string // crio, or raw if no handler claims it
	Aliases    []string
	Image      string
	Labels     map[string]string
	Interfaces map[string]uint64 // bytes received and sent
	Usage      usage
	Error      string // of the handler or the reading; the rest may be set nevertheless
}

// usage is what a kubelet takes from cAdvisor for its summary: nanoseconds of
// CPU, bytes, counts.
type usage struct {
	CPU, Memory, WorkingSet, RSS, Swap, PageFaults, MajorPageFaults uint64
}

// look registers cAdvisor's factories for CRI-O and for unknown cgroups, as
// kubelets do, and has each cgroup handled by the factory that claims it.
func look(cgroups []string) (map[string]*sight, error) {
	included := container.MetricSet{
		container.CpuUsageMetrics: {}, container.MemoryUsageMetrics: {}, container.DiskIOMetrics: {},
		container.NetworkUsageMetrics: {}, container.ProcessMetrics: {}, container.DiskUsageMetrics: {},
	}
	filesystems, err := fs.NewFsInfo(fs.Context{})
	if err != nil {
		return nil, err
	}
	if err := crio.Register(machine{}, filesystems, included); err != nil {
		return nil, err
	}
	if err := raw.Register(machine{}, filesystems, included, []string{"/"}); err != nil {
		return nil, err
	}
	all := map[string]*sight{}
	for _, cgroup := range cgroups {
		all[cgroup] = see(cgroup)
	}
	return all, nil
}

func see(cgroup string) *sight {
	handler, accepted, err := container.NewContainerHandler(cgroup, watcher.Raw, nil, true)
	if err != nil {
		return &sight{Error: err.Error()}
	}
	if !accepted {
		return &sight{Error: "nobody accepts it"}
	}
	handler.Start()
	defer handler.Cleanup()
	s := &sight{Type: "raw", Labels: handler.GetContainerLabels(), Interfaces: map[string]uint64{}}
	if handler.Type() == container.ContainerTypeCrio {
		s.Type = "crio"
	}
	reference, err := handler.ContainerReference()
	if err != nil {
		s.Error = err.Error()
		return s
	}
	s.Aliases = reference.Aliases
	if spec, err := handler.GetSpec(); err == nil {
		s.Image = spec.Image
	}
	stats, err := handler.GetStats()
	if err != nil {
		s.Error = err.Error()
	}
	if stats != nil {
		m := stats.Memory
		s.Usage = usage{
			CPU: stats.Cpu.Usage.Total, Memory: m.Usage, WorkingSet: m.WorkingSet, RSS: m.RSS, Swap: m.Swap,
			PageFaults: m.HierarchicalData.Pgfault, MajorPageFaults: m.HierarchicalData.Pgmajfault,
		}
		for _, i := range stats.Network.Interfaces {
			s.Interfaces[i.Name] = i.RxBytes + i.TxBytes
		}
	}
	return s
}

// machine is a machine about which cAdvisor knows nothing.
type machine struct{}

func (machine) GetMachineInfo() (*info.MachineInfo, error) {
	return &info.MachineInfo{NumCores: 1, Timestamp: time.Now()}, nil
}

func (machine) GetVersionInfo() (*info.VersionInfo, error) { return &info.VersionInfo{}, nil }
