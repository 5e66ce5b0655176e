package integration

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/test/kit/node"
)

// sight is what cAdvisor takes a cgroup for; see test/cadvisor.
type sight struct {
	Type       string
	Aliases    []string
	Image      string
	Labels     map[string]string
	Interfaces map[string]uint64
	Usage      usage
	Error      string
}

// usage is what cAdvisor measures.
type usage struct {
	CPU, Memory, WorkingSet, RSS, Swap, PageFaults, MajorPageFaults uint64
}

// compareUsage compares cAdvisor's measurements with crius's before and after.
func compareUsage(t *testing.T, theirs usage, before, after *cri.ContainerStats) {
	t.Helper()
	is := func(n uint64) *cri.UInt64Value { return &cri.UInt64Value{Value: n} }
	between(t, "cAdvisor's CPU time", is(theirs.CPU), before.Cpu.UsageCoreNanoSeconds.Value, after.Cpu.UsageCoreNanoSeconds.Value)
	between(t, "cAdvisor's page faults", is(theirs.PageFaults), before.Memory.PageFaults.Value, after.Memory.PageFaults.Value)
	between(t, "cAdvisor's major page faults", is(theirs.MajorPageFaults), before.Memory.MajorPageFaults.Value, after.Memory.MajorPageFaults.Value)
	batch := uint64(runtime.NumCPU()) * mib / 4 // the kernel counts memory per CPU and adds up now and then
	near(t, "cAdvisor's memory", is(theirs.Memory), after.Memory.UsageBytes.Value, batch)
	near(t, "cAdvisor's working set", is(theirs.WorkingSet), after.Memory.WorkingSetBytes.Value, batch)
	near(t, "cAdvisor's RSS", is(theirs.RSS), after.Memory.RssBytes.Value, batch)
	near(t, "cAdvisor's swap", is(theirs.Swap), after.Swap.SwapUsageBytes.Value, 0)
}

// buildCAdvisor builds the program that inspects cgroups with cAdvisor's code.
func buildCAdvisor(t *testing.T) (program string) {
	t.Helper()
	program = filepath.Join(t.TempDir(), "cadvisor")
	build := exec.CommandContext(t.Context(), "go", "build", "-C", "../cadvisor", "-o", program, ".")
	build.Env = append(os.Environ(), "GOFLAGS=", "CGO_ENABLED=0")
	if said, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v:\n%s", err, said)
	}
	return program
}

// cadvisor runs cAdvisor's own code on cgroups, on a machine where socket is in
// place of CRI-O's.
func cadvisor(t *testing.T, program, socket string, cgroups ...string) map[string]sight {
	t.Helper()
	script := `mount -t tmpfs crio /run; mkdir /run/crio; ln -s "$1" /run/crio/crio.sock; shift; exec "$@"`
	args := append([]string{"-m", "--propagation", "private", "sh", "-ec", script, "sh", socket, program, "crio"}, cgroups...)
	out, err := exec.CommandContext(t.Context(), "unshare", args...).Output()
	if err != nil {
		said := ""
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			said = string(exit.Stderr)
		}
		t.Fatalf("%v: %s", err, said)
	}
	var seen map[string]sight
	if err := json.Unmarshal(out, &seen); err != nil {
		t.Fatal(err)
	}
	return seen
}

