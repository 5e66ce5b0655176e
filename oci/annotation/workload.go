package annotation

import (
	"cmp"
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/oci/spec"
)

// Workload is a class of pods whose containers get their CPUs from the node's
// configuration instead of the kubelet. It is CRI-O's, with the same keys, and
// the basis of OpenShift's workload partitioning.
type Workload struct {
	Activation string   `toml:"activation_annotation" apply:"reload" help:"annotation that puts a pod into this workload, whatever its value; required"`
	Prefix     string   `toml:"annotation_prefix" apply:"reload" help:"a pod's annotation PREFIX/CONTAINER, such as {\"cpushares\": 20, \"cpulimit\": 500}, overrides the resources of this workload for one container; empty: nothing overrides them"`
	Allowed    []string `toml:"allowed_annotations" apply:"reload" form:"annotation pattern" help:"annotations of the workload's pods that are allowed as by allowed_annotations of their handler, in addition to those"`
	Resources  CPU      `toml:"resources" help:"What each container of the workload gets instead of what the kubelet asks for."`
}

// CPU is what a workload gives to a container. Zero fields are left to the
// kubelet.
type CPU struct {
	Shares int64  `toml:"cpushares" apply:"reload" help:"CPU shares, from 2 to 262144; 0: the kubelet's"`
	Quota  int64  `toml:"cpuquota" apply:"reload" help:"CPU time in microseconds per period; 0: the kubelet's"`
	Period int64  `toml:"cpuperiod" apply:"reload" help:"length of a period in microseconds; 0: the kubelet's"`
	Set    string `toml:"cpuset" apply:"reload" help:"CPUs on which a container runs, such as 0-1,52-53; empty: the kubelet's"`
	Limit  int64  `toml:"cpulimit" apply:"reload" help:"CPU limit in thousandths of a CPU, from which the quota is calculated in place of cpuquota; 0: none"`
}

// infraContainer is the name under which a pod overrides the resources of its
// infra container.
const infraContainer = "POD"

// Check refuses values that the kernel would refuse.
func (c CPU) Check() error {
	if c.Shares != 0 && (c.Shares < 2 || c.Shares > 262144) {
		return invalid("cpushares %d is not between 2 and 262144", c.Shares)
	}
	if c.Limit < 0 || c.Limit > 1e9 {
		return invalid("cpulimit %d is not a number of thousandths of a CPU", c.Limit)
	}
	_, err := spec.Resources(c.over(nil), spec.Host{})
	return err
}

// over returns the request with the values of c. It sets the period along with
// the quota, which means nothing without it.
func (c CPU) over(request *cri.LinuxContainerResources) *cri.LinuxContainerResources {
	set := &cri.LinuxContainerResources{CpuShares: c.Shares, CpuQuota: c.Quota, CpuPeriod: c.Period, CpusetCpus: c.Set}
	if c.Quota != 0 || c.Limit != 0 {
		set.CpuPeriod = cmp.Or(c.Period, request.GetCpuPeriod(), 100_000) // the kernel's default
	}
	if c.Limit != 0 {
		set.CpuQuota = max(c.Limit*set.CpuPeriod/1000, 1000) // the kernel's minimum
	}
	return set
}

// or fills the fields that c leaves open from the defaults.
func (c CPU) or(defaults CPU) CPU {
	if c.Quota == 0 && c.Limit == 0 { // they are two ways to say the same
		c.Quota, c.Limit = defaults.Quota, defaults.Limit
	}
	c.Shares, c.Period, c.Set = cmp.Or(c.Shares, defaults.Shares), cmp.Or(c.Period, defaults.Period), cmp.Or(c.Set, defaults.Set)
	return c
}

// joinWorkload determines the pod's workload and reads the pod's overrides.
func (a *Asked) joinWorkload(annotations map[string]string, workloads map[string]Workload) error {
	var joined []string
	for _, name := range slices.Sorted(maps.Keys(workloads)) {
		if _, found := annotations[workloads[name].Activation]; found && workloads[name].Activation != "" {
			joined = append(joined, name)
		}
	}
	if len(joined) == 0 {
		return nil
	}
	if len(joined) > 1 {
		return invalid("annotations of the pod activate the workloads %s, but a pod can be in one only", strings.Join(joined, " and "))
	}
	w := workloads[joined[0]]
	a.workload, a.overrides = &w, map[string]CPU{}
	for _, key := range slices.Sorted(maps.Keys(annotations)) {
		container, found := strings.CutPrefix(key, w.Prefix+"/")
		if !found || w.Prefix == "" {
			continue
		}
		cpu, err := parseCPU(annotations[key])
		if err != nil {
			return ofKey(key, err)
		}
		a.overrides[container] = cpu
	}
	return nil
}

// parseCPU reads a JSON object. CRI-O documents its numbers as strings and
// accepts numbers, so both are valid.
func parseCPU(text string) (CPU, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal([]byte(text), &fields); err != nil || fields == nil {
		return CPU{}, invalid(`must be a JSON object such as {"cpushares": 20}, got %.80q`, text)
	}
	var c CPU
	numbers := map[string]*int64{"cpushares": &c.Shares, "cpuquota": &c.Quota, "cpuperiod": &c.Period, "cpulimit": &c.Limit}
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		value := strings.Trim(string(fields[name]), `"`)
		if name == "cpuset" {
			c.Set = value
			continue
		}
		number := numbers[name]
		if number == nil {
			return CPU{}, invalid("unknown resource %.40q: there are cpuset, %s", name, strings.Join(slices.Sorted(maps.Keys(numbers)), ", "))
		}
		var err error
		if *number, err = strconv.ParseInt(value, 10, 64); err != nil {
			return CPU{}, invalid("%s must be a whole number, got %.40q", name, value)
		}
	}
	return c, c.Check()
}

// Workload returns what the pod's workload sets for a container, over the
// request. It holds for as long as the container lives; nil: nothing.
func (a Asked) Workload(container string, request *cri.LinuxContainerResources) *cri.LinuxContainerResources {
	if a.workload == nil {
		return nil
	}
	set := a.overrides[container].or(a.workload.Resources).over(request)
	if proto.Equal(set, &cri.LinuxContainerResources{}) {
		return nil
	}
	return set
}

// InfraCPUs returns the CPUs on which the infra container of a pod runs; empty:
// all. Other limits of the workload do not apply to it: it idles, or holds the
// runtime sandbox of all containers.
func (a Asked) InfraCPUs() string { return a.Workload(infraContainer, nil).GetCpusetCpus() }

// Yield returns a request for a container without the fields that its workload
// has set.
func Yield(r, workload *cri.LinuxContainerResources) *cri.LinuxContainerResources {
	if r == nil || workload == nil {
		return r
	}
	r = proto.CloneOf(r)
	for _, limit := range []struct{ asked, set *int64 }{
		{&r.CpuShares, &workload.CpuShares}, {&r.CpuQuota, &workload.CpuQuota}, {&r.CpuPeriod, &workload.CpuPeriod},
	} {
		if *limit.set != 0 {
			*limit.asked = 0
		}
	}
	if workload.CpusetCpus != "" {
		r.CpusetCpus = ""
		delete(r.Unified, "cpuset.cpus")
	}
	if workload.CpuShares != 0 {
		delete(r.Unified, "cpu.weight")
	}
	if workload.CpuQuota != 0 {
		delete(r.Unified, "cpu.max")
	}
	return r
}
