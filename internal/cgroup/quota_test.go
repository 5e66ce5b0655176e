package cgroup

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// The kernel accepts exactly the quota that Quota returns, and no more.
func TestQuota(t *testing.T) {
	t.Parallel()
	cgroup := scratch(t)
	child := cgroup + "/a/b"
	if err := Make(child); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { remove(t, cgroup) })
	if err := WriteFile(cgroup, "cpu.cfs_period_us", "50000"); errors.Is(err, fault.NotFound) {
		if quota, _, err := Quota(child); quota != 0 || err != nil {
			t.Errorf("on cgroup v2: %d, %v", quota, err)
		}
		return
	} else if err != nil {
		t.Fatal(err)
	}
	if err := WriteFile(cgroup, "cpu.cfs_quota_us", "20000"); err != nil {
		t.Fatal(err)
	}
	for _, of := range []string{cgroup, child, child + "/missing"} {
		if quota, period, err := Quota(of); quota != 20000 || period != 50000 || err != nil {
			t.Errorf("%s: %d of %d, %v", of, quota, period, err)
		}
	}
	if err := WriteFile(child, "cpu.cfs_quota_us", "40000"); err != nil { // of 100000
		t.Errorf("the kernel refuses as much: %v", err)
	}
	if err := WriteFile(child, "cpu.cfs_quota_us", "41000"); !errors.Is(err, unix.EINVAL) {
		t.Errorf("more than that: %v", err)
	}
	if _, _, err := Quota("relative"); !errors.Is(err, fault.Invalid) {
		t.Errorf("a relative path: %v", err)
	}
}
