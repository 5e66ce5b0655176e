package cgroup

import (
	"bytes"
	"io/fs"
	"os"
	"strconv"
	"strings"
)

// Offers lists optional features of cgroups in the node's kernel.
type Offers struct {
	Pressure    bool
	HugePages   bool
	HugePageMax bool // the maximum of huge pages ever used
	CPUBurst    bool
}

// Offers looks at the node's own cgroups.
func (ms *Meters) Offers() Offers {
	var o Offers
	if h, ok := ms.hierarchy(""); ok && h.v2() {
		_, err := os.Stat("/proc/pressure/cpu")
		o.Pressure = err == nil
	}
	if h, ok := ms.hierarchy("hugetlb"); ok {
		o.HugePages = len(ms.sizes) > 0
		o.HugePageMax = o.HugePages && !h.v2()
		if h.v2() {
			all, _ := os.ReadFile(h.dir("/") + "/cgroup.controllers")
			o.HugePages = o.HugePages && bytes.Contains(all, []byte("hugetlb"))
		}
	}
	if h, ok := ms.hierarchy("cpu"); ok {
		stat, _ := os.ReadFile(h.dir("/") + "/cpu.stat")
		o.CPUBurst = bytes.Contains(stat, []byte("nr_bursts"))
	}
	return o
}

// HugePageSizes returns the huge page sizes of the kernel whose files are below
// root, in the notation of hugetlb's files: 2MB. They depend on the processor.
func HugePageSizes(root fs.FS) []string {
	entries, _ := fs.ReadDir(root, "sys/kernel/mm/hugepages") // a kernel without huge pages has no such directory
	var sizes []string
	for _, e := range entries {
		kb, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimPrefix(e.Name(), "hugepages-"), "kB"), 10, 64)
		switch {
		case err != nil:
		case kb >= 1<<20:
			sizes = append(sizes, strconv.FormatUint(kb>>20, 10)+"GB")
		case kb >= 1<<10:
			sizes = append(sizes, strconv.FormatUint(kb>>10, 10)+"MB")
		default:
			sizes = append(sizes, strconv.FormatUint(kb, 10)+"KB")
		}
	}
	return sizes
}
