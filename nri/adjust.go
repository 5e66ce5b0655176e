package nri

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/containerd/nri/pkg/api"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/internal/fault"
)

// adjust applies the adjustment of a new container to its spec: marked entries
// are removed, others replace the entry with the same name or path.
func (p *Plugins) adjust(s *specs.Spec, a *api.ContainerAdjustment) error {
	if a == nil {
		return nil
	}
	names := make([]string, 0, len(a.GetCDIDevices()))
	for _, device := range a.GetCDIDevices() {
		names = append(names, device.GetName())
	}
	if len(names) > 0 {
		if err := p.node.InjectDevices(s, names); err != nil {
			return err
		}
	}
	if s.Linux == nil {
		s.Linux = &specs.Linux{}
	}
	adjustMap(&s.Annotations, a.GetAnnotations())
	adjustProcess(s.Process, a)
	adjustHooks(s, a.GetHooks())
	if err := adjustMounts(s, a.GetMounts()); err != nil {
		return err
	}
	if err := p.adjustClasses(s.Linux, a.GetLinux().GetResources()); err != nil {
		return err
	}
	return adjustLinux(s.Linux, a.GetLinux())
}

// adjustClasses puts a new container into the classes that plugins name, or
// removes it from those that its annotations name.
func (p *Plugins) adjustClasses(l *specs.Linux, r *api.LinuxResources) (err error) {
	if class := r.GetBlockioClass(); class != nil {
		if l.Resources == nil {
			l.Resources = &specs.LinuxResources{}
		}
		l.Resources.BlockIO = nil
		if class.GetValue() != "" {
			if l.Resources.BlockIO, err = p.node.BlockIOClass(class.GetValue()); err != nil {
				return err
			}
		}
	}
	if class := r.GetRdtClass(); class != nil {
		l.IntelRdt = nil
		if class.GetValue() != "" {
			if l.IntelRdt, err = p.node.RDTClass(class.GetValue()); err != nil {
				return err
			}
		}
	}
	return nil
}

func adjustProcess(p *specs.Process, a *api.ContainerAdjustment) {
	if len(a.GetArgs()) > 0 {
		p.Args = a.GetArgs()
	}
	p.Env = adjustedEnv(p.Env, a.GetEnv())
	for _, l := range a.GetRlimits() {
		limit := specs.POSIXRlimit{Type: l.GetType(), Hard: l.GetHard(), Soft: l.GetSoft()}
		p.Rlimits = slices.DeleteFunc(p.Rlimits, func(old specs.POSIXRlimit) bool { return old.Type == limit.Type })
		p.Rlimits = append(p.Rlimits, limit)
	}
	l := a.GetLinux()
	if score := l.GetOomScoreAdj(); score != nil {
		p.OOMScoreAdj = score.Get()
	}
	if priority := l.GetIoPriority(); priority != nil {
		if p.IOPriority = priority.ToOCI(); p.IOPriority.Class == "" {
			p.IOPriority = nil // removed
		}
	}
	if scheduler := l.GetScheduler(); scheduler != nil {
		p.Scheduler = scheduler.ToOCI()
	}
}

// dropRemovedEnv removes all variables that are not in left. The library does not
// report variables that plugins remove, but deletes them from its request.
func dropRemovedEnv(s *specs.Spec, left []string) {
	name := func(variable string) string { n, _, _ := strings.Cut(variable, "="); return n }
	kept := map[string]bool{}
	for _, variable := range left {
		kept[name(variable)] = true
	}
	s.Process.Env = slices.DeleteFunc(s.Process.Env, func(variable string) bool { return !kept[name(variable)] })
}

// adjustedEnv keeps the order of existing variables.
func adjustedEnv(env []string, changes []*api.KeyValue) []string {
	for _, change := range changes {
		name, removed := change.IsMarkedForRemoval()
		same := func(variable string) bool { return strings.HasPrefix(variable, name+"=") }
		switch i := slices.IndexFunc(env, same); {
		case removed:
			env = slices.DeleteFunc(env, same)
		case i >= 0:
			env[i] = change.ToOCI()
		default:
			env = append(env, change.ToOCI())
		}
	}
	return env
}

func adjustHooks(s *specs.Spec, h *api.Hooks) {
	if h == nil {
		return
	}
	if s.Hooks == nil {
		s.Hooks = &specs.Hooks{}
	}
	add := func(to *[]specs.Hook, hooks []*api.Hook) {
		for _, hook := range hooks {
			*to = append(*to, hook.ToOCI())
		}
	}
	add(&s.Hooks.Prestart, h.GetPrestart()) //nolint:staticcheck // deprecated, and still what plugins ask for
	add(&s.Hooks.CreateRuntime, h.GetCreateRuntime())
	add(&s.Hooks.CreateContainer, h.GetCreateContainer())
	add(&s.Hooks.StartContainer, h.GetStartContainer())
	add(&s.Hooks.Poststart, h.GetPoststart())
	add(&s.Hooks.Poststop, h.GetPoststop())
}

