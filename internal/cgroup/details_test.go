package cgroup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

const everyPart = CPUPart | MemoryPart | IOPart | TasksPart | HugePagesPart | OOMPart | PressurePart | LimitsPart | QuotaPart

func (tr tree) details(parts Parts) Details {
	tr.t.Helper()
	d, err := tr.meter.Details(parts)
	if err != nil {
		tr.t.Error(err)
	}
	return d
}

func num(n uint64) *uint64 { return &n }

// detailsTreeV2 has filesV2 and these files, as Linux 6.12 writes them.
func detailsTreeV2(t *testing.T) (tree, Details) {
	tr := v2Tree(t)
	tr.meter.sizes = []string{"1GB", "2MB"}
	for file, text := range map[string]string{
		"cpu.stat":            "usage_usec 4711\nuser_usec 4000\nsystem_usec 711\nnr_periods 10\nnr_throttled 3\nthrottled_usec 500\nnr_bursts 2\nburst_usec 7\n",
		"cpu.max":             "20000 100000\n",
		"cpu.weight":          "39\n",
		"memory.stat":         "anon 1\nfile 2\nkernel 3\nfile_mapped 4\ninactive_file 20971520\nactive_file 5\npgfault 6\npgmajfault 7\n",
		"memory.peak":         "209715200\n",
		"memory.min":          "0\n",
		"memory.swap.max":     "max\n",
		"memory.events":       "low 0\nhigh 0\nmax 8\noom 2\noom_kill 1\noom_group_kill 0\n",
		"pids.max":            "max\n",
		"io.stat":             "8:16 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=5 dios=6\n8:0 rbytes=7 wbytes=0 rios=8 wios=0 dbytes=0 dios=0 cost.usage=9\n7:0 \n",
		"hugetlb.2MB.current": "2097152\n",
		"hugetlb.2MB.events":  "max 11\n",
	} {
		tr.write("", file, text)
	}
	return tr, Details{
		CPU: &CPUDetails{Total: num(4_711_000), User: num(4_000_000), System: num(711_000), Periods: num(10), ThrottledPeriods: num(3),
			ThrottledTime: num(500_000), Bursts: num(2), BurstTime: num(7000)},
		Memory: &MemoryDetails{Usage: num(100 << 20), MaxUsage: num(200 << 20), WorkingSet: num(80 << 20), RSS: num(1), Cache: num(2), Kernel: num(3),
			Mapped: num(4), InactiveFile: num(20 << 20), ActiveFile: num(5), Swap: num(8192), LimitHits: num(8),
			Faults: num(6), MajorFaults: num(7), OwnFaults: num(6), OwnMajorFaults: num(7)},
		IO: []DeviceIO{
			{8, 0, []Operation{{"Read", num(7), num(8)}, {"Write", num(0), num(0)}}},
			{8, 16, []Operation{{"Read", num(1), num(3)}, {"Write", num(2), num(4)}}},
		},
		Tasks: num(7), TaskLimit: num(0), OOMKills: num(1),
		HugePages:   []HugePages{{Size: "2MB", Usage: num(2 << 20), LimitHits: num(11)}},
		Limits:      Limits{CPUShares: num(998), SharesOfWeight: true, CPUPeriod: num(100000), CPUQuota: num(20000), Memory: num(200 << 20), MemorySwap: num(0), MemoryReservation: num(0)},
		CPUPressure: usageV2.CPU.Pressure, MemoryPressure: usageV2.Memory.Pressure, IOPressure: usageV2.IO,
	}
}

