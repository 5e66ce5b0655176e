package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/crius-run/crius/internal/fault"
)

const someCgroup = "/kubepods/burstable/pod1/crius-2"

// tree is a cgroup in imitated hierarchies; the one without a name is v2.
type tree struct {
	t      *testing.T
	dir    string
	meters *Meters // of a pod
	meter  *Meter
}

func newTree(t *testing.T, hierarchies ...string) tree {
	t.Helper()
	dir := t.TempDir()
	var all []hierarchy
	for _, names := range hierarchies {
		h := hierarchy{membership{names, "/"}, filepath.Join(dir, "at", names), "/"}
		all = append(all, h)
		if err := os.MkdirAll(h.dir(someCgroup), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	meters := newMeters(all).OfPod()
	m, err := meters.Of(someCgroup)
	if err != nil {
		t.Fatal(err)
	}
	return tree{t, dir, meters, m}
}

// kept counts the descriptors of this process that refer to the tree.
func (tr tree) kept() (n int) {
	tr.t.Helper()
	links, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		tr.t.Fatal(err)
	}
	for _, link := range links {
		if to, _ := os.Readlink(link); strings.HasPrefix(to, tr.dir) {
			n++
		}
	}
	return n
}

// write gives the cgroup a file in the hierarchy with these names.
func (tr tree) write(names, file, text string) {
	tr.t.Helper()
	if err := os.WriteFile(filepath.Join(tr.dir, "at", names, someCgroup, file), []byte(text), 0o600); err != nil {
		tr.t.Fatal(err)
	}
}

func (tr tree) read() Usage {
	tr.t.Helper()
	began := time.Now()
	u, err := tr.meter.Read()
	if err != nil {
		tr.t.Error(err)
	}
	if u.Time.Before(began) || u.Time.After(time.Now()) {
		tr.t.Errorf("time of the reading is %s", u.Time)
	}
	u.Time = time.Time{}
	return u
}

// A kept directory belongs to the cgroup that has the name now, and is closed
// by Close; none is kept when descriptors are scarce.
func TestKeptDirectories(t *testing.T) {
	t.Parallel()
	tr := newTree(t, "")
	at := filepath.Join(tr.dir, "at", someCgroup)
	says := func(want uint64) {
		t.Helper()
		if u := tr.read(); u.Tasks == nil || *u.Tasks != want {
			t.Errorf("tasks are %v, want %d", u.Tasks, want)
		}
	}
	renew := func(tasks string) {
		if err := errors.Join(os.RemoveAll(at), os.MkdirAll(at, 0o755)); err != nil {
			t.Fatal(err)
		}
		tr.write("", "cgroup.procs", "")
		tr.write("", "pids.current", tasks)
	}
	renew("1\n")
	says(1)
	renew("2\n")
	says(2)
	if n := tr.kept(); n != 1 {
		t.Errorf("%d directories are kept open", n)
	}
	tr.meter.Close()
	says(2)
	if n := tr.kept(); n != 0 {
		t.Errorf("%d directories are open after the end", n)
	}
	for _, d := range tr.meter.directories {
		d.bare, d.most = false, 0
	}
	says(2)
	if n := tr.kept(); n != 0 {
		t.Errorf("%d directories are kept where descriptors are scarce", n)
	}
	if err := os.RemoveAll(at); err != nil {
		t.Fatal(err)
	}
	if u := tr.read(); !u.Gone() {
		t.Errorf("a cgroup that is gone uses %+v", u)
	}
}

// However many containers a pod has, its meters keep four directories open, and
// a new container may use the share of one that has ended.
func TestPodKeepsFewDescriptors(t *testing.T) {
	t.Parallel()
	v1 := []string{"cpu,cpuacct", "memory", "pids", "blkio", "hugetlb"}
	for name, hierarchies := range map[string][]string{"v2": {""}, "v1": v1, "hybrid": append(slices.Clone(v1), "")} {
		tr := newTree(t, hierarchies...)
		read := func(container int) *Meter {
			cgroup := fmt.Sprint(someCgroup, "/", container)
			for _, names := range hierarchies {
				if err := os.MkdirAll(filepath.Join(tr.dir, "at", names, cgroup), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			m, err := tr.meters.Of(cgroup)
			if err != nil {
				t.Fatal(err)
			}
			_, err = m.Read()
			if _, detailed := m.Details(everyPart); err != nil || detailed != nil {
				t.Errorf("%s: %v, %v", name, err, detailed)
			}
			return m
		}
		tr.read()
		first := read(0)
		if n := tr.kept(); n < 2 || n > 4 {
			t.Errorf("%s: %d descriptors are kept of a pod with a container", name, n)
		}
		var others []*Meter
		for container := range 6 {
			others = append(others, read(1+container))
		}
		if n := tr.kept(); n != 4 {
			t.Errorf("%s: %d descriptors are kept of a pod with 7 containers", name, n)
		}
		first.Close()
		fewer := tr.kept()
		others = append(others, read(7))
		if n := tr.kept(); fewer >= 4 || n != 4 {
			t.Errorf("%s: %d descriptors after the end of a container, %d with the next", name, fewer, n)
		}
		for _, m := range append(others, tr.meter) {
			m.Close()
		}
		if n := tr.kept(); n != 0 {
			t.Errorf("%s: %d descriptors after the end of the pod", name, n)
		}
	}
}

// Files as Linux 6.12 writes them, without unused parts.
var filesV2 = map[string]string{
	"cpu.stat":            "usage_usec 4711\nuser_usec 4000\nsystem_usec 711\nnice_usec 0\ncore_sched.force_idle_usec 0\nnr_periods 0\nnr_throttled 0\nthrottled_usec 0\nnr_bursts 0\nburst_usec 0\n",
	"memory.current":      "104857600\n",
	"memory.max":          "209715200\n",
	"memory.stat":         "anon 52428800\nfile 41943040\nkernel 1294336\nkernel_stack 16384\nswapcached 0\ninactive_anon 52424704\nactive_anon 4096\ninactive_file 20971520\nactive_file 20971520\nunevictable 0\npgfault 1234\npgmajfault 56\nthp_fault_alloc 2\n",
	"memory.swap.current": "8192\n",
	"memory.swap.max":     "1048576\n",
	"pids.current":        "7\n",
	"cpu.pressure":        "some avg10=1.50 avg60=0.25 avg300=0.10 total=5000\nfull avg10=0.75 avg60=0.00 avg300=0.00 total=300\n",
	"memory.pressure":     "some avg10=0.00 avg60=0.00 avg300=0.00 total=20\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=10\n",
	"io.pressure":         "some avg10=99.99 avg60=50.00 avg300=10.00 total=18446744073709\nfull avg10=88.00 avg60=0.00 avg300=0.00 total=1\n",
}

var usageV2 = Usage{
	CPU: &CPU{Total: 4_711_000, Pressure: &Pressure{
		Some: &Stall{1.5, 0.25, 0.1, 5_000_000}, Full: &Stall{0.75, 0, 0, 300_000}}},
	Memory: &Memory{
		Usage: 100 << 20, WorkingSet: new(uint64(80 << 20)), Limit: new(uint64(200 << 20)),
		RSS: new(uint64(50 << 20)), Faults: new(uint64(1234)), MajorFaults: new(uint64(56)),
		Pressure: &Pressure{Some: &Stall{Total: 20_000}, Full: &Stall{Total: 10_000}},
	},
	Swap:  &Swap{Usage: 8192, Limit: new(uint64(1 << 20))},
	IO:    &Pressure{Some: &Stall{99.99, 50, 10, 18_446_744_073_709_000}, Full: &Stall{88, 0, 0, 1000}},
	Tasks: new(uint64(7)),
}

// Files as Linux 6.18 writes them, prefixed with the hierarchies' names.
var filesV1 = map[string]string{
	"cpu,cpuacct cpuacct.usage":          "123456789\n",
	"memory memory.usage_in_bytes":       "104857600\n",
	"memory memory.limit_in_bytes":       "209715200\n",
	"memory memory.memsw.limit_in_bytes": "314572800\n",
	"memory memory.stat":                 "cache 41943040\nrss 4096\nswap 0\npgfault 1\npgmajfault 1\ninactive_file 4096\nhierarchical_memory_limit 104857600\nhierarchical_memsw_limit 314572800\ntotal_cache 41943040\ntotal_rss 52428800\ntotal_swap 8192\ntotal_pgfault 1234\ntotal_pgmajfault 56\ntotal_inactive_file 20971520\ntotal_unevictable 0\n",
	"pids pids.current":                  "7\n",
}

var usageV1 = Usage{
	CPU: &CPU{Total: 123456789},
	Memory: &Memory{
		Usage: 100 << 20, WorkingSet: new(uint64(80 << 20)), Limit: new(uint64(200 << 20)),
		RSS: new(uint64(50 << 20)), Faults: new(uint64(1234)), MajorFaults: new(uint64(56)),
	},
	Swap:  &Swap{Usage: 8192, Limit: new(uint64(100 << 20))},
	Tasks: new(uint64(7)),
}

func v2Tree(t *testing.T) tree {
	tr := newTree(t, "")
	for file, text := range filesV2 {
		tr.write("", file, text)
	}
	return tr
}

func v1Tree(t *testing.T, more ...string) tree {
	tr := newTree(t, append([]string{"cpu,cpuacct", "memory", "pids", "name=systemd"}, more...)...)
	for place, text := range filesV1 {
		names, file, _ := strings.Cut(place, " ")
		tr.write(names, file, text)
	}
	return tr
}

func TestMeterV2(t *testing.T) {
	t.Parallel()
	wantUsage(t, v2Tree(t).read(), usageV2)
}

func TestMeterV1(t *testing.T) {
	t.Parallel()
	wantUsage(t, v1Tree(t).read(), usageV1)
}

// On a hybrid node the resources are in v1, the pressures in v2.
func TestMeterHybrid(t *testing.T) {
	t.Parallel()
	tr := v1Tree(t, "")
	for _, file := range []string{"cpu.stat", "cpu.pressure", "memory.pressure", "io.pressure"} {
		tr.write("", file, filesV2[file])
	}
	want := usageV1
	want.CPU = &CPU{Total: usageV1.CPU.Total, Pressure: usageV2.CPU.Pressure}
	memory := *usageV1.Memory
	memory.Pressure = usageV2.Memory.Pressure
	want.Memory, want.IO = &memory, usageV2.IO
	wantUsage(t, tr.read(), want)
}

func wantUsage(t *testing.T, got, want Usage) {
	t.Helper()
	for i, field := range []string{"CPU", "Memory", "Swap", "IO", "Tasks"} {
		g, w := reflect.ValueOf(got).Field(i+1).Interface(), reflect.ValueOf(want).Field(i+1).Interface()
		if !reflect.DeepEqual(g, w) {
			t.Errorf("%s is %s,\nwant %s", field, spelled(g), spelled(w))
		}
	}
}

// spelled formats the values behind pointers.
func spelled(v any) string {
	switch r := reflect.ValueOf(v); {
	case r.Kind() == reflect.Pointer && r.IsNil():
		return "nil"
	case r.Kind() == reflect.Pointer:
		return "&" + spelled(r.Elem().Interface())
	case r.Kind() == reflect.Struct:
		var fields []string
		for i := range r.NumField() {
			fields = append(fields, r.Type().Field(i).Name+":"+spelled(r.Field(i).Interface()))
		}
		return "{" + strings.Join(fields, " ") + "}"
	}
	return fmt.Sprint(v)
}

func TestMeterWithoutLimits(t *testing.T) {
	t.Parallel()
	two := v2Tree(t)
	two.write("", "memory.max", "max\n")
	two.write("", "memory.swap.max", "max\n")
	one, above := v1Tree(t), v1Tree(t)
	for _, tr := range []tree{one, above} {
		for _, file := range []string{"memory.limit_in_bytes", "memory.memsw.limit_in_bytes"} {
			tr.write("memory", file, "9223372036854771712\n")
		}
	}
	one.write("memory", "memory.stat", strings.NewReplacer("limit 104857600", "limit 9223372036854771712", "limit 314572800", "limit 9223372036854771712").
		Replace(filesV1["memory memory.stat"]))
	for name, tr := range map[string]tree{"v2": two, "v1": one, "v1, with one above": above} {
		u := tr.read()
		if u.Memory == nil || u.Memory.Limit != nil || *u.Memory.WorkingSet != 80<<20 {
			t.Errorf("%s: memory is %s", name, spelled(u.Memory))
		}
		if u.Swap == nil || u.Swap.Limit != nil || u.Swap.Usage != 8192 {
			t.Errorf("%s: swap is %s", name, spelled(u.Swap))
		}
	}
}

// The two files are not read at the same moment.
func TestWorkingSetIsNeverNegative(t *testing.T) {
	t.Parallel()
	tr := v2Tree(t)
	tr.write("", "memory.current", "4096\n")
	if u := tr.read(); *u.Memory.WorkingSet != 0 {
		t.Errorf("working set is %d", *u.Memory.WorkingSet)
	}
}

func TestMeterOfWhatTheKernelDoesNotTell(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		missing []string
		gone    func(u *Usage)
	}{
		"no memory controller": {[]string{"memory.current", "memory.max", "memory.stat", "memory.swap.current", "memory.swap.max", "memory.pressure"},
			func(u *Usage) { u.Memory, u.Swap = nil, nil }},
		"no swap accounting": {[]string{"memory.swap.current", "memory.swap.max"}, func(u *Usage) { u.Swap = nil }},
		"no pids controller": {[]string{"pids.current"}, func(u *Usage) { u.Tasks = nil }},
		"no pressure": {[]string{"cpu.pressure", "memory.pressure", "io.pressure"}, func(u *Usage) {
			memory := *u.Memory
			memory.Pressure = nil
			u.CPU, u.Memory, u.IO = &CPU{Total: u.CPU.Total}, &memory, nil
		}},
		"no cgroup": {[]string{""}, func(u *Usage) { *u = Usage{} }},
	} {
		t.Run(name, func(t *testing.T) {
			tr := v2Tree(t)
			for _, file := range test.missing {
				if err := os.RemoveAll(filepath.Join(tr.dir, "at", someCgroup, file)); err != nil {
					t.Fatal(err)
				}
			}
			want := usageV2
			test.gone(&want)
			got := tr.read()
			wantUsage(t, got, want)
			if got.Gone() != (name == "no cgroup") {
				t.Errorf("Gone is %v", got.Gone())
			}
		})
	}
}

func TestMeterOfNonsense(t *testing.T) {
	t.Parallel()
	for file, text := range map[string]string{
		"cpu.stat":       "usage_usec many\n",
		"memory.current": "-1\n",
		"memory.stat":    "anon\n",
		"pids.current":   strings.Repeat("7", maxCounters),
		"io.pressure":    "some avg10=much avg60=0.00 avg300=0.00 total=0\n",
		"cpu.pressure":   "some avg10=0.00 avg60=0.00 avg300=0.00 total=-1\n",
	} {
		tr := v2Tree(t)
		tr.write("", file, text)
		u, err := tr.meter.Read()
		var at *os.PathError
		if !errors.As(err, &at) || filepath.Base(at.Path) != file || (file != "pids.current" && !errors.Is(err, fault.Invalid)) {
			t.Errorf("%s: error is %v", file, err)
		}
		if len(err.Error()) > 400 {
			t.Errorf("%s: the error has %d bytes", file, len(err.Error()))
		}
		if u.Gone() || (u.CPU == nil) != (file == "cpu.stat") || (u.Tasks == nil) != (file == "pids.current") {
			t.Errorf("%s: usage is %s", file, spelled(u))
		}
	}
	if _, err := newMeters(nil).Of("/a/../b"); !errors.Is(err, fault.Invalid) {
		t.Errorf("a meter of /a/../b: %v", err)
	}
}

func TestRate(t *testing.T) {
	t.Parallel()
	start := time.Now()
	type reading struct {
		at    time.Duration
		total uint64
		want  *uint64
	}
	for name, readings := range map[string][]reading{
		"regular":      {{0, 100, nil}, {10 * time.Second, 20e9 + 100, new(uint64(2e9))}, {20 * time.Second, 20e9 + 100, new(uint64(0))}},
		"two readers":  {{0, 0, nil}, {200 * time.Millisecond, 1e9, nil}, {10 * time.Second, 5e9, new(uint64(5e8))}, {10200 * time.Millisecond, 9e9, new(uint64(5e8))}, {20 * time.Second, 10e9, new(uint64(5e8))}},
		"frequent":     {{0, 0, nil}, {500 * time.Millisecond, 1, nil}, {999 * time.Millisecond, 2, nil}, {time.Second, 3e9, new(uint64(3e9))}, {1500 * time.Millisecond, 3e9, new(uint64(3e9))}, {2 * time.Second, 4e9, new(uint64(1e9))}},
		"a new cgroup": {{0, 7e9, nil}, {2 * time.Second, 8e9, new(uint64(5e8))}, {4 * time.Second, 1e9, nil}, {6 * time.Second, 3e9, new(uint64(1e9))}},
	} {
		var r rate
		for i, reading := range readings {
			if got := r.next(start.Add(reading.at), reading.total); !reflect.DeepEqual(got, reading.want) {
				t.Errorf("%s: rate %d is %s, want %s", name, i, spelled(got), spelled(reading.want))
			}
		}
	}
}

// Concurrent readers never see a counter go backwards, which would mean a new
// cgroup and no rate.
func TestMeterReadersMeet(t *testing.T) {
	t.Parallel()
	tr := newTree(t, "")
	tr.write("", "cpu.stat", "usage_usec 1\n")
	tr.read()
	past := time.Now().Add(-time.Hour)
	tr.meter.rate.at, tr.meter.rate.value = past, new(uint64(1))
	stop := make(chan struct{})
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				tr.meter.mu.Lock()
				tr.meter.rate.at = past // the window is over, so each reading counts
				tr.meter.mu.Unlock()
				if u, err := tr.meter.Read(); err != nil || u.CPU == nil || u.CPU.Rate == nil {
					t.Errorf("CPU is %s, %v", spelled(u.CPU), err)
					return
				}
			}
		})
	}
	file := filepath.Join(tr.dir, "at", someCgroup, "cpu.stat")
	for n := range 200 {
		next := file + ".next"
		if err := os.WriteFile(next, fmt.Appendf(nil, "usage_usec %d\n", n+2), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(next, file); err != nil { // atomically, as the kernel counts
			t.Fatal(err)
		}
	}
	close(stop)
	group.Wait()
}

