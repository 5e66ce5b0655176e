// Package foreign reads the configurations of CRI-O and containerd and converts them for
// crius.
//
// Every key of these programs has one rule, in the tables of crio_rules.go and
// containerd_rules.go: it is mapped to a key of crius, or it asks for behaviour that crius
// always has, or it has no counterpart and the rule says what that means for the node. The
// package knows the keys of crius only by name; cmd/crius/config writes and checks the
// resulting file.
package foreign

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/BurntSushi/toml"

	"github.com/crius-run/crius/internal/fault"
)

// Import is the configuration of another runtime, converted for crius.
type Import struct {
	Of       string   // the program: CRI-O or containerd
	Files    []string // that were read, later ones override earlier ones
	Settings []Setting
	Remarks  []Remark // keys that are set and have no counterpart
	Builtin  []string // keys that are set and ask for behaviour that crius always has
	Unused   []string // keys that are set to a value that disables a feature
	Differ   []string // defaults that differ between the two programs
	Targets  []string // keys of crius with a counterpart in the program; NAME stands for the name of a handler
}

// Setting is a value for a key of crius.
type Setting struct {
	Key   string
	Value any    // from a TOML decoder, or []string
	From  string // FILE:LINE and foreign key, or the program with this default
	Note  string // what an operator should know; may be empty
}

// Remark is a key, or a part of its value, that crius does not support.
type Remark struct {
	Key   string
	Value string // as TOML; may be empty
	Place string // FILE:LINE
	Text  string // what that means for the node
	// Restricts says that the node would allow more without the key: it is lost only if an
	// operator accepts that.
	Restricts bool
}

// Problem is an error in a foreign configuration. It is a fault.Invalid.
type Problem struct {
	Place string // FILE:LINE
	Key   string // may be empty
	Text  string
}

func (p *Problem) Error() string {
	parts := slices.DeleteFunc([]string{p.Place, p.Key, p.Text}, func(s string) bool { return s == "" })
	return strings.Join(parts, ": ")
}

// Unwrap returns fault.Invalid.
func (*Problem) Unwrap() error { return fault.Invalid }

// verdict is the treatment of a foreign key.
type verdict int

const (
	mapped  verdict = iota + 1 // crius has a key for it
	builtin                    // crius always behaves so
	refused                    // crius does not support it
)

// rule is the treatment of one foreign key.
type rule struct {
	key     string // NAME stands for the name that an operator gives to a table
	verdict verdict

	// For a mapped key.
	to    string                 // crius's key
	as    func(any) (any, error) // converts the value
	joint bool                   // its value depends on other keys: see joint functions
	unset any                    // foreign default to set explicitly if the key is not set
	note  string                 // written beside the value

	// For a key that is refused or built in.
	off []any // values that need no support; nil: the empty one, or any if built in
	// restricts says that a value which is not off forbids something that crius would allow.
	restricts bool
	why       string // what the lack of support means for the node, or how crius behaves instead
	// lines returns what follows why for a value, such as the lines of another file.
	lines func(value any) string

	differs string // how the foreign default differs from crius's, which applies if the key is not set
}

// conversion turns one foreign configuration into an Import.
type conversion struct {
	out      *Import
	top      *table
	rules    map[string]rule
	problems []error
}

func newConversion(of string, top *table, rules []rule) *conversion {
	c := &conversion{out: &Import{Of: of, Targets: targets(rules)}, top: top, rules: map[string]rule{}}
	for _, r := range rules {
		c.rules[r.key] = r
	}
	return c
}

// found is a key that is set.
type found struct {
	leaf
	key     string // in the file
	general string // in the rules
	name    string // of the table, if it is in one that the operator named
}

// plain applies the rules that depend on a single key.
func (c *conversion) plain(rules []rule, visit func(func(found))) {
	set := map[string]bool{}
	visit(func(f found) {
		r, known := c.rules[f.general]
		set[f.general] = true
		if !known {
			c.remark(f.key, f.leaf, "unknown to crius; if "+c.out.Of+" does not know this key either, it has no effect there")
			c.lastRestricts(mayRestrict(f.general))
			return
		}
		c.follow(r, f)
	})
	for _, r := range rules {
		if set[r.key] || strings.Contains(r.key, anyName) {
			continue
		}
		if r.unset != nil {
			c.set(r.to, r.unset, "default of "+c.out.Of, r.note)
		}
		if r.differs != "" {
			c.out.Differ = append(c.out.Differ, r.key+": "+r.differs)
		}
	}
}

func (c *conversion) follow(r rule, f found) {
	switch {
	case r.joint:
	case r.verdict == mapped:
		value, err := r.convert(f.value)
		if err != nil {
			c.problem(f.place, f.key, err.Error())
			return
		}
		to := r.to
		if f.name != "" {
			if empty(value) { // same as without the key
				return
			}
			to = strings.Replace(to, anyName, toml.Key{f.name}.String(), 1)
		}
		c.set(to, value, f.place+" "+f.key, r.note)
	case r.isOff(f.value):
		if r.verdict == builtin {
			c.out.Builtin = append(c.out.Builtin, f.key)
		} else {
			c.out.Unused = append(c.out.Unused, f.key)
		}
	case r.lines != nil:
		c.remark(f.key, f.leaf, r.why+r.lines(f.value))
		c.lastRestricts(r.restricts)
	default:
		c.remark(f.key, f.leaf, r.why)
		c.lastRestricts(r.restricts)
	}
}