// adjustMounts sorts changed mounts by depth, so that none hides another below it.
func adjustMounts(s *specs.Spec, changes []*api.Mount) error {
	for _, m := range changes {
		destination, removed := m.IsMarkedForRemoval()
		s.Mounts = slices.DeleteFunc(s.Mounts, func(old specs.Mount) bool { return old.Destination == destination })
		if removed {
			continue
		}
		if slices.Contains(m.GetOptions(), api.SELinuxRelabel) {
			return fmt.Errorf("mount %s: option %q is not supported: %w", destination, api.SELinuxRelabel, fault.Unimplemented)
		}
		s.Mounts = append(s.Mounts, m.ToOCI(nil))
		if slices.Contains(m.GetOptions(), "rshared") {
			s.Linux.RootfsPropagation = "rshared"
		} else if slices.Contains(m.GetOptions(), "rslave") && s.Linux.RootfsPropagation != "rshared" {
			s.Linux.RootfsPropagation = "rslave"
		}
	}
	if len(changes) > 0 {
		depth := func(m specs.Mount) int { return strings.Count(strings.Trim(m.Destination, "/"), "/") }
		slices.SortStableFunc(s.Mounts, func(a, b specs.Mount) int { return cmp.Compare(depth(a), depth(b)) })
	}
	return nil
}

func adjustLinux(l *specs.Linux, a *api.LinuxContainerAdjustment) error {
	if a == nil {
		return nil
	}
	if l.Resources == nil {
		l.Resources = &specs.LinuxResources{}
	}
	for _, d := range a.GetDevices() {
		adjustDevice(l, d)
	}
	if path := a.GetCgroupsPath(); path != "" && path != l.CgroupsPath {
		return fmt.Errorf("cgroups path %q: a container must stay below its pod's cgroup, which the kubelet manages: %w", path, fault.Unimplemented)
	}
	if policy := a.GetSeccompPolicy(); policy != nil {
		l.Seccomp = seccomp(policy)
	}
	for _, n := range a.GetNamespaces() {
		kind, removed := n.IsMarkedForRemoval()
		l.Namespaces = slices.DeleteFunc(l.Namespaces, func(old specs.LinuxNamespace) bool { return string(old.Type) == kind })
		if !removed {
			l.Namespaces = append(l.Namespaces, specs.LinuxNamespace{Type: specs.LinuxNamespaceType(kind), Path: n.GetPath()})
		}
	}
	adjustMap(&l.Sysctl, a.GetSysctl())
	for name, device := range a.GetNetDevices() {
		if name, removed := api.IsMarkedForRemoval(name); removed {
			delete(l.NetDevices, name)
			continue
		}
		if l.NetDevices == nil {
			l.NetDevices = map[string]specs.LinuxNetDevice{}
		}
		l.NetDevices[name] = device.ToOCI()
	}
	if policy := a.GetMemoryPolicy(); policy != nil {
		if l.MemoryPolicy = policy.ToOCI(); l.MemoryPolicy.Mode == "" {
			l.MemoryPolicy = nil // removed
		}
	}
	adjustRDT(l, a.GetRdt())
	overlay(l.Resources, a.GetResources())
	return nil
}

// adjustDevice adds a device with permission to use it, or removes a device.
func adjustDevice(l *specs.Linux, d *api.LinuxDevice) {
	path, removed := d.IsMarkedForRemoval()
	l.Devices = slices.DeleteFunc(l.Devices, func(old specs.LinuxDevice) bool { return old.Path == path })
	if removed {
		return
	}
	l.Devices = append(l.Devices, d.ToOCI())
	l.Resources.Devices = append(l.Resources.Devices, specs.LinuxDeviceCgroup{
		Allow: true, Type: d.GetType(), Major: &d.Major, Minor: &d.Minor, Access: d.AccessString(),
	})
}

func seccomp(p *api.LinuxSeccomp) *specs.LinuxSeccomp {
	s := &specs.LinuxSeccomp{
		DefaultAction:    specs.LinuxSeccompAction(p.GetDefaultAction()),
		ListenerPath:     p.GetListenerPath(),
		ListenerMetadata: p.GetListenerMetadata(),
		Syscalls:         api.ToOCILinuxSyscalls(p.GetSyscalls()),
	}
	if errno := p.GetDefaultErrno(); errno != nil {
		number := uint(errno.GetValue())
		s.DefaultErrnoRet = &number
	}
	for _, arch := range p.GetArchitectures() {
		s.Architectures = append(s.Architectures, specs.Arch(arch))
	}
	for _, flag := range p.GetFlags() {
		s.Flags = append(s.Flags, specs.LinuxSeccompFlag(flag))
	}
	return s
}

