package cgroup

import (
	"errors"
	"path"
	"strconv"

	"github.com/crius-run/crius/internal/fault"
)

// Quota returns how much CPU time the cgroups below this one may have: quota
// microseconds in each period, from the nearest cgroup, itself or above it,
// that has a limit. On cgroup v1 the kernel refuses more. 0 means no limit, as
// always on v2, where more is no error and without effect.
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
