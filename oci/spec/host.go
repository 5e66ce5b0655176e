package spec

import (
	"slices"
	"strconv"
	"strings"
)

// Host holds the facts about the node and about crius itself that the rules
// need.
type Host struct {
	Arch   string // as Go calls it
	Kernel string // release, 6.1.0-13-amd64

	// Bounding is the bounding set of crius itself: it cannot give containers
	// more.
	Bounding CapSet
	// OOMScoreAdjMin is the lowest oom_score_adj that crius may set: its own,
	// unless it has CAP_SYS_RESOURCE.
	OOMScoreAdjMin int

	CgroupV2       bool // resources are in the unified hierarchy; false on v1 and hybrid nodes
	SwapAccounting bool // memory and swap can be limited together
	HugeTLB        bool // the node has the hugetlb controller
	HugePageSizes  []string
	PidsController bool

	Seccomp, AppArmor, SELinux bool // the kernel has it and it is enabled
}

func (h Host) kernelAtLeast(want string) bool {
	have, errHave := parseKernel(h.Kernel)
	least, errLeast := parseKernel(want)
	return errHave == nil && errLeast == nil && slices.Compare(have, least) >= 0
}

// parseKernel reads the major and minor number at the start of a release.
func parseKernel(release string) ([]int, error) {
	major, rest, _ := strings.Cut(release, ".")
	end := strings.IndexFunc(rest, func(r rune) bool { return r < '0' || r > '9' })
	if end < 0 {
		end = len(rest)
	}
	a, err := strconv.Atoi(major)
	if err != nil {
		return nil, err
	}
	b, err := strconv.Atoi(rest[:end])
	return []int{a, b}, err
}
