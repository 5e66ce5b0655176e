package spec

import (
	"fmt"
	"os"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The page on handlers says how large the sandboxes of each kind of handler
// are, and what their runtimes are told, by an example. This is that example.
func TestSizesInTheManual(t *testing.T) {
	manual, err := os.ReadFile("../../docs/handlers.md")
	if err != nil {
		t.Fatal(err)
	}
	for row, change := range map[string]func(*Facts){
		"runc, crun, youki":           func(*Facts) {},
		"gVisor, by runsc":            func(f *Facts) { f.OwnKernel = true },
		"gVisor, by its shim":         func(f *Facts) { f.OwnKernel = true },
		"Kata 1, by its command line": func(f *Facts) { f.OwnKernel, f.VirtualMachine = true, true },
		"any other shim":              func(f *Facts) { f.OwnKernel, f.VirtualMachine = true, true },
	} {
		in := typical()
		in.Request.Container, in.Request.Image = nil, nil
		linux := in.Request.Pod.Linux
		linux.Resources = &cri.LinuxContainerResources{CpuPeriod: 100_000, CpuQuota: 100_000, MemoryLimitInBytes: 500 << 20}
		linux.Overhead = &cri.LinuxContainerResources{CpuPeriod: 100_000, CpuQuota: 25_000, MemoryLimitInBytes: 160 << 20}
		change(&in.Facts)
		s, err := Sandbox(in, []string{"/pause"})
		if err != nil {
			t.Fatal(err)
		}
		var line string
		for candidate := range strings.Lines(string(manual)) {
			if strings.HasPrefix(candidate, "| "+row+" |") {
				line = candidate
			}
		}
		cells := strings.Split(line, "|")
		if len(cells) != 7 {
			t.Errorf("the manual has no row %q", row)
			continue
		}
		if limits := limitsText(s.Linux.Resources); !strings.Contains(cells[2], limits) {
			t.Errorf("%s: the pod's own container has the limits %q, the manual says %q", row, limits, cells[2])
		}
		told := s.Annotations["io.kubernetes.cri.sandbox-memory"] == fmt.Sprint(500<<20) && s.Annotations["io.kubernetes.cri.sandbox-cpu-quota"] == "100000" &&
			strings.Contains(s.Annotations["io.kubernetes.cri-o.PodLinuxOverhead"], fmt.Sprint(160<<20))
		if !told || in.Facts.VirtualMachine && !strings.Contains(cells[3], "500 MiB, 1 CPU; overhead apart") {
			t.Errorf("%s: the runtime is told %v, the manual says %q", row, s.Annotations, cells[3])
		}
	}
}

// limitsText returns limits of memory and CPU as the manual writes them.
func limitsText(r *specs.LinuxResources) string {
	if r == nil || r.Memory == nil && (r.CPU == nil || r.CPU.Quota == nil) {
		return "none"
	}
	return fmt.Sprintf("%d MiB, %g CPU", *r.Memory.Limit>>20, float64(*r.CPU.Quota)/float64(*r.CPU.Period))
}