// detailsTreeV1 is a hybrid tree, with files as Linux 6.18 writes them.
func detailsTreeV1(t *testing.T) (tree, Details) {
	tr := v1Tree(t, "", "blkio", "hugetlb")
	tr.meter.sizes = []string{"2MB"}
	for place, text := range map[string]string{
		"cpu,cpuacct cpuacct.stat":                        "user 150\nsystem 25\n",
		"cpu,cpuacct cpu.stat":                            "nr_periods 10\nnr_throttled 3\nthrottled_time 500\nnr_bursts 2\nburst_time 7\n",
		"cpu,cpuacct cpu.shares":                          "512\n",
		"cpu,cpuacct cpu.cfs_period_us":                   "100000\n",
		"cpu,cpuacct cpu.cfs_quota_us":                    "-1\n",
		"memory memory.stat":                              "cache 9\nrss 9\npgfault 1\npgmajfault 2\ntotal_cache 3\ntotal_rss 4\ntotal_mapped_file 5\ntotal_swap 6\ntotal_pgfault 7\ntotal_pgmajfault 8\ntotal_inactive_file 20971520\ntotal_active_file 9\n",
		"memory memory.max_usage_in_bytes":                "209715200\n",
		"memory memory.kmem.usage_in_bytes":               "10\n",
		"memory memory.failcnt":                           "11\n",
		"memory memory.soft_limit_in_bytes":               "9223372036854771712\n",
		"memory memory.oom_control":                       "oom_kill_disable 0\nunder_oom 0\noom_kill 12\n",
		"pids pids.max":                                   "1024\n",
		"blkio blkio.throttle.io_service_bytes_recursive": "8:0 Read 1\n8:0 Write 2\n8:0 Sync 3\n8:0 Async 0\n8:0 Discard 0\n8:0 Total 3\nTotal 3\n",
		"blkio blkio.throttle.io_serviced_recursive":      "8:0 Read 4\n8:0 Total 4\nTotal 4\n",
		"hugetlb hugetlb.2MB.usage_in_bytes":              "2097152\n",
		"hugetlb hugetlb.2MB.max_usage_in_bytes":          "4194304\n",
		"hugetlb hugetlb.2MB.failcnt":                     "13\n",
	} {
		names, file, _ := strings.Cut(place, " ")
		tr.write(names, file, text)
	}
	for _, file := range []string{"cpu.pressure", "memory.pressure", "io.pressure"} {
		tr.write("", file, filesV2[file])
	}
	return tr, Details{
		CPU: &CPUDetails{Total: num(123456789), User: num(1_500_000_000), System: num(250_000_000), Periods: num(10), ThrottledPeriods: num(3),
			ThrottledTime: num(500), Bursts: num(2), BurstTime: num(7)},
		Memory: &MemoryDetails{Usage: num(100 << 20), MaxUsage: num(200 << 20), WorkingSet: num(80 << 20), Cache: num(3), RSS: num(4), Mapped: num(5),
			Swap: num(6), Faults: num(7), MajorFaults: num(8), OwnFaults: num(1), OwnMajorFaults: num(2), InactiveFile: num(20 << 20), ActiveFile: num(9),
			Kernel: num(10), LimitHits: num(11)},
		IO: []DeviceIO{{8, 0, []Operation{{"Read", num(1), num(4)}, {"Write", num(2), nil}, {"Sync", num(3), nil}, {"Async", num(0), nil},
			{"Discard", num(0), nil}, {"Total", num(3), num(4)}}}},
		Tasks: num(7), TaskLimit: num(1024), OOMKills: num(12),
		HugePages:   []HugePages{{"2MB", num(2 << 20), num(4 << 20), num(13)}},
		Limits:      Limits{CPUShares: num(512), CPUPeriod: num(100000), CPUQuota: num(0), Memory: num(200 << 20), MemorySwap: num(300 << 20), MemoryReservation: num(0)},
		CPUPressure: usageV2.CPU.Pressure, MemoryPressure: usageV2.Memory.Pressure, IOPressure: usageV2.IO,
	}
}

func TestDetails(t *testing.T) {
	t.Parallel()
	for name, make := range map[string]func(*testing.T) (tree, Details){"v2": detailsTreeV2, "hybrid": detailsTreeV1} {
		tr, want := make(t)
		got := tr.details(everyPart)
		for i := range reflect.TypeFor[Details]().NumField() {
			g, w := reflect.ValueOf(got).Field(i), reflect.ValueOf(want).Field(i)
			if !reflect.DeepEqual(g.Interface(), w.Interface()) {
				t.Errorf("%s: %s is %s,\nwant %s", name, reflect.TypeFor[Details]().Field(i).Name, spelled(g.Interface()), spelled(w.Interface()))
			}
		}
		if none := tr.details(0); !reflect.DeepEqual(none, Details{}) {
			t.Errorf("%s: without parts there are %s", name, spelled(none))
		}
	}
}

