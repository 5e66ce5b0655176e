package integration

import (
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

var (
	cpuTime       = knob{"cpuacct", "cpuacct.usage", "cpu.stat usage_usec"}
	memoryUsed    = knob{"memory", "memory.usage_in_bytes", "memory.current"}
	inactiveFiles = knob{"memory", "memory.stat total_inactive_file", "memory.stat inactive_file"}
	rss           = knob{"memory", "memory.stat total_rss", "memory.stat anon"}
	pageFaults    = knob{"memory", "memory.stat total_pgfault", "memory.stat pgfault"}
	majorFaults   = knob{"memory", "memory.stat total_pgmajfault", "memory.stat pgmajfault"}
	swapUsed      = knob{"memory", "memory.stat total_swap", "memory.swap.current"}
	tasks         = knob{"pids", "pids.current", "pids.current"}
)

// counter reads a number from the kernel's file; in a file with many, the
// second word of the knob names the line.
func (c *container) counter(t *testing.T, k knob) uint64 {
	t.Helper()
	dir, v2 := cgroupDir(t, c.cgroups(t), k.controller)
	return counterIn(t, dir, v2, k)
}

func counterIn(t *testing.T, dir string, v2 bool, k knob) uint64 {
	t.Helper()
	name := k.v1
	if v2 {
		name = k.v2
	}
	file, key, _ := strings.Cut(name, " ")
	text := strings.TrimSpace(read(t, filepath.Join(dir, file)))
	if key != "" {
		_, text, _ = strings.Cut("\n"+text, "\n"+key+" ")
		text, _, _ = strings.Cut(text, "\n")
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s of %s: %v", name, dir, err)
	}
	if strings.HasSuffix(name, "_usec") {
		n *= 1000
	}
	return n
}

func (c *container) stats(t *testing.T) *cri.ContainerStats {
	t.Helper()
	resp, err := c.pod.w.Runtime().ContainerStats(t.Context(), &cri.ContainerStatsRequest{ContainerId: c.id})
	if err != nil {
		t.Fatalf("ContainerStats: %v", err)
	}
	return resp.Stats
}

// near compares values that hardly change between two readings.
func near(t *testing.T, what string, got *cri.UInt64Value, want, tolerance uint64) {
	t.Helper()
	if got == nil || math.Abs(float64(got.Value)-float64(want)) > float64(tolerance) {
		t.Errorf("%s is %v, the kernel says %d", what, got, want)
	}
}

// between compares a growing value with earlier and later readings.
func between(t *testing.T, what string, got *cri.UInt64Value, before, after uint64) {
	t.Helper()
	if got == nil || got.Value < before || got.Value > after {
		t.Errorf("%s is %v, the kernel says %d before and %d after", what, got, before, after)
	}
}

func TestContainerStatsAreTheKernels(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	c := p.start(t, "alloc 20 ; sleep", func(c *cri.ContainerConfig) {
		c.Annotations["example.com/some"] = "thing"
		c.Linux.Resources.MemoryLimitInBytes = 64 * mib
	})
	c.says(t, "allocated")
	cpu, faults, major := c.counter(t, cpuTime), c.counter(t, pageFaults), c.counter(t, majorFaults)
	pressures := c.pressures(t)
	began := time.Now().UnixNano()
	s := c.stats(t)
	ended := time.Now().UnixNano()

	equal(t, "id", s.Attributes.Id, c.id)
	if !proto.Equal(s.Attributes.Metadata, c.config.Metadata) {
		t.Errorf("metadata is %v, want %v", s.Attributes.Metadata, c.config.Metadata)
	}
	equal(t, "label", s.Attributes.Labels["io.kubernetes.container.name"], c.config.Metadata.Name)
	equal(t, "annotation", s.Attributes.Annotations["example.com/some"], "thing")
	for what, at := range map[string]int64{"CPU": s.GetCpu().GetTimestamp(), "memory": s.GetMemory().GetTimestamp(), "swap": s.GetSwap().GetTimestamp()} {
		if at < began || at > ended {
			t.Errorf("timestamp of %s is %d, the call was from %d to %d", what, at, began, ended)
		}
	}
	between(t, "CPU time", s.Cpu.UsageCoreNanoSeconds, cpu, c.counter(t, cpuTime))
	between(t, "page faults", s.Memory.PageFaults, faults, c.counter(t, pageFaults))
	between(t, "major page faults", s.Memory.MajorPageFaults, major, c.counter(t, majorFaults))
	const batch = mib // the kernel counts memory per CPU and adds up now and then
	used := c.counter(t, memoryUsed)
	near(t, "memory", s.Memory.UsageBytes, used, batch)
	near(t, "working set", s.Memory.WorkingSetBytes, used-c.counter(t, inactiveFiles), batch)
	near(t, "RSS", s.Memory.RssBytes, c.counter(t, rss), batch)
	if ws := s.Memory.WorkingSetBytes.GetValue(); ws < 20*mib {
		t.Errorf("working set is %d with 20 MiB in use", ws)
	}
	equal(t, "available memory and working set", s.Memory.AvailableBytes.GetValue()+s.Memory.WorkingSetBytes.GetValue(), 64*mib)
	near(t, "swap", s.Swap.SwapUsageBytes, c.counter(t, swapUsed), batch)
	checkPressures(t, s, pressures, c.pressures(t))
}

// pressures returns the totals of a v2 cgroup, in microseconds by file and
// kind, if the container is in one.
func (c *container) pressures(t *testing.T) map[string]uint64 {
	t.Helper()
	own := ""
	for _, line := range c.cgroups(t).Cgroups {
		if dir, ok := strings.CutPrefix(line, "0::"); ok && strings.Contains(dir, c.id) {
			own = dir
		}
	}
	if own == "" {
		return nil
	}
	out := map[string]uint64{}
	for _, file := range []string{"cpu.pressure", "memory.pressure", "io.pressure"} {
		text, err := os.ReadFile(filepath.Join("/sys/fs/cgroup", own, file))
		if err != nil {
			text, err = os.ReadFile(filepath.Join("/sys/fs/cgroup/unified", own, file))
		}
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(text)) {
			kind, _, _ := strings.Cut(line, " ")
			_, total, _ := strings.Cut(strings.TrimSpace(line), "total=")
			if out[file+" "+kind], err = strconv.ParseUint(total, 10, 64); err != nil {
				t.Fatalf("%s: %v in %q", file, err, text)
			}
		}
	}
	return out
}

