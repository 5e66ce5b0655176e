package spec

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// Limits of a profile from a registry. The largest known ones have about 60 rules.
const (
	maxPulledRules = 1024
	maxPulledArgs  = 6 // of one rule, which is one for each argument of a call
	maxErrno       = 4095

	// maxPulledConditions bounds the work of intersecting the profile: the conditions of each rule
	// count for each of its system calls.
	maxPulledConditions = 4096
)

// ParsePulledProfile reads the JSON of a profile that came from a registry. Unlike a profile on the
// node, it was written by somebody whom the node's administrator may not know, so that a text is
// refused if a reader could take it for another one, or if it would have the runtime do something
// else than filter.
func ParsePulledProfile(data []byte) (*Profile, error) {
	p, err := parsePulled(data)
	if err != nil {
		return nil, invalid("seccomp profile: %w", err)
	}
	return p, nil
}

func parsePulled(data []byte) (*Profile, error) {
	if err := checkMembers(data); err != nil {
		return nil, err
	}
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&Profile{}); err != nil {
		return nil, err
	}
	p, err := parseProfile(data)
	if err != nil {
		return nil, err
	}
	switch {
	case p.ListenerPath != "" || p.ListenerMetadata != "":
		return nil, errors.New("listenerPath and listenerMetadata are allowed only in profiles on the node: the runtime would connect to that socket as root")
	case p.DefaultErrnoRet != nil && *p.DefaultErrnoRet > maxErrno:
		return nil, fmt.Errorf("defaultErrnoRet %d is not an error number", *p.DefaultErrnoRet)
	case len(p.Syscalls) > maxPulledRules:
		return nil, fmt.Errorf("it has %d rules, at most %d are allowed", len(p.Syscalls), maxPulledRules)
	case p.DefaultAction == specs.ActNotify:
		return nil, errNotify
	}
	for _, flag := range p.Flags {
		if !slices.Contains([]specs.LinuxSeccompFlag{"SECCOMP_FILTER_FLAG_TSYNC", specs.LinuxSeccompFlagLog, specs.LinuxSeccompFlagSpecAllow}, flag) {
			return nil, fmt.Errorf("flag %.60q is not allowed", flag)
		}
	}
	if err := p.checkArchs(); err != nil {
		return nil, err
	}
	conditions := 0
	for i := range p.Syscalls {
		r := &p.Syscalls[i]
		if err := r.checkPulled(); err != nil {
			return nil, fmt.Errorf("rule %d: %w", i, err)
		}
		conditions += len(r.Names) * len(r.Args)
	}
	p.Syscalls = slices.DeleteFunc(p.Syscalls, func(r Rule) bool { return len(r.Names) == 0 })
	if conditions > maxPulledConditions {
		return nil, fmt.Errorf("it has %d conditions on arguments of system calls, at most %d are allowed", conditions, maxPulledConditions)
	}
	return p, nil
}

var errNotify = errors.New("action SCMP_ACT_NOTIFY needs a listener, which only profiles on the node can have")

func (p *Profile) checkArchs() error {
	archs := slices.Clone(p.Architectures)
	for _, group := range p.ArchMap {
		archs = append(append(archs, group.Arch), group.SubArchs...)
	}
	for _, arch := range archs {
		if !slices.Contains(seccompArchNames(), arch) {
			return fmt.Errorf("architecture %.40q is unknown", arch)
		}
	}
	return nil
}

// checkPulled checks a rule. What only allows system calls that crius does not know, which may be new
// ones, is left out: the default action is for them, and none is weaker.
func (r *Rule) checkPulled() error {
	unknown := func(name string) bool { return !isSyscall(name) }
	if r.Action == specs.ActAllow {
		r.Names = slices.DeleteFunc(r.Names, unknown)
	}
	if i := slices.IndexFunc(r.Names, unknown); i >= 0 {
		return fmt.Errorf("system call %.60q is unknown; correct its name, or update crius if it is new", r.Names[i])
	}
	switch {
	case r.Action == specs.ActNotify:
		return errNotify
	case len(r.Args) > maxPulledArgs:
		return fmt.Errorf("it has %d conditions, at most %d are allowed", len(r.Args), maxPulledArgs)
	case r.ErrnoRet != nil && *r.ErrnoRet > maxErrno:
		return fmt.Errorf("errnoRet %d is not an error number", *r.ErrnoRet)
	}
	return nil
}

func seccompArchNames() []specs.Arch {
	return []specs.Arch{
		specs.ArchX86, specs.ArchX86_64, specs.ArchX32, specs.ArchARM, specs.ArchAARCH64, specs.ArchMIPS, specs.ArchMIPS64,
		specs.ArchMIPS64N32, specs.ArchMIPSEL, specs.ArchMIPSEL64, specs.ArchMIPSEL64N32, specs.ArchPPC, specs.ArchPPC64,
		specs.ArchPPC64LE, specs.ArchS390, specs.ArchS390X, specs.ArchPARISC, specs.ArchPARISC64, specs.ArchRISCV64,
		specs.ArchLOONGARCH64, specs.ArchM68K, specs.ArchSH, specs.ArchSHEB,
	}
}

const maxDepth = 8 // of a profile's JSON, which needs 5

// checkMembers refuses JSON text that is too deep, or has two members of one name, of which readers
// take different ones. Names that differ only in case count as one, since some readers take them
// for one.
func checkMembers(data []byte) error {
	if err := json.Unmarshal(data, new(json.RawMessage)); err != nil { // it is no JSON text, or more than that
		return err
	}
	return checkValue(json.NewDecoder(bytes.NewReader(data)), 0)
}

func checkValue(decoder *json.Decoder, depth int) error {
	token, err := decoder.Token()
	if err != nil {
		return err
	}
	delim, nested := token.(json.Delim)
	if !nested {
		return nil
	}
	if depth == maxDepth {
		return fmt.Errorf("it is nested more than %d levels deep", maxDepth)
	}
	seen := map[string]bool{}
	for decoder.More() {
		if delim == '{' {
			key, err := decoder.Token()
			if err != nil {
				return err
			}
			name := fmt.Sprint(key)
			folded := strings.ToLower(name)
			if seen[folded] {
				return fmt.Errorf("member %.40q occurs twice", name)
			}
			seen[folded] = true
		}
		if err := checkValue(decoder, depth+1); err != nil {
			return err
		}
	}
	_, err = decoder.Token()
	return err
}