func TestAdd(t *testing.T) {
	t.Parallel()
	now := time.Now()
	a, b := usageV1, usageV1
	a.Time, b.Time = now, now.Add(time.Second)
	a.CPU = &CPU{Total: 1, Rate: new(uint64(2)), Pressure: usageV2.CPU.Pressure}
	b.CPU = &CPU{Total: 10, Rate: new(uint64(20)), Pressure: usageV2.CPU.Pressure}
	a.IO, b.IO = usageV2.IO, usageV2.IO
	sum := a
	sum.Add(b)
	if !sum.Time.Equal(b.Time) {
		t.Errorf("time is that of the earlier reading")
	}
	wantUsage(t, sum, Usage{
		CPU: &CPU{Total: 11, Rate: new(uint64(22))},
		Memory: &Memory{Usage: 200 << 20, WorkingSet: new(uint64(160 << 20)), Limit: new(uint64(400 << 20)),
			RSS: new(uint64(100 << 20)), Faults: new(uint64(2468)), MajorFaults: new(uint64(112))},
		Swap:  &Swap{Usage: 16384, Limit: new(uint64(200 << 20))},
		Tasks: new(uint64(14)),
	})
	if *usageV1.Tasks != 7 || usageV1.Memory.Usage != 100<<20 || a.CPU.Total != 1 {
		t.Error("Add changed what it added")
	}
	b.CPU, b.Swap, b.Memory, b.Tasks = &CPU{Total: 10}, nil, &Memory{Usage: 1}, nil // what one does not know, the sum does not know
	sum = a
	sum.Add(b)
	wantUsage(t, sum, Usage{CPU: &CPU{Total: 11}, Memory: &Memory{Usage: 100<<20 + 1}})
}

