package oci

import (
	"errors"
	"path"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/inherit"
	"github.com/crius-run/crius/oci/tuning"
)

// fitAffinity returns an affinity for exec processes in which CPUs that the
// kernel would refuse, which would fail the command, are replaced. The affinity
// in the spec dates from the container's creation: the container may have other
// CPUs by now, and the runtime, which sets the initial affinity before it joins
// the container, may not be allowed to use these. An empty affinity would not
// help: runc then takes the spec's.
func fitAffinity(a specs.CPUAffinity, container, runtime tuning.Set) *specs.CPUAffinity {
	if refused(a.Initial, runtime) {
		a.Initial = ""
	}
	if refused(a.Final, container) || a == (specs.CPUAffinity{}) {
		a.Final = container.String()
	}
	return &a
}

// refused reports whether sched_setaffinity(2) fails for a list of CPUs.
func refused(list string, allowed tuning.Set) bool {
	asked, err := tuning.ParseSet(list)
	return err == nil && len(asked) > 0 && !slices.ContainsFunc(asked, func(cpu int) bool { return slices.Contains(allowed, cpu) })
}

// presentCPUs returns the CPUs of a container's processes: of the cgroup that
// crun adds, if it exists. read is cgroup.ReadFile.
func presentCPUs(read func(cgroup, name string) (string, error), cgroup string) (tuning.Set, error) {
	for _, dir := range []string{path.Join(cgroup, "container"), cgroup} {
		for _, name := range []string{"cpuset.cpus.effective", "cpuset.cpus"} { // v2, v1
			text, err := read(dir, name)
			if errors.Is(err, fault.NotFound) {
				continue
			}
			if err != nil {
				return nil, err
			}
			return tuning.ParseSet(text)
		}
	}
	return nil, fault.NotFound
}

// ownCPUs returns the CPUs that a runtime started by this server may use.
func ownCPUs() (own tuning.Set) {
	var set unix.CPUSet
	if err := inherit.Start(func() error { return unix.SchedGetaffinity(0, &set) }); err != nil {
		return nil
	}
	for cpu := range len(set) * 64 {
		if set.IsSet(cpu) {
			own = append(own, cpu)
		}
	}
	return own
}
