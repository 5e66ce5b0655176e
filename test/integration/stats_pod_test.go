package integration

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/wait"
)

func (p *pod) stats(t *testing.T) *cri.PodSandboxStats {
	t.Helper()
	resp, err := p.w.Runtime().PodSandboxStats(t.Context(), &cri.PodSandboxStatsRequest{PodSandboxId: p.id})
	if err != nil {
		t.Fatalf("PodSandboxStats: %v", err)
	}
	return resp.Stats
}

// ownCgroup gives a pod its own cgroup, as the kubelet does, and removes it
// when the pod is gone.
func (w *world) ownCgroup(t *testing.T) podChange {
	parent := ""
	t.Cleanup(func() {
		if err := cgroup.Remove(context.Background(), parent); err != nil {
			t.Error(err)
		}
	})
	return func(c *cri.PodSandboxConfig) {
		parent = w.CgroupParent() + "/pod" + c.Metadata.Uid
		c.Linux.CgroupParent = parent
	}
}

// A kubelet gives each pod its own cgroup, whose counters are the pod's.
func TestPodStatsAreThoseOfThePodsCgroup(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun", w.ownCgroup(t))
	a, b := p.start(t, "alloc 10 ; sleep"), p.start(t, "alloc 5 ; sleep")
	a.says(t, "allocated")
	b.says(t, "allocated")
	dir := func(controller string) (string, bool) {
		of, v2 := cgroupDir(t, a.cgroups(t), controller)
		return filepath.Dir(of), v2
	}
	count := func(k knob) uint64 {
		d, v2 := dir(k.controller)
		return counterIn(t, d, v2, k)
	}
	cpu := count(cpuTime)
	s := p.stats(t)
	between(t, "CPU time", s.Linux.Cpu.GetUsageCoreNanoSeconds(), cpu, count(cpuTime))
	near(t, "memory", s.Linux.Memory.GetUsageBytes(), count(memoryUsed), mib)
	near(t, "working set", s.Linux.Memory.GetWorkingSetBytes(), count(memoryUsed)-count(inactiveFiles), mib)
	near(t, "processes", s.Linux.Process.GetProcessCount(), count(tasks), 4) // Go's threads come and go
	checkPodStats(t, p, s)
	equalSets(t, "containers", idsOf(s.Linux.Containers), []string{a.id, b.id})
}

// The descriptors that the server keeps open to answer faster are four per pod,
// however many containers it has.
func TestStatsKeepFewDescriptors(t *testing.T) {
	t.Parallel()
	w := shared(t)
	kept := func(p *pod) (paths []string) {
		links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", w.PID()))
		if err != nil {
			t.Fatal(err)
		}
		for _, link := range links {
			if to, _ := os.Readlink(link); strings.HasPrefix(to, "/sys/fs/cgroup/") && strings.Contains(to, p.config.Metadata.Uid) {
				paths = append(paths, to)
			}
		}
		return paths
	}
	for _, containers := range []int{1, 5} {
		p := w.run(t, "crun", w.ownCgroup(t))
		for range containers {
			p.start(t, "sleep")
		}
		for range 2 {
			p.stats(t)
			filter := &cri.ContainerStatsFilter{PodSandboxId: p.id}
			if _, err := w.Runtime().ListContainerStats(t.Context(), &cri.ListContainerStatsRequest{Filter: filter}); err != nil {
				t.Fatal(err)
			}
			if _, err := w.Runtime().ListPodSandboxMetrics(t.Context(), &cri.ListPodSandboxMetricsRequest{}); err != nil {
				t.Fatal(err)
			}
		}
		// Concurrent requests of other tests have files open, too.
		wait.For(t, fmt.Sprintf("four descriptors at most of a pod with %d containers", containers), func() bool {
			now := kept(p)
			return len(now) > 0 && len(now) <= 4
		})
		p.remove(t)
		wait.For(t, "no descriptor of a pod that is gone", func() bool { return len(kept(p)) == 0 })
	}
}

