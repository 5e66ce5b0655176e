package cgroup

import (
	"bytes"
	"io/fs"
	"os"
	"strconv"
	"strings"
)

// Offers is what the node's kernel tells of cgroups beyond what all do.
type Offers struct {
	Pressure    bool
	HugePages   bool
	HugePageMax bool // the most huge pages ever used
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

// HugePageSizes are the sizes of huge pages that the kernel of root offers, as
// hugetlb's files name them: 2MB. They depend on the processor.
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
