package spec

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// Profile is a seccomp profile before it is fitted to a container. Its JSON
// form is one of the two in common use: the OCI runtime spec's linux.seccomp,
// or Docker's, whose rules may depend on capabilities, the architecture and the
// kernel.
type Profile struct {
	DefaultAction    specs.LinuxSeccompAction `json:"defaultAction"`
	DefaultErrnoRet  *uint                    `json:"defaultErrnoRet,omitempty"`
	DefaultErrno     string                   `json:"defaultErrno,omitempty"` // the same by name, as CRI-O and podman have it
	Architectures    []specs.Arch             `json:"architectures,omitempty"`
	ArchMap          []ArchGroup              `json:"archMap,omitempty"` // instead of Architectures
	Flags            []specs.LinuxSeccompFlag `json:"flags,omitempty"`
	ListenerPath     string                   `json:"listenerPath,omitempty"`
	ListenerMetadata string                   `json:"listenerMetadata,omitempty"`
	Syscalls         []Rule                   `json:"syscalls"`
}

// ArchGroup is an architecture and the architectures whose programs it can run.
type ArchGroup struct {
	Arch     specs.Arch   `json:"architecture"`
	SubArchs []specs.Arch `json:"subArchitectures"`
}

// Rule is one entry of a profile.
type Rule struct {
	specs.LinuxSyscall
	Name     string    `json:"name,omitempty"`    // old form of a single name
	Comment  string    `json:"comment,omitempty"` // for people
	Errno    string    `json:"errno,omitempty"`   // ErrnoRet by name
	Includes Condition `json:"includes,omitzero"`
	Excludes Condition `json:"excludes,omitzero"`
}

// Condition limits a rule to some containers. A rule applies if everything in
// its Includes holds and nothing in its Excludes.
type Condition struct {
	Caps      []string `json:"caps,omitempty"`
	Arches    []string `json:"arches,omitempty"`    // the node's, as Go calls it
	MinKernel string   `json:"minKernel,omitempty"` // major.minor
}

// ParseProfile reads a profile's JSON. It refuses unknown actions, operators
// and conditions: a rule not understood may be one that forbids.
func ParseProfile(data []byte) (*Profile, error) {
	p, err := parseProfile(data)
	if err != nil {
		return nil, invalid("seccomp profile: %w", err)
	}
	return p, nil
}

func parseProfile(data []byte) (*Profile, error) {
	p := &Profile{}
	if err := json.Unmarshal(data, p); err != nil {
		return nil, err
	}
	if len(p.Architectures) > 0 && len(p.ArchMap) > 0 {
		return nil, errors.New("architectures and archMap are both set")
	}
	if !slices.Contains(seccompActions(), p.DefaultAction) {
		return nil, fmt.Errorf("defaultAction %.40q is unknown", p.DefaultAction)
	}
	for i := range p.Syscalls {
		if err := p.Syscalls[i].normalize(); err != nil {
			return nil, fmt.Errorf("rule %d: %w", i, err)
		}
	}
	return p, p.nameErrnos()
}

func (r *Rule) normalize() error {
	if r.Name != "" {
		if len(r.Names) > 0 {
			return fmt.Errorf("name and names are both set")
		}
		r.Names, r.Name = []string{r.Name}, ""
	}
	if len(r.Names) == 0 || slices.Contains(r.Names, "") {
		return fmt.Errorf("a system call has no name")
	}
	if !slices.Contains(seccompActions(), r.Action) {
		return fmt.Errorf("action %.40q is unknown", r.Action)
	}
	for _, arg := range r.Args {
		if arg.Index > 5 || !slices.Contains(seccompOperators(), arg.Op) {
			return fmt.Errorf("argument %d has the unknown operator %.40q", arg.Index, arg.Op)
		}
	}
	for _, kernel := range []string{r.Includes.MinKernel, r.Excludes.MinKernel} {
		if _, err := parseKernel(kernel); kernel != "" && err != nil {
			return fmt.Errorf("minKernel %.40q is not major.minor", kernel)
		}
	}
	return nil
}

func seccompActions() []specs.LinuxSeccompAction {
	return []specs.LinuxSeccompAction{
		specs.ActKill, specs.ActKillProcess, specs.ActKillThread, specs.ActTrap,
		specs.ActErrno, specs.ActTrace, specs.ActAllow, specs.ActLog, specs.ActNotify,
	}
}

func seccompOperators() []specs.LinuxSeccompOperator {
	return []specs.LinuxSeccompOperator{
		specs.OpNotEqual, specs.OpLessThan, specs.OpLessEqual, specs.OpEqualTo,
		specs.OpGreaterEqual, specs.OpGreaterThan, specs.OpMaskedEqual,
	}
}

// nativeArch returns seccomp's name for GOARCH.
func nativeArch(goarch string) specs.Arch {
	switch goarch {
	case "amd64":
		return specs.ArchX86_64
	case "386":
		return specs.ArchX86
	case "arm64":
		return specs.ArchAARCH64
	case "arm":
		return specs.ArchARM
	case "ppc64le":
		return specs.ArchPPC64LE
	case "riscv64":
		return specs.ArchRISCV64
	case "loong64":
		return specs.ArchLOONGARCH64
	case "s390x":
		return specs.ArchS390X
	case "mips64le":
		return specs.ArchMIPSEL64
	case "mips64":
		return specs.ArchMIPS64
	}
	return ""
}