// checkPodStats checks what holds for every ready pod.
func checkPodStats(t *testing.T, p *pod, s *cri.PodSandboxStats) {
	t.Helper()
	equal(t, "id", s.Attributes.GetId(), p.id)
	if !proto.Equal(s.Attributes.GetMetadata(), p.config.Metadata) {
		t.Errorf("metadata is %v, want %v", s.Attributes.GetMetadata(), p.config.Metadata)
	}
	equal(t, "label", s.Attributes.Labels["io.kubernetes.pod.uid"], p.config.Metadata.Uid)
	for what, at := range map[string]int64{
		"CPU": s.Linux.GetCpu().GetTimestamp(), "memory": s.Linux.GetMemory().GetTimestamp(), "processes": s.Linux.GetProcess().GetTimestamp(),
	} {
		if made, now := p.status(t).CreatedAt, time.Now().UnixNano(); at < made || at > now {
			t.Errorf("timestamp of %s is %d, the pod was made at %d, and now is %d", what, at, made, now)
		}
	}
}

// Pods without their own cgroups share one: another pod's usage is not theirs.
func TestPodStatsAreTheSumOfItsContainers(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun", func(c *cri.PodSandboxConfig) { // shares a process namespace, so it has an infra container
		c.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_POD
		c.Linux.CgroupParent = w.CgroupParent()
	})
	other := w.run(t, "crun")
	large := other.start(t, "alloc 100 ; sleep")
	a, b := p.start(t, "alloc 10 ; sleep"), p.start(t, "alloc 5 ; sleep")
	for _, c := range []*container{large, a, b} {
		c.says(t, "allocated")
	}
	infra := &container{pod: p, id: p.id}
	var cpu, memory, processes uint64
	for _, c := range []*container{a, b, infra} {
		cpu += c.counter(t, cpuTime)
		memory += c.counter(t, memoryUsed)
		processes += c.counter(t, tasks)
	}
	s := p.stats(t)
	between(t, "CPU time", s.Linux.Cpu.GetUsageCoreNanoSeconds(), cpu, cpu+2e9)
	near(t, "memory", s.Linux.Memory.GetUsageBytes(), memory, 2*mib)
	near(t, "processes", s.Linux.Process.GetProcessCount(), processes, 6)
	checkPodStats(t, p, s)
	if ws := other.stats(t).Linux.Memory.GetWorkingSetBytes().GetValue(); ws < 100*mib || ws > 115*mib {
		t.Errorf("the other pod's working set is %d", ws)
	}
	a.stop(t, 0)
	if ws := p.stats(t).Linux.Memory.GetWorkingSetBytes().GetValue(); ws > memory-8*mib {
		t.Errorf("working set is %d after the larger container has ended, memory was %d", ws, memory)
	}
}

func TestPodNetworkStats(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	c := p.start(t, "tcp :9000 noise 1000000 ; sleep")
	c.says(t, "listening")
	first := p.stats(t).Linux.Network
	equal(t, "default interface", first.GetDefaultInterface().GetName(), "eth0")
	for _, i := range first.GetInterfaces() {
		if i.Name == "lo" || i.Name == "eth0" {
			t.Errorf("%s is among the other interfaces", i.Name)
		}
	}
	conn, err := w.Dial(t.Context(), "tcp", p.status(t).Network.Ip+":9000")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if n, err := io.Copy(io.Discard, conn); err != nil || n != 1_000_000 {
		t.Fatalf("read %d bytes, %v", n, err)
	}
	before := interfaceCounters(t, c)
	second := p.stats(t).Linux.Network
	after := interfaceCounters(t, c)
	d := second.DefaultInterface
	for i, got := range []*cri.UInt64Value{d.RxBytes, d.RxErrors, d.TxBytes, d.TxErrors} {
		between(t, []string{"bytes received", "errors received", "bytes sent", "errors sent"}[i], got, before[i], after[i])
	}
	if sent := d.TxBytes.GetValue() - first.DefaultInterface.TxBytes.GetValue(); sent < 1_000_000 || sent > 2_000_000 {
		t.Errorf("%d bytes were sent for a million", sent)
	}
	if second.Timestamp <= first.Timestamp {
		t.Errorf("timestamp went from %d to %d", first.Timestamp, second.Timestamp)
	}
}