// checkPressures checks the pressures against the kernel's totals before and
// after.
func checkPressures(t *testing.T, s *cri.ContainerStats, before, after map[string]uint64) {
	t.Helper()
	for file, psi := range map[string]*cri.PsiStats{"cpu.pressure": s.Cpu.Psi, "memory.pressure": s.Memory.Psi, "io.pressure": s.GetIo().GetPsi()} {
		for kind, got := range map[string]*cri.PsiData{"some": psi.GetSome(), "full": psi.GetFull()} {
			least, told := before[file+" "+kind]
			most := after[file+" "+kind]
			switch {
			case !told && got != nil:
				t.Errorf("%s %s is %v, the kernel does not tell it", kind, file, got)
			case told && (got == nil || got.Total/1000 < least || got.Total/1000 > most):
				t.Errorf("%s %s is %v, the kernel says %d before and %d after, in microseconds", kind, file, got, least, most)
			}
		}
	}
}

// Only this test reads the node's stats, so the window is known.
func TestCPURateOfABusyContainer(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	p := w.run(t, handlers[0])
	c := p.start(t, "burn", func(c *cri.ContainerConfig) { c.Linux.Resources.CpuShares = 8192 })
	first := c.stats(t).Cpu
	if first.UsageNanoCores != nil {
		t.Errorf("the first reading has the rate %v already", first.UsageNanoCores)
	}
	var second *cri.CpuUsage
	wait.For(t, "a rate", func() bool { second = c.stats(t).Cpu; return second.UsageNanoCores != nil })
	seconds := float64(second.Timestamp-first.Timestamp) / 1e9
	if seconds < 1 {
		t.Errorf("the rate is the mean of %f seconds", seconds)
	}
	want := float64(second.UsageCoreNanoSeconds.Value-first.UsageCoreNanoSeconds.Value) / seconds
	near(t, "rate", second.UsageNanoCores, uint64(want), uint64(want/1000))
	// One CPU, or the part of it that is free.
	if rate := second.UsageNanoCores.Value; rate < 1e6 || rate > 2e9 {
		t.Errorf("a busy loop uses %d nanocores", rate)
	}
	pod := p.stats(t).Linux.Cpu
	between(t, "the pod's CPU time", pod.UsageCoreNanoSeconds, second.UsageCoreNanoSeconds.Value, c.stats(t).Cpu.UsageCoreNanoSeconds.Value)
}