// mayRestrict reports whether the name of an unknown key, or of its table, suggests that it restricts.
func mayRestrict(key string) bool {
	return slices.ContainsFunc([]string{"validator", "verifier", "verify", "allow", "deny", "reject", "restrict", "policy", "seccomp", "apparmor", "selinux", "tls"},
		func(word string) bool { return strings.Contains(strings.ToLower(key), word) })
}

// lastRestricts notes whether the key of the last remark restricts.
func (c *conversion) lastRestricts(is bool) { c.out.Remarks[len(c.out.Remarks)-1].Restricts = is }

// restrictive are the options of crius, or the beginnings of their names, that restrict pods or
// clients.
var restrictive = []string{
	"api.stream_tls_", "api.tls_", "metrics.tls_", "image.signature_policy", "image.verifier", "image.short_name_mode", "nri.",
	"pod.selinux", "pod.seccomp_profile", "pod.apparmor_profile", "pod.default_capabilities", "pod.read_only", "pod.pids_limit",
	"pod.reject_missing_mounts", "pod.host_network_disables_selinux", "network.host_ports", "pod.unprivileged_",
}

// Restrictive reports whether an option of crius restricts pods or clients.
func Restrictive(key string) bool {
	return strings.HasPrefix(key, "runtime.handlers.") && strings.HasSuffix(key, ".seccomp_profile") ||
		slices.ContainsFunc(restrictive, func(start string) bool { return strings.HasPrefix(key, start) })
}

// Lost returns the remarks on keys that restrict, and that accepted does not name.
func (i *Import) Lost(accepted []string) (lost []Remark) {
	for _, r := range i.Remarks {
		if r.Restricts && !slices.Contains(accepted, r.Key) {
			lost = append(lost, r)
		}
	}
	return lost
}

func (r rule) convert(value any) (any, error) {
	if r.as == nil {
		return value, nil
	}
	return r.as(value)
}

// isOff reports whether a value needs no support.
func (r rule) isOff(value any) bool {
	if r.verdict == builtin && r.off == nil {
		return true
	}
	if r.off == nil {
		return empty(value)
	}
	text := Format(value)
	return slices.ContainsFunc(r.off, func(off any) bool { return Format(off) == text })
}

// empty reports whether a value is the usual one of a key that is not set.
func empty(value any) bool {
	return slices.Contains([]string{`""`, "false", "0", "[]", "{}"}, Format(value))
}

// set sets a key of crius. It replaces an earlier value.
func (c *conversion) set(key string, value any, from, note string) {
	c.out.Settings = slices.DeleteFunc(c.out.Settings, func(s Setting) bool { return s.Key == key })
	c.out.Settings = append(c.out.Settings, Setting{Key: key, Value: value, From: from, Note: note})
}

func (c *conversion) remark(key string, l leaf, text string) {
	value := Format(l.value)
	if secret(key) {
		value = "(not shown)"
	}
	c.out.Remarks = append(c.out.Remarks, Remark{Key: key, Value: value, Place: l.place, Text: text})
}

// secret reports whether the value of a key may contain a credential, which must not appear
// in a file that everybody may read.
func secret(key string) bool {
	return slices.ContainsFunc([]string{"password", "username", "token", ".auth", ".headers", ".registry.configs"},
		func(part string) bool { return strings.Contains(strings.ToLower(key), part) })
}

func (c *conversion) problem(place, key, text string) {
	c.problems = append(c.problems, &Problem{Place: place, Key: key, Text: text})
}

// finish puts the lists in a stable order.
func (c *conversion) finish() {
	slices.SortStableFunc(c.out.Remarks, func(a, b Remark) int { return cmp.Compare(a.Key, b.Key) })
	slices.Sort(c.out.Builtin)
	slices.Sort(c.out.Unused)
	slices.Sort(c.out.Differ)
}

// text returns a key of the foreign configuration as a string, "" if it is not set. A value
// of another type is a problem.
func (c *conversion) text(path ...string) string {
	value, _ := typed[string](c, path)
	return value
}

func (c *conversion) flag(path ...string) bool {
	value, _ := typed[bool](c, path)
	return value
}

func typed[T any](c *conversion, path []string) (value T, set bool) {
	l, set := c.top.leaf(path...)
	if !set {
		return value, false
	}
	value, ok := l.value.(T)
	if !ok {
		c.problem(l.place, keyOf(path), fmt.Sprintf("must be of type %s, got %s", typeName[T](), Format(l.value)))
	}
	return value, ok
}

// from returns the origin of a setting that several keys determine: the first of them that
// is set.
func (c *conversion) from(paths ...[]string) string {
	for _, path := range paths {
		if l, ok := c.top.leaf(path...); ok {
			return l.place + " " + keyOf(path)
		}
	}
	return "default of " + c.out.Of
}

// targets returns the keys of crius to which rules map.
func targets(rules []rule) []string {
	var all []string
	for _, r := range rules {
		if r.to != "" {
			all = append(all, r.to)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}