func TestCAdvisorTakesContainersForCrios(t *testing.T) {
	t.Parallel()
	program := buildCAdvisor(t) // before anything is measured: it may take minutes
	dir, err := os.MkdirTemp("", "crio")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "crio.sock")
	w := private(t, node.Options{Config: "[api]\ncrio_socket = \"" + socket + "\""})
	parent := ""
	p := w.run(t, "runc", func(c *cri.PodSandboxConfig) {
		parent = w.CgroupParent() + "/pod" + c.Metadata.Uid
		c.Linux.CgroupParent = parent
	})
	forPod, forContainer := pidMode(cri.NamespaceMode_POD)
	shared := w.run(t, "crun", forPod)
	c := p.start(t, "alloc 10 ; sleep", func(c *cri.ContainerConfig) {
		c.Labels["io.kubernetes.container.name"] = c.Metadata.Name
	})
	c.says(t, "allocated")
	inShared := shared.start(t, "sleep", forContainer)
	before, beforeOfPod := c.stats(t), p.stats(t)
	seen := cadvisor(t, program, socket, parent, parent+"/crio-"+c.id, parent+"/crio-"+p.id,
		w.CgroupParent()+"/crio-"+shared.id, w.CgroupParent()+"/crio-"+inShared.id)
	after, afterOfPod := c.stats(t), p.stats(t)
	for cgroup, s := range seen {
		if s.Error != "" {
			t.Errorf("%s: %s", cgroup, s.Error)
		}
	}
	equal(t, "type of the pod's cgroup", seen[parent].Type, "raw")
	container, pod, infra := seen[parent+"/crio-"+c.id], seen[parent+"/crio-"+p.id], seen[w.CgroupParent()+"/crio-"+shared.id]
	m := p.config.Metadata
	equal(t, "type", container.Type, "crio")
	if want := "k8s_" + c.config.Metadata.Name + "_" + m.Name + "_" + m.Namespace + "_" + m.Uid + "_0"; !slices.Equal(container.Aliases, []string{want, c.id}) {
		t.Errorf("aliases are %q, want %q and the id", container.Aliases, want)
	}
	equal(t, "label", container.Labels["io.kubernetes.container.name"], c.config.Metadata.Name)
	if container.Usage.Memory < 10*mib || container.Image == "" || len(container.Interfaces) != 0 {
		t.Errorf("the container is %+v", container)
	}
	compareUsage(t, container.Usage, before, after)
	traffic := func(s *cri.PodSandboxStats) uint64 {
		eth0 := s.Linux.Network.DefaultInterface
		return eth0.RxBytes.GetValue() + eth0.TxBytes.GetValue()
	}
	between(t, "traffic for cAdvisor", &cri.UInt64Value{Value: pod.Interfaces["eth0"]}, traffic(beforeOfPod), traffic(afterOfPod))
	for name, s := range map[string]sight{"pod": pod, "pod with an infra container": infra} {
		equal(t, name, s.Type, "crio")
		equal(t, "container of "+name, s.Labels["io.kubernetes.container.name"], "POD")
		if s.Interfaces["eth0"] == 0 {
			t.Errorf("%s has traffic of %v", name, s.Interfaces)
		}
	}
	p.remove(t)
	if _, err := os.Stat("/sys/fs/cgroup/memory" + parent + "/crio-" + p.id); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the removed pod's cgroup: %v", err)
	}
	if err := cgroup.Remove(t.Context(), parent); err != nil { // like its kubelet
		t.Error(err)
	}
}

// Cgroups made under the other names are still found and removed.
func TestCgroupsAreFoundAfterCrioSocketChanges(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "crio")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "crio", "crio.sock")
	w := private(t, node.Options{Config: "[api]\ncrio_socket = \"" + socket + "\""})
	if err := w.settle(t.Context(), "runc"); err != nil {
		t.Fatal(err)
	}
	plain := w.run(t, "runc")
	forPod, forContainer := pidMode(cri.NamespaceMode_POD)
	shared := w.run(t, "runc", forPod)
	old := []*container{plain.start(t, "alloc 10 ; sleep"), shared.start(t, "alloc 10 ; sleep", forContainer)}
	for _, c := range old {
		c.says(t, "allocated")
	}
	if err := w.Configure("20-crio", "[api]\ncrio_socket = \"\"\n"); err != nil {
		t.Fatal(err)
	}
	if err := w.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Dir(socket)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory of the socket that is not configured any more: %v", err)
	}
	for _, c := range old {
		metrics := c.pod.podMetrics(t, c.id)
		if m := metrics["container_memory_rss"]; len(m) == 0 || m[0].Value.Value < 10*mib {
			t.Errorf("memory after the change is %v", m)
		}
	}
	equal(t, "state of the pod with an infra container", shared.status(t).State, cri.PodSandboxState_SANDBOX_READY)
	fresh := plain.start(t, "sleep")
	if dir, _ := cgroupDir(t, fresh.cgroups(t), "memory"); filepath.Base(dir) != "crius-"+fresh.id {
		t.Errorf("a new container is in %s", dir)
	}
	plain.remove(t)
	shared.remove(t)
	w.empty.Drop(w.empty.About("crio-facade")...) // the server has removed it
	w.Restored(t, w.empty)
}