// For a real process in a real cgroup the numbers are the kernel's.
func TestMeterOfARealCgroup(t *testing.T) {
	t.Parallel()
	cgroup := scratchTop + "/meter"
	defer func() {
		if err := Remove(t.Context(), cgroup); err != nil {
			t.Error(err)
		}
	}()
	meters, err := NewMeters()
	if err != nil {
		t.Fatal(err)
	}
	meter, err := meters.Of(cgroup)
	if err != nil {
		t.Fatal(err)
	}
	if u, err := meter.Read(); err != nil || !u.Gone() {
		t.Errorf("before there is one: %s, %v", spelled(u), err)
	}
	spin := exec.Command("sh", "-c", "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; echo done; exec sleep 1000")
	said, err := spin.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	err = Start(cgroup, func(attr *syscall.SysProcAttr) error {
		spin.SysProcAttr = attr
		return spin.Start()
	})
	if err != nil {
		t.Fatal(err)
	}
	defer spin.Wait()
	defer spin.Process.Kill()
	if _, err := said.Read(make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	first, err := meter.Read()
	if err != nil {
		t.Fatal(err)
	}
	if _, mode, _ := find(); mode != V2 && (first.Memory == nil || first.Swap == nil || first.Tasks == nil) {
		t.Errorf("v1 tells everything here, but usage is %s", spelled(first))
	}
	if first.CPU == nil || first.CPU.Total < 1e6 {
		t.Fatalf("CPU is %s after a loop", spelled(first.CPU))
	}
	if first.Tasks != nil && *first.Tasks != 1 {
		t.Errorf("%d tasks, want 1", *first.Tasks)
	}
	if text, err := os.ReadFile("/sys/fs/cgroup/memory" + cgroup + "/memory.usage_in_bytes"); err == nil {
		want, _ := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
		if diff := int64(first.Memory.Usage) - int64(want); diff > 1<<20 || diff < -1<<20 {
			t.Errorf("memory is %d, the kernel says %d", first.Memory.Usage, want)
		}
	}
}

func FuzzCounters(f *testing.F) {
	for _, text := range filesV2 {
		f.Add([]byte(text))
	}
	f.Add([]byte(filesV1["memory memory.stat"]))
	f.Fuzz(func(t *testing.T, text []byte) {
		var again strings.Builder
		err := eachCounter(text, func(name []byte, n uint64) { fmt.Fprintf(&again, "%s %d\n", name, n) })
		if err == nil && !bytes.Contains(text, []byte(" 0")) && again.String() != strings.TrimSuffix(string(text), "\n")+"\n" && len(text) > 0 {
			t.Errorf("%q was read as %q", text, again.String())
		}
		if p, err := parsePressure(text); (p == nil) == (err == nil) {
			t.Errorf("%v, %v", p, err)
		}
	})
}

// A kept directory of a removed cgroup says nothing about a new one of the same
// name, and nothing stays open after the end.
func TestKeptDirectoriesOfTheKernel(t *testing.T) {
	t.Parallel()
	cgroup := scratch(t)
	meters, err := NewMeters()
	if err != nil {
		t.Fatal(err)
	}
	meter, err := meters.OfPod().Of(cgroup)
	if err != nil {
		t.Fatal(err)
	}
	open := func() (n int) {
		links, _ := filepath.Glob("/proc/self/fd/*")
		for _, link := range links {
			if to, _ := os.Readlink(link); strings.HasSuffix(to, cgroup) && !strings.Contains(to, " (deleted)") {
				n++
			}
		}
		return n
	}
	var kept int
	for range 3 { // lives of the cgroup
		child := start(t, cgroup, "sleep 1000 & wait")
		populate(t, cgroup, 2)
		for range 2 {
			if u, err := meter.Read(); err != nil || u.CPU == nil || u.Tasks != nil && *u.Tasks != 2 {
				t.Errorf("%s, %s, %v", spelled(u.CPU), spelled(u.Tasks), err)
			}
		}
		if n := open(); n == 0 || kept != 0 && n != kept {
			t.Errorf("%d directories are open, before it were %d", n, kept)
		} else {
			kept = n
		}
		kill(t, cgroup)
		child.Wait()
		if err := Remove(t.Context(), cgroup); err != nil {
			t.Fatal(err)
		}
		if u, err := meter.Read(); err != nil || !u.Gone() {
			t.Errorf("a cgroup that is gone uses %+v, %v", u, err)
		}
	}
	again := start(t, cgroup, "sleep 1000 & wait")
	populate(t, cgroup, 2)
	meter.Close()
	if u, err := meter.Read(); err != nil || u.CPU == nil {
		t.Errorf("after the end: %+v, %v", u, err)
	}
	if n := open(); n != 0 {
		t.Errorf("%d directories are open after the end", n)
	}
	kill(t, cgroup)
	again.Wait()
	if err := Remove(t.Context(), cgroup); err != nil {
		t.Fatal(err)
	}
}
