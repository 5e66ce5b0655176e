package cgroup

import (
	"errors"
	"path"
	"strconv"

	"github.com/crius-run/crius/internal/fault"
)

// Quota is how much CPU time the cgroups below one may be given: so many
// microseconds in each period, as the nearest cgroup says that is the one itself or
// above it and has a limit. The kernel of cgroup v1 refuses more. 0 is no limit, as
// always on v2, where more is no error and of no use.
func Quota(cgroup string) (quota, period int64, err error) {
	for ; ; cgroup = path.Dir(cgroup) {
		quota, err = readNumber(cgroup, "cpu.cfs_quota_us")
		if errors.Is(err, fault.NotFound) { // v2, or not made yet: its parent's counts
			quota, err = 0, nil
		}
		if err != nil {
			return 0, 0, err
		}
		if quota > 0 {
			period, err = readNumber(cgroup, "cpu.cfs_period_us")
			return quota, period, err
		}
		if cgroup == "/" || cgroup == "." {
			return 0, 0, nil
		}
	}
}

func readNumber(cgroup, name string) (int64, error) {
	text, err := ReadFile(cgroup, name)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(text, 10, 64)
}
