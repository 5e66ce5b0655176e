package tuning

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

func (m *machine) move(t *Tuner, id string, p Plan) {
	m.Helper()
	if err := errors.Join(t.MayMove(id, &p), t.Move(m.Context(), id, &p)); err != nil {
		m.Fatal(err)
	}
}

// on returns everything for other CPUs.
func on(cpus ...int) Plan {
	p := everything
	p.CPUs, p.Quiet = cpus, cpus
	return p
}

// What is done for a container follows it to other CPUs; the CPUs that it had are as before, unless
// another container needs them.
func TestMove(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	s := m.server()
	m.apply(s, "a", on(2, 3))
	m.apply(s, "b", Plan{CPUs: Set{4}, Quiet: Set{4}})
	m.move(s, "a", on(3, 4))
	m.holds(defaultMask, "e7")
	m.holds(etcFile, etcText+"IRQBALANCE_BANNED_CPUS=\"18\"\nIRQBALANCE_BANNED_CPULIST=\"3-4\"\n")
	for cpu, governor := range []string{2: "powersave", 3: "performance", 4: "performance"} {
		if cpu >= 2 {
			m.holds(cpuFile(cpu, "cpufreq/scaling_governor"), governor)
		}
	}
	m.move(s, "a", on(5))
	m.holds(defaultMask, "cf")
	m.move(s, "a", Plan{}) // it has no CPUs of its own any more
	m.holds(defaultMask, "ef")
	m.move(s, "a", on(6))
	m.holds(defaultMask, "af")
	m.move(s, "unknown", on(7)) // it has not been started, or has ended
	m.holds(defaultMask, "af")
	m.release(s, "a", "b")
	m.asBefore()
}

// On a node with two CPUs a container moves from one to the other, and there is always a CPU for
// interrupts. It cannot have both.
func TestMoveToTheOtherOfTwoCPUs(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.set(defaultMask, "3")
	m.set("/sys/devices/system/cpu/online", "0-1\n")
	s := m.server()
	m.apply(s, "a", on(1))
	m.move(s, "a", on(0))
	m.holds(defaultMask, "2")
	both := on(0, 1)
	if err := s.MayMove("a", &both); !errors.Is(err, fault.Invalid) {
		t.Errorf("all CPUs: %v", err)
	}
	m.holds(defaultMask, "2")
	m.release(s, "a")
	m.holds(defaultMask, "3")
}

// A move that fails is retried.
func TestMoveIsRetried(t *testing.T) {
	t.Parallel()
	const quota = "/kubepods/pod1/cpu.max"
	m := newMachine(t)
	s := m.server()
	before, after := on(2), on(3)
	before.PodQuota, after.PodQuota = true, true
	m.cgroups[quota] = ""
	m.apply(s, "a", before)
	m.cgroups[quota], m.fail[quota] = "100000 100000", errors.New("no")
	m.move(s, "a", after)
	m.work()
	if c := s.now.Containers["a"]; !c.Moving {
		t.Errorf("on record after a failure: %+v", c)
	}
	delete(m.fail, quota)
	m.work()
	if c := s.now.Containers["a"]; c.Moving || m.cgroups[quota] != "max" {
		t.Errorf("on record: %+v, quota %q", c, m.cgroups[quota])
	}
	m.release(s, "a")
	m.asBefore()
}

// So is one that cannot be recorded, unless the container has been moved elsewhere or has ended.
func TestMoveThatCannotBeRecordedIsRetried(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	s := m.server()
	m.apply(s, "a", on(2))
	m.apply(s, "b", on(4))
	full := filepath.Join(m.state, "tuning", only)
	setWritable(t, full, false)
	m.move(s, "a", on(3))
	m.move(s, "b", on(5))
	setWritable(t, full, true)
	m.move(s, "b", on(6))
	m.work()
	m.holds(defaultMask, "b7") // without 3 and 6
	m.release(s, "a", "b")
	m.work()
	m.asBefore()
}

// setWritable has a directory on a disk that can be written to, or cannot.
func setWritable(t *testing.T, dir string, writable bool) {
	t.Helper()
	var err error
	if writable {
		err = errors.Join(os.Remove(dir), os.Rename(dir+".kept", dir))
	} else {
		err = errors.Join(os.Rename(dir, dir+".kept"), os.WriteFile(dir, nil, 0o600))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// A server that dies in the middle of a move leaves it to the next one.
func TestMoveIsFinishedByTheNextServer(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	s := m.server()
	m.apply(s, "a", on(2))
	next, err := s.with("a", claim{Plan: on(3), Cgroup: "/kubepods/pod1/a", Moving: true})
	if err := errors.Join(err, s.put(t.Context(), next)); err != nil {
		t.Fatal(err)
	}
	m.holds(defaultMask, "fb")
	s = m.server()
	m.holds(defaultMask, "f7")
	m.holds(cpuFile(2, "power/pm_qos_resume_latency_us"), "0")
	m.holds(cpuFile(3, "power/pm_qos_resume_latency_us"), "n/a")
	if c := s.now.Containers["a"]; c.Moving {
		t.Errorf("on record: %+v", c)
	}
	m.release(m.server(), "a")
	m.asBefore()
}

// The plan for other CPUs is as the first one. It is for CPUs of its own alone, which a container
// has again if its shares follow.
func TestFollow(t *testing.T) {
	t.Parallel()
	s := newMachine(t).server()
	for what, c := range map[string]struct {
		plan         Plan
		shares       int64
		cpus         string
		want, quiet  string
		housekeeping string
	}{
		"same":          {plan: on(2, 3), cpus: "2-3", want: "2-3", quiet: "2-3"}, // whatever plugins did to the shares
		"others":        {plan: on(2, 3), shares: 2048, cpus: "4-5", want: "4-5", quiet: "4-5"},
		"one more":      {plan: on(2, 3), shares: 3072, cpus: "2-4", want: "2-4", quiet: "2-4"},
		"shares late":   {plan: on(2, 3), shares: 2048, cpus: "2-4"},
		"shared pool":   {plan: on(2, 3), shares: 2048, cpus: "0-7"},
		"housekeeping":  {plan: Plan{CPUs: Set{2, 3}, Quiet: Set{3}, Housekeeping: Set{2}}, shares: 3072, cpus: "1,5-6", want: "1,5-6", quiet: "6", housekeeping: "1,5"},
		"shared CPUs":   {plan: Plan{CPUs: Set{2}, Shared: Set{0, 1}, Quiet: Set{2}}, shares: 1024, cpus: "0-1,4", want: "4", quiet: "4"},
		"no interrupts": {plan: Plan{CPUs: Set{2}, Latency: "10"}, shares: 1024, cpus: "4", want: "4"},
	} {
		p, err := s.Follow(c.plan, Container{CgroupParent: guaranteed, Limits: &cri.LinuxContainerResources{CpuShares: c.shares, CpusetCpus: c.cpus}})
		if err != nil || p.CPUs.String() != c.want || p.Quiet.String() != c.quiet || p.Housekeeping.String() != c.housekeeping || p.Latency != c.plan.Latency {
			t.Errorf("%s: %+v, %v", what, p, err)
		}
	}
	if _, err := s.Follow(on(2), Container{Limits: &cri.LinuxContainerResources{CpusetCpus: "x"}}); !errors.Is(err, fault.Invalid) {
		t.Errorf("no list of CPUs: %v", err)
	}
}