// A cgroup that is gone or has no controllers has no details.
func TestDetailsOfAMissingCgroup(t *testing.T) {
	t.Parallel()
	for _, hierarchies := range [][]string{{""}, {"cpu,cpuacct", "memory", "pids", "blkio", "hugetlb"}, {"name=systemd"}} {
		tr := newTree(t, hierarchies...)
		tr.meter.sizes = []string{"2MB"}
		if d := tr.details(everyPart); !reflect.DeepEqual(d, Details{}) {
			t.Errorf("%v: details are %s", hierarchies, spelled(d))
		}
		if p, err := tr.meter.Processes(1); err != nil || p != nil && p.Count != 0 {
			t.Errorf("%v: processes are %v, %v", hierarchies, p, err)
		}
	}
}

func TestDetailsThatMakeNoSense(t *testing.T) {
	t.Parallel()
	for file, text := range map[string]string{
		"cpu.max": "20000\n", "memory.max": "much\n", "io.stat": "8 rbytes=1\n", "pids.max": "-2\n", "memory.events": "max many\n",
	} {
		tr, _ := detailsTreeV2(t)
		tr.write("", file, text)
		d, err := tr.meter.Details(everyPart)
		if err == nil || !strings.Contains(err.Error(), file) {
			t.Errorf("%s: error is %v", file, err)
		}
		if d.CPU == nil {
			t.Errorf("%s spoils the rest", file)
		}
	}
}

// Loop devices come and go; the devices that a cgroup has used must not make a
// series each.
func TestDevicesAreBounded(t *testing.T) {
	t.Parallel()
	tr, _ := detailsTreeV2(t)
	tr.write("", "io.stat", strings.Repeat("7:1 rbytes=1\n", 3)+func() (text string) {
		for i := range 200 {
			text += "7:" + string(rune('0'+i/100)) + string(rune('0'+i/10%10)) + string(rune('0'+i%10)) + " rbytes=1 wbytes=2\n"
		}
		return text
	}())
	if n := len(tr.details(IOPart).IO); n != maxDevices {
		t.Errorf("there are %d devices, want %d", n, maxDevices)
	}
}

// Processes of real cgroups, nested like those that a container may make.
func TestProcesses(t *testing.T) {
	t.Parallel()
	top := scratch(t)
	t.Cleanup(func() {
		if err := Remove(context.Background(), top); err != nil {
			t.Error(err)
		}
	})
	pids, files, sockets := make([]int, 2), 0, 0
	for i, at := range []string{top, top + "/below"} {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		a, b := os.NewFile(uintptr(pair[0]), "a"), os.NewFile(uintptr(pair[1]), "b")
		cmd := exec.Command("sh", "-c", "ulimit -S -n 300; exec cat")
		cmd.ExtraFiles = []*os.File{a, b}
		in, inErr := cmd.StdinPipe()
		out, outErr := cmd.StdoutPipe()
		err = errors.Join(inErr, outErr, Start(at, func(a *syscall.SysProcAttr) error {
			cmd.SysProcAttr = a
			return cmd.Start()
		}), a.Close(), b.Close())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			in.Close()
			cmd.Wait()
		})
		in.Write([]byte("x"))
		if _, err := out.Read(make([]byte, 1)); err != nil { // it is cat by now
			t.Fatal(err)
		}
		pids[i] = cmd.Process.Pid
		dir := fmt.Sprintf("/proc/%d/fd/", pids[i])
		open, err := os.ReadDir(dir) // the parent of the test may have left it more than the two
		if err != nil {
			t.Fatal(err)
		}
		files += len(open)
		for _, o := range open {
			if to, _ := os.Readlink(dir + o.Name()); strings.HasPrefix(to, "socket:") {
				sockets++
			}
		}
	}
	ms, err := NewMeters()
	if err != nil {
		t.Fatal(err)
	}
	m, err := ms.Of(top)
	if err != nil {
		t.Fatal(err)
	}
	var p *Processes
	if err := Start(top, func(*syscall.SysProcAttr) (err error) { // with a thread of this process in it
		p, err = m.Processes(pids[1])
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if sockets < 4 {
		t.Errorf("there are %d sockets", sockets)
	}
	if p.Count != 2 || p.Files == nil || *p.Files != uint64(files) || p.Sockets == nil || *p.Sockets != uint64(sockets) || p.FileLimit == nil || *p.FileLimit != 300 {
		t.Errorf("processes are %s", spelled(*p))
	}
	if p, _ := m.Processes(1); p.FileLimit != nil {
		t.Errorf("the limit of a process elsewhere is %d", *p.FileLimit)
	}
}

func TestDescriptors(t *testing.T) {
	t.Parallel()
	var files []*os.File
	for range 40 {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, r, w)
	}
	all, _ := descriptors(os.Getpid(), maxFiles)
	if all < 80 {
		t.Errorf("%d descriptors", all)
	}
	if n, sockets := descriptors(os.Getpid(), 10); n < 80 || sockets != 0 {
		t.Errorf("of a process with more than 10 descriptors there are %d, %d sockets", n, sockets)
	}
	for _, f := range files {
		f.Close()
	}
}