// interfaceCounters returns eth0's bytes and errors received and sent, as seen
// by a process of the pod.
func interfaceCounters(t *testing.T, c *container) [4]uint64 {
	t.Helper()
	_, line, _ := strings.Cut(c.procfs(t, "net/dev"), "eth0:")
	words := strings.Fields(line)
	var n [4]uint64
	for i, column := range []int{0, 2, 8, 10} {
		var err error
		if n[i], err = strconv.ParseUint(words[column], 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	return n
}

func TestHostNetworkPodHasNoNetworkStats(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, handlers[0], kubelet.HostNetwork)
	p.start(t, "sleep", hostNetworkContainer)
	s := p.stats(t)
	if s.Linux.Network != nil {
		t.Errorf("the node's traffic is reported as the pod's: %v", s.Linux.Network)
	}
	checkPodStats(t, p, s)
}

// Kubelets read the Linux part of every pod's stats without checking whether it
// exists.
func TestStatsOfPodsThatDoNotRun(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, handlers[0])
	if s := p.stats(t); s.Linux == nil || s.Linux.Network.GetDefaultInterface().GetName() != "eth0" || len(s.Linux.Containers) != 0 {
		t.Errorf("stats of a pod without containers are %v", s)
	}
	c := p.start(t, "sleep")
	p.stop(t)
	s := p.stats(t)
	if s.Attributes.GetId() != p.id || s.Linux == nil || s.Linux.Cpu != nil || s.Linux.Memory != nil || s.Linux.Network != nil {
		t.Errorf("stats of a stopped pod are %v", s)
	}
	equalSets(t, "containers", idsOf(s.Linux.GetContainers()), []string{c.id})
	_, err := w.Runtime().PodSandboxStats(t.Context(), &cri.PodSandboxStatsRequest{PodSandboxId: strings.Repeat("0", 64)})
	wantCode(t, err, codes.NotFound, "000")
}

func TestPodStatsFilters(t *testing.T) {
	t.Parallel()
	w := shared(t)
	label := func(c *cri.PodSandboxConfig) { c.Labels["test"] = t.Name() }
	a, b := w.run(t, handlers[0], label), w.run(t, handlers[1], label)
	for name, test := range map[string]struct {
		filter *cri.PodSandboxStatsFilter
		want   []string
	}{
		"id":      {&cri.PodSandboxStatsFilter{Id: a.id}, []string{a.id}},
		"prefix":  {&cri.PodSandboxStatsFilter{Id: b.id[:20]}, []string{b.id}},
		"labels":  {&cri.PodSandboxStatsFilter{LabelSelector: map[string]string{"test": t.Name()}}, []string{a.id, b.id}},
		"nothing": {&cri.PodSandboxStatsFilter{Id: a.id, LabelSelector: map[string]string{"test": "other"}}, nil},
	} {
		list, err := w.Runtime().ListPodSandboxStats(t.Context(), &cri.ListPodSandboxStatsRequest{Filter: test.filter})
		if err != nil {
			t.Fatal(err)
		}
		equalSets(t, name, idsOf(list.Stats), test.want)
		stream, err := w.Runtime().StreamPodSandboxStats(t.Context(), &cri.StreamPodSandboxStatsRequest{Filter: test.filter})
		if err != nil {
			t.Fatal(err)
		}
		var streamed []string
		receive(t, stream.Recv, func(m *cri.StreamPodSandboxStatsResponse) { streamed = append(streamed, idsOf(m.PodSandboxStats)...) })
		equalSets(t, name+", as a stream", streamed, test.want)
	}
}
