package tuning

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/crius-run/crius/internal/fault"
)

// This file changes cgroups: the quota of pods, and the CPUs that the scheduler
// balances. On cgroup v1 each cpuset has a switch for balancing, and the
// switches of all other cgroups with the same CPUs must be off, which is the
// node's configuration. On v2 the container's cgroup becomes a partition, for
// which all cgroups above it must give up its CPUs.

const (
	balance   = "cpuset.sched_load_balance" // v1
	exclusive = "cpuset.cpus.exclusive"     // v2, Linux 6.7
	partition = "cpuset.cpus.partition"     // v2
)

// liftQuota lifts the quota of the pod's cgroup, which is removed with the pod.
// The container's own quota is among its limits.
func (t *Tuner) liftQuota(c claim) error {
	if !c.PodQuota {
		return nil
	}
	pod := path.Dir(c.Cgroup)
	err := t.WriteCgroup(pod, "cpu.cfs_quota_us", "-1")
	if errors.Is(err, fault.NotFound) {
		err = t.WriteCgroup(pod, "cpu.max", "max")
	}
	if err != nil {
		return fmt.Errorf("lift CPU quota of the pod: %w", err)
	}
	return nil
}

// tellSystemd tells systemd about liftQuota. Otherwise it would set the quota
// again at its next reload.
func (t *Tuner) tellSystemd(ctx context.Context, c claim) {
	slice := path.Base(path.Dir(c.Cgroup))
	if !c.PodQuota || !strings.HasSuffix(slice, ".slice") {
		return
	}
	if err := t.Run(ctx, nil, "systemctl", "set-property", "--runtime", slice, "CPUQuota="); err != nil {
		slog.WarnContext(ctx, "systemd not told that a pod has no CPU quota, the quota may come back when it is reloaded", "err", err)
	}
}

// leaf returns the cgroup of the container's processes: crun adds one more.
func (t *Tuner) leaf(cgroup string) string {
	inner := path.Join(cgroup, "container")
	if _, err := t.ReadCgroup(inner, "cpuset.cpus"); err == nil {
		return inner
	}
	return cgroup
}

// down returns the cgroup and all above it except the root, from the top down.
func down(cgroup string) (all []string) {
	for ; cgroup != "/" && cgroup != "."; cgroup = path.Dir(cgroup) {
		all = append(all, cgroup)
	}
	slices.Reverse(all)
	return all
}

func (t *Tuner) readCPUs(cgroup string) (Set, error) {
	text, err := t.ReadCgroup(cgroup, exclusive)
	if err != nil {
		return nil, err
	}
	return ParseSet(text)
}

func (t *Tuner) noteExclusive(next *changes, c claim) error {
	if !c.NoBalancing {
		return nil
	}
	leaf := t.leaf(c.Cgroup)
	if _, err := t.ReadCgroup(leaf, balance); err == nil {
		return nil
	}
	if _, err := t.readCPUs(leaf); errors.Is(err, fault.NotFound) {
		return unimplemented("this kernel cannot switch CPU load balancing off: it has neither " + balance + " (cgroup v1) nor " + exclusive + " (v2, Linux 6.7)")
	}
	if len(c.Shared) > 0 {
		return unimplemented("with cgroup v2 a container without CPU load balancing cannot have shared CPUs: it can use the CPUs of its partition alone")
	}
	for _, cgroup := range down(leaf) {
		has, err := t.readCPUs(cgroup)
		if err != nil {
			return fmt.Errorf("find exclusive CPUs: %w", err)
		}
		next.Exclusive[cgroup] = next.Exclusive[cgroup].plus(c.CPUs.minus(has))
	}
	return nil
}

// isolate switches off the balancing of the container's CPUs.
func (t *Tuner) isolate(c claim) error {
	if !c.NoBalancing {
		return nil
	}
	leaf := t.leaf(c.Cgroup)
	for _, cgroup := range slices.Compact([]string{leaf, c.Cgroup}) {
		err := t.WriteCgroup(cgroup, balance, "0")
		if cgroup == leaf && errors.Is(err, fault.NotFound) {
			return t.makePartition(leaf, c.CPUs)
		}
		if err != nil {
			return fmt.Errorf("switch CPU load balancing off: %w", err)
		}
	}
	return nil
}

func (t *Tuner) makePartition(leaf string, cpus Set) error {
	for _, cgroup := range down(leaf) {
		has, err := t.readCPUs(cgroup)
		if err == nil {
			err = t.WriteCgroup(cgroup, exclusive, has.plus(cpus).String())
		}
		if err != nil {
			return fmt.Errorf("make CPUs exclusive: %w", err)
		}
	}
	if err := t.WriteCgroup(leaf, partition, "isolated"); err != nil {
		return fmt.Errorf("make a partition of CPUs: %w", err)
	}
	// The kernel accepts an impossible partition, and reports it here.
	if state, err := t.ReadCgroup(leaf, partition); err != nil || state != "isolated" {
		return fmt.Errorf("make a partition of CPUs: %w: state %q of %s, %w", cmp.Or(err, errInvalidPartition), state, leaf, fault.Precondition)
	}
	return nil
}

var errInvalidPartition = errors.New("the kernel did not isolate them")

// settleExclusive gives CPUs back to other cgroups, from the bottom up. Removed
// cgroups have given theirs back already.
func (t *Tuner) settleExclusive(next *changes) error {
	needed := map[string]Set{}
	for _, c := range next.Containers {
		if c.NoBalancing {
			for _, cgroup := range down(t.leaf(c.Cgroup)) {
				needed[cgroup] = needed[cgroup].plus(c.CPUs)
			}
		}
	}
	var errs []error
	for _, cgroup := range slices.Backward(slices.Sorted(maps.Keys(next.Exclusive))) {
		back := next.Exclusive[cgroup].minus(needed[cgroup])
		if next.Exclusive[cgroup] = next.Exclusive[cgroup].minus(back); len(next.Exclusive[cgroup]) == 0 {
			delete(next.Exclusive, cgroup)
		}
		if len(back) == 0 {
			continue
		}
		has, err := t.readCPUs(cgroup)
		if err == nil && len(needed[cgroup]) == 0 {
			err = t.endPartition(cgroup)
		}
		if err == nil {
			err = t.WriteCgroup(cgroup, exclusive, has.minus(back).String())
		}
		if err != nil && !errors.Is(err, fault.NotFound) {
			errs = append(errs, fmt.Errorf("let go of exclusive CPUs: %w", err))
		}
	}
	return errors.Join(errs...)
}

// endPartition has no effect on a cgroup that is not a partition.
func (t *Tuner) endPartition(cgroup string) error {
	state, err := t.ReadCgroup(cgroup, partition)
	if err != nil || !strings.HasPrefix(state, "isolated") {
		return err
	}
	return t.WriteCgroup(cgroup, partition, "member")
}