func TestWritableLayerGrows(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, handlers[0])
	c := p.start(t, "sleep")
	before := c.stats(t).WritableLayer
	if before.GetTimestamp() == 0 || before.InodesUsed.GetValue() == 0 || before.UsedBytes.GetValue() > mib {
		t.Errorf("a new container's writable layer is %v", before)
	}
	info, err := w.Images().ImageFsInfo(t.Context(), &cri.ImageFsInfoRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(before.GetFsId(), info.ContainerFilesystems[0].FsId) {
		t.Errorf("file system is %v, ImageFsInfo says %v", before.GetFsId(), info.ContainerFilesystems[0].FsId)
	}
	root := filepath.Join("/proc", strconv.Itoa(w.processesOf(t, c.id)[0]), "root")
	for i := range 10 {
		if err := os.WriteFile(filepath.Join(root, "file"+strconv.Itoa(i)), make([]byte, mib), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var inodes uint64
	err = filepath.WalkDir(filepath.Join(w.StateRoot(), "containers", c.id, "upper"), func(string, fs.DirEntry, error) error {
		inodes++
		return nil
	})
	if err != nil || inodes < 11 {
		t.Fatalf("the upper directory has %d inodes, %v", inodes, err)
	}
	var now *cri.FilesystemUsage
	grown := func() bool {
		now = c.stats(t).WritableLayer
		return now.UsedBytes.GetValue() >= 10*mib && now.InodesUsed.GetValue() == inodes
	}
	if !wait.Until(t.Context(), grown) { // it is measured every 10 s
		t.Fatalf("writable layer is %v after 10 MiB were written into %d inodes", now, inodes)
	}
	if now.Timestamp <= before.Timestamp {
		t.Errorf("timestamp went from %d to %d", before.Timestamp, now.Timestamp)
	}
}

func TestStatsOfContainersThatDoNotRun(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	created := p.create(t, "sleep")
	if s := created.stats(t); s.GetAttributes().GetId() != created.id || s.Cpu == nil || s.Memory == nil || s.WritableLayer == nil {
		t.Errorf("stats of a created container are %v", s)
	}
	exited := p.start(t, "echo done")
	exited.wait(t)
	// crictl takes a container without CPU and memory for one that is not
	// running.
	if s := exited.stats(t); s.GetAttributes().GetId() != exited.id || s.Cpu != nil || s.Memory != nil || s.Swap != nil || s.WritableLayer == nil {
		t.Errorf("stats of an exited container are %v", s)
	}
	exited.remove(t)
	_, err := w.Runtime().ContainerStats(t.Context(), &cri.ContainerStatsRequest{ContainerId: exited.id})
	wantCode(t, err, codes.NotFound, exited.id)
	list, err := w.Runtime().ListContainerStats(t.Context(), &cri.ListContainerStatsRequest{Filter: &cri.ContainerStatsFilter{Id: exited.id}})
	if err != nil || len(list.Stats) != 0 {
		t.Errorf("the list of a removed container is %v, %v", list.GetStats(), err)
	}
}

func TestContainerStatsFilters(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p, other := w.run(t, handlers[0]), w.run(t, handlers[1])
	label := func(c *cri.ContainerConfig) { c.Labels["test"] = t.Name() }
	a, b := p.start(t, "sleep", label), p.start(t, "sleep")
	c := other.start(t, "sleep", label)
	for name, test := range map[string]struct {
		filter *cri.ContainerStatsFilter
		want   []string
	}{
		"id":             {&cri.ContainerStatsFilter{Id: a.id}, []string{a.id}},
		"prefix":         {&cri.ContainerStatsFilter{Id: b.id[:20]}, []string{b.id}},
		"pod":            {&cri.ContainerStatsFilter{PodSandboxId: p.id[:20]}, []string{a.id, b.id}},
		"labels":         {&cri.ContainerStatsFilter{LabelSelector: map[string]string{"test": t.Name()}}, []string{a.id, c.id}},
		"pod and labels": {&cri.ContainerStatsFilter{PodSandboxId: other.id, LabelSelector: map[string]string{"test": t.Name()}}, []string{c.id}},
		"nothing":        {&cri.ContainerStatsFilter{Id: a.id, PodSandboxId: other.id}, nil},
	} {
		list, err := w.Runtime().ListContainerStats(t.Context(), &cri.ListContainerStatsRequest{Filter: test.filter})
		if err != nil {
			t.Fatal(err)
		}
		equalSets(t, name, idsOf(list.Stats), test.want)
		stream, err := w.Runtime().StreamContainerStats(t.Context(), &cri.StreamContainerStatsRequest{Filter: test.filter})
		if err != nil {
			t.Fatal(err)
		}
		var streamed []string
		receive(t, stream.Recv, func(m *cri.StreamContainerStatsResponse) { streamed = append(streamed, idsOf(m.ContainerStats)...) })
		equalSets(t, name+", as a stream", streamed, test.want)
	}
	all, err := w.Runtime().ListContainerStats(t.Context(), &cri.ListContainerStatsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{a.id, b.id, c.id} {
		if !contains(idsOf(all.Stats), id) {
			t.Errorf("the list without a filter lacks %s", id)
		}
	}
}

// equalSets compares ids in any order.
func equalSets(t *testing.T, what string, got, want []string) {
	t.Helper()
	equalSlices(t, what, slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(want)))
}

func idsOf[S interface{ GetAttributes() A }, A interface{ GetId() string }](stats []S) []string {
	var ids []string
	for _, s := range stats {
		ids = append(ids, s.GetAttributes().GetId())
	}
	return ids
}