func TestHugePageSizes(t *testing.T) {
	t.Parallel()
	root := fstest.MapFS{}
	for _, name := range []string{"hugepages-1048576kB", "hugepages-2048kB", "hugepages-64kB", "nonsense"} {
		root["sys/kernel/mm/hugepages/"+name+"/nr_hugepages"] = &fstest.MapFile{}
	}
	if got := strings.Join(HugePageSizes(root), " "); got != "1GB 2MB 64KB" {
		t.Errorf("sizes are %s", got)
	}
	if got := HugePageSizes(fstest.MapFS{}); got != nil {
		t.Errorf("sizes without huge pages are %v", got)
	}
}

func TestSharesOfWeight(t *testing.T) {
	t.Parallel()
	for weight, want := range map[uint64]uint64{0: 2, 1: 2, 39: 998, 100: 2597, 10000: 262144, 20000: 262144} {
		if got := sharesOf(weight); got != want {
			t.Errorf("weight %d is %d shares, want %d", weight, got, want)
		}
	}
}

// A pressure file is parsed as written, and anything else is refused or
// ignored.
func FuzzPressure(f *testing.F) {
	f.Add([]byte("some avg10=0.12 avg60=0.03 avg300=0.00 total=4711\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"))
	f.Add([]byte("some avg10=NaN total=18446744073709551615\n"))
	f.Add([]byte("some  avg10\nnone x=y"))
	f.Add([]byte("full total=-1"))
	f.Fuzz(func(t *testing.T, text []byte) {
		p, err := parsePressure(text)
		if err != nil {
			if p != nil || !errors.Is(err, fault.Invalid) || len(err.Error()) > 1000 {
				t.Errorf("%q: %v", text, err)
			}
			return
		}
		again := ""
		for kind, s := range map[string]*Stall{"some": p.Some, "full": p.Full} {
			if s != nil {
				again += fmt.Sprintf("%s avg10=%g avg60=%g avg300=%g total=%d\n", kind, s.Avg10, s.Avg60, s.Avg300, s.Total/1000)
			}
		}
		if same, err := parsePressure([]byte(again)); err != nil || (same.Some == nil) != (p.Some == nil) || (same.Full == nil) != (p.Full == nil) {
			t.Errorf("%q is read as %q, and that as %+v, %v", text, again, same, err)
		}
	})
}

// Block I/O is reported for a bounded number of devices, each once, in order.
func FuzzBlockIO(f *testing.F) {
	f.Add([]byte("8:0 rbytes=4096 wbytes=0 rios=1 wios=0 dbytes=0 dios=0"), true)
	f.Add([]byte("8:0 Read 4096"), false)
	f.Add([]byte("8:0 Read"), false)
	f.Add([]byte("x:1 a"), true)
	f.Fuzz(func(t *testing.T, line []byte, v2 bool) {
		devices := blockIO{}
		visit := devices.v1(func(op *Operation, n uint64) { op.Bytes = &n })
		if v2 {
			visit = devices.v2
		}
		words := bytes.Fields(line)
		if len(words) < 2 {
			return
		}
		device, err := deviceNumber(words[0])
		if err == nil {
			err = visit(device, words[1:])
		}
		if err != nil && !errors.Is(err, fault.Invalid) {
			t.Errorf("%q: %v", line, err)
		}
		for i := range uint64(2 * maxDevices) {
			if again := visit([2]uint64{i % 7, i}, words[1:]); err == nil && again != nil {
				t.Errorf("%q is refused of another device: %v", line, again)
			}
		}
		all := devices.sorted()
		for i, d := range all {
			if i > 0 && (d.Major < all[i-1].Major || d.Major == all[i-1].Major && d.Minor <= all[i-1].Minor) {
				t.Errorf("%q: %v", line, all)
			}
		}
		if len(all) > maxDevices {
			t.Errorf("%d devices", len(all))
		}
	})
}
