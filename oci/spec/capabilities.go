package spec

import (
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// CapSet is a set of Linux capabilities: bit n is capability n.
type CapSet uint64

// capabilityNames has each capability at its number (linux/capability.h).
var capabilityNames = [...]string{
	"CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL",
	"SETGID", "SETUID", "SETPCAP", "LINUX_IMMUTABLE", "NET_BIND_SERVICE",
	"NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER",
	"SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT",
	"SYS_ADMIN", "SYS_BOOT", "SYS_NICE", "SYS_RESOURCE", "SYS_TIME",
	"SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL",
	"SETFCAP", "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM",
	"BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF", "CHECKPOINT_RESTORE",
}

const allCapabilities = CapSet(1)<<len(capabilityNames) - 1

// ParseCapabilities reads capability names in any case, with or without the
// CAP_ prefix. ALL stands for every capability.
func ParseCapabilities(names []string) (CapSet, error) {
	var set CapSet
	for _, name := range names {
		if strings.EqualFold(name, "ALL") {
			set = allCapabilities
			continue
		}
		bare := strings.TrimPrefix(strings.ToUpper(name), "CAP_")
		n := slices.Index(capabilityNames[:], bare)
		if n < 0 {
			return 0, invalid("unknown capability %q", name)
		}
		set |= 1 << n
	}
	return set, nil
}

// Names returns the capabilities with their CAP_ prefix, in order of their
// numbers.
func (c CapSet) Names() []string {
	names := []string{}
	for n, name := range capabilityNames {
		if c&(1<<n) != 0 {
			names = append(names, "CAP_"+name)
		}
	}
	return names
}

// has takes the full name, including CAP_.
func (c CapSet) has(name string) bool {
	n := slices.Index(capabilityNames[:], strings.TrimPrefix(name, "CAP_"))
	return n >= 0 && c&(1<<n) != 0
}

// capabilities writes the capability sets of the first process. The inheritable
// set (CVE-2022-24769) holds only what the ambient set needs, and the ambient
// set only what was requested for it (CVE-2018-1000400). A process that is not
// root loses the rest when the kernel executes its program.
func capabilities(in *Input, s *specs.Spec) error {
	set, ambient, err := in.capabilitySets()
	if err != nil {
		return err
	}
	// A process cannot pass on capabilities that it lacks: runc refuses to start
	// such a container.
	set &= in.Facts.Host.Bounding
	if f := in.linuxFeatures(); f != nil && f.Capabilities != nil {
		var known CapSet
		for _, name := range f.Capabilities {
			one, _ := ParseCapabilities([]string{name}) // newer than this table: not in set either
			known |= one
		}
		set &= known
	}
	ambient &= set
	s.Process.Capabilities = &specs.LinuxCapabilities{
		Bounding:    set.Names(),
		Effective:   set.Names(),
		Permitted:   set.Names(),
		Inheritable: ambient.Names(),
		Ambient:     ambient.Names(),
	}
	return nil
}

// capabilitySets returns the process's capabilities and, among them, the
// ambient ones. ALL is applied first, then single names; a name that is both
// added and dropped is dropped.
func (in *Input) capabilitySets() (set, ambient CapSet, err error) {
	asked := in.security().GetCapabilities()
	addAll, add, err := splitAll(asked.GetAddCapabilities())
	if err != nil {
		return 0, 0, err
	}
	dropAll, drop, err := splitAll(asked.GetDropCapabilities())
	if err != nil {
		return 0, 0, err
	}
	if ambient, err = ParseCapabilities(asked.GetAddAmbientCapabilities()); err != nil {
		return 0, 0, err
	}
	if in.privileged() {
		return allCapabilities, ambient, nil
	}
	set = in.Defaults.Capabilities
	if addAll {
		set = allCapabilities
	}
	if dropAll {
		set = 0
	}
	return (set | add | ambient) &^ drop, ambient, nil
}

// splitAll parses names and reports separately whether ALL was among them.
func splitAll(names []string) (all bool, single CapSet, err error) {
	isAll := func(name string) bool { return strings.EqualFold(name, "ALL") }
	all = slices.ContainsFunc(names, isAll)
	single, err = ParseCapabilities(slices.DeleteFunc(slices.Clone(names), isAll))
	return all, single, err
}