func adjustRDT(l *specs.Linux, r *api.LinuxRdt) {
	if r == nil {
		return
	}
	if r.GetRemove() {
		l.IntelRdt = nil
	}
	if r.ClosId == nil && r.Schemata == nil && r.EnableMonitoring == nil {
		return
	}
	if l.IntelRdt == nil {
		l.IntelRdt = &specs.LinuxIntelRdt{}
	}
	if r.ClosId != nil {
		l.IntelRdt.ClosID = r.ClosId.GetValue()
	}
	if r.Schemata != nil {
		l.IntelRdt.Schemata = r.Schemata.GetValue()
	}
	if r.EnableMonitoring != nil {
		l.IntelRdt.EnableMonitoring = r.EnableMonitoring.GetValue()
	}
}

// updated is overlaid for an existing container. It stays in its classes,
// because runtimes do not move containers.
func updated(limits *Resources, changes *api.LinuxResources) (*Resources, error) {
	for what, class := range map[string]*api.OptionalString{"block I/O": changes.GetBlockioClass(), "RDT": changes.GetRdtClass()} {
		if class != nil {
			return nil, fmt.Errorf("%s class %.80q: only new containers can be put into a class: %w", what, class.GetValue(), fault.Unimplemented)
		}
	}
	return overlaid(limits, changes), nil
}

// overlaid sets limits to the values that changes has, and returns only those
// values.
func overlaid(limits *Resources, changes *api.LinuxResources) *Resources {
	if changes == nil {
		return nil
	}
	set := &Resources{}
	overlay(limits, changes)
	overlay(set, changes)
	if m := set.Memory; m != nil && m.Limit != nil {
		m.Swap = limits.Memory.Swap // which may have followed
	}
	return set
}

// overlay sets to to the values that changes has, except for classes.
func overlay(to *specs.LinuxResources, changes *api.LinuxResources) {
	if changes == nil {
		return
	}
	from := changes.ToOCI()
	overlayCPU(&to.CPU, from.CPU)
	overlayMemory(&to.Memory, from.Memory)
	for _, limit := range from.HugepageLimits {
		to.HugepageLimits = slices.DeleteFunc(to.HugepageLimits, func(old specs.LinuxHugepageLimit) bool { return old.Pagesize == limit.Pagesize })
		to.HugepageLimits = append(to.HugepageLimits, limit)
	}
	if len(from.Unified) > 0 {
		if to.Unified == nil {
			to.Unified = map[string]string{}
		}
		maps.Copy(to.Unified, from.Unified)
	}
	if from.Pids != nil {
		to.Pids = from.Pids
	}
	to.Devices = append(to.Devices, from.Devices...)
}

func overlayCPU(to **specs.LinuxCPU, from *specs.LinuxCPU) {
	if *from == (specs.LinuxCPU{}) {
		return
	}
	if *to == nil {
		*to = &specs.LinuxCPU{}
	}
	set(&(*to).Shares, from.Shares)
	set(&(*to).Quota, from.Quota)
	set(&(*to).Period, from.Period)
	set(&(*to).RealtimeRuntime, from.RealtimeRuntime)
	set(&(*to).RealtimePeriod, from.RealtimePeriod)
	(*to).Cpus = cmp.Or(from.Cpus, (*to).Cpus)
	(*to).Mems = cmp.Or(from.Mems, (*to).Mems)
}

// overlayMemory keeps the limit of memory and swap equal to the memory limit if
// it was equal: the container must not swap, and the kernel rejects a lower
// sum. An answer repeats the requested sum even if the plugin changed only the
// memory limit.
func overlayMemory(to **specs.LinuxMemory, from *specs.LinuxMemory) {
	if *from == (specs.LinuxMemory{}) {
		return
	}
	if *to == nil {
		*to = &specs.LinuxMemory{}
	}
	noSwap := equal((*to).Swap, (*to).Limit) && (from.Swap == nil || equal(from.Swap, (*to).Swap))
	set(&(*to).Swap, from.Swap)
	if noSwap && from.Limit != nil {
		(*to).Swap = from.Limit
	}
	set(&(*to).Limit, from.Limit)
	set(&(*to).Reservation, from.Reservation)
	set(&(*to).Swappiness, from.Swappiness)
	set(&(*to).DisableOOMKiller, from.DisableOOMKiller)
	set(&(*to).UseHierarchy, from.UseHierarchy)
}

func equal(a, b *int64) bool { return a != nil && b != nil && *a == *b }

func set[T any](to **T, from *T) {
	if from != nil {
		*to = from
	}
}

func adjustMap(to *map[string]string, changes map[string]string) {
	for key, value := range changes {
		if key, removed := api.IsMarkedForRemoval(key); removed {
			delete(*to, key)
			continue
		}
		if *to == nil {
			*to = map[string]string{}
		}
		(*to)[key] = value
	}
}
