package spec

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/cgroup"
)

// ResolveHost reads the facts about the node and this process on which specs
// depend. They hold until either is restarted.
func ResolveHost() (Host, error) {
	host, err := hostFrom(os.DirFS("/"))
	if err != nil {
		return Host{}, fmt.Errorf("read facts about the node: %w", err)
	}
	return host, nil
}

func hostFrom(root fs.FS) (Host, error) {
	host := Host{Arch: runtime.GOARCH}
	status, err := fs.ReadFile(root, "proc/self/status")
	if err != nil {
		return Host{}, err
	}
	bounding, err := statusCaps(string(status), "CapBnd:")
	if err != nil {
		return Host{}, err
	}
	effective, err := statusCaps(string(status), "CapEff:")
	if err != nil {
		return Host{}, err
	}
	// crius cannot pass on capabilities that it lacks.
	host.Bounding = bounding & effective & allCapabilities
	if host.OOMScoreAdjMin, err = oomFloor(root, effective); err != nil {
		return Host{}, err
	}
	release, err := fs.ReadFile(root, "proc/sys/kernel/osrelease")
	if err != nil {
		return Host{}, err
	}
	host.Kernel = strings.TrimSpace(string(release))
	host.Seccomp = hasSeccomp(root)
	host.AppArmor = first(root, "sys/module/apparmor/parameters/enabled") == 'Y'
	host.SELinux = exists(root, "sys/fs/selinux/enforce") && policyLoaded(root)
	host.HugePageSizes = cgroup.HugePageSizes(root)
	err = cgroupFacts(root, &host)
	return host, err
}

// OpenFiles returns crius's own hard limit of open files, which nothing that it starts can
// exceed, or the kernel's maximum if that has been lowered below it; 0: unknown.
func OpenFiles() uint64 {
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) != nil {
		return 0
	}
	if most := MaxOpenFiles(); most != 0 {
		return min(limit.Max, most)
	}
	return limit.Max
}

// MaxOpenFiles returns the largest limit of open files that the kernel grants; 0: unknown.
func MaxOpenFiles() uint64 {
	text, err := os.ReadFile("/proc/sys/fs/nr_open")
	most, parseErr := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	if err != nil || parseErr != nil {
		return 0
	}
	return most
}

func statusCaps(status, field string) (CapSet, error) {
	for line := range strings.Lines(status) {
		if hex, ok := strings.CutPrefix(line, field); ok {
			set, err := strconv.ParseUint(strings.TrimSpace(hex), 16, 64)
			return CapSet(set), err
		}
	}
	return 0, fmt.Errorf("no %s in /proc/self/status", field)
}

func oomFloor(root fs.FS, effective CapSet) (int, error) {
	if effective.has("CAP_SYS_RESOURCE") {
		return -1000, nil
	}
	own, err := fs.ReadFile(root, "proc/self/oom_score_adj")
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(own)))
}

// cgroupFacts identifies the cgroup hierarchies by the files in them.
func cgroupFacts(root fs.FS, host *Host) error {
	const mount = "sys/fs/cgroup"
	controllers, err := fs.ReadFile(root, mount+"/cgroup.controllers")
	if errors.Is(err, fs.ErrNotExist) {
		host.HugeTLB = exists(root, mount+"/hugetlb/cgroup.procs")
		host.PidsController = exists(root, mount+"/pids/cgroup.procs")
		host.SwapAccounting = exists(root, mount+"/memory/memory.memsw.limit_in_bytes")
		return nil
	}
	if err != nil {
		return err
	}
	list := strings.Fields(string(controllers))
	host.CgroupV2 = true
	host.HugeTLB = slices.Contains(list, "hugetlb")
	host.PidsController = slices.Contains(list, "pids")

	// The root cgroup has no memory files: look in this process's cgroup or, if
	// that is the root, whether the kernel has swap at all.
	own, err := fs.ReadFile(root, "proc/self/cgroup")
	if err != nil {
		return err
	}
	dir := path.Clean(strings.TrimPrefix(strings.TrimSpace(string(own)), "0::"))
	host.SwapAccounting = exists(root, path.Join(mount, dir, "memory.swap.max"))
	if dir == "/" {
		host.SwapAccounting = exists(root, "proc/swaps")
	}
	return nil
}

// policyLoaded reports whether SELinux has a policy. Until one is loaded
// (never, on a node where SELinux is compiled in but unused), every process has
// the label of the kernel, and runtimes treat SELinux as disabled.
func policyLoaded(root fs.FS) bool {
	own, err := fs.ReadFile(root, "proc/self/attr/current")
	return err == nil && strings.TrimRight(string(own), "\x00\n") != "kernel"
}

func exists(root fs.FS, name string) bool {
	_, err := fs.Stat(root, name)
	return err == nil
}

func first(root fs.FS, name string) byte {
	data, err := fs.ReadFile(root, name)
	if err != nil || len(data) == 0 {
		return 0
	}
	return data[0]
}

// HasSeccomp reports whether the kernel filters system calls.
func HasSeccomp() bool { return hasSeccomp(os.DirFS("/")) }

func hasSeccomp(root fs.FS) bool { return exists(root, "proc/sys/kernel/seccomp/actions_avail") }
