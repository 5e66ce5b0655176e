package config

import (
	"maps"
	"reflect"
	"slices"
	"strings"
)

// WhyRestart says why a changed value of the option at path needs a restart; empty: it does not, or
// there is no such option.
func WhyRestart(path string) string {
	c := Default()
	for key := range c.keys() {
		if key.Path == path {
			return key.WhyRestart()
		}
	}
	return ""
}

// Reloaded returns l with the values of wanted that a reload applies.
func (l *Loaded) Reloaded(wanted *Loaded) *Loaded {
	next := &Loaded{Config: l.Config, Files: wanted.Files, Ignored: wanted.Ignored, origin: map[string]origin{}}
	copyLive(reflect.ValueOf(&next.Config).Elem(), reflect.ValueOf(&wanted.Config).Elem())
	for key := range next.Config.keys() {
		from := l
		if key.live() {
			from = wanted
		}
		if origin, ok := from.origin[key.Path]; ok {
			next.origin[key.Path] = origin
		}
	}
	return next
}

// WithFlags returns l with the values that a server has from flags, and these flags. settings are the
// server's. What l has from a flag itself stays.
func (l *Loaded) WithFlags(server *Loaded, settings []Setting) (with *Loaded, flags []string) {
	values := map[string]Key{}
	for key := range server.Config.keys() {
		values[key.Path] = key
	}
	with = &Loaded{Config: l.Config, Files: l.Files, Ignored: l.Ignored, origin: maps.Clone(l.origin)}
	if with.origin == nil {
		with.origin = map[string]origin{}
	}
	for key := range with.Config.keys() {
		for _, s := range settings {
			flag, given := strings.CutPrefix(s.Origin, "flag ")
			theirs, known := values[key.Path]
			if s.Key != key.Path || !given || !known || l.origin[key.Path].kind == "flag" || key.TOML() == theirs.TOML() {
				continue
			}
			key.value.Set(theirs.value)
			with.origin[key.Path] = origin{"flag", flag}
			flags = append(flags, flag+" "+theirs.TOML())
		}
	}
	return with, flags
}

// copyLive copies the values that a reload applies from the table src to dst. A map of
// tables is copied as a whole.
func copyLive(dst, src reflect.Value) {
	for f := range fields(dst) {
		switch {
		case f.value.Kind() == reflect.Struct:
			copyLive(f.value, src.Field(f.index))
		case f.live():
			f.value.Set(src.Field(f.index))
		}
	}
}

// Differences lists the keys whose values differ. A table that only one of the
// configurations has, such as a handler's, counts as one key.
func Differences(a, b *Loaded) []string {
	before, after := a.values(), b.values()
	different := map[string]bool{}
	for path := range merged(before, after) {
		table := path[:max(0, strings.LastIndexByte(path, '.'))]
		switch {
		case before[path] == after[path]:
		case has(before, table) && has(after, table):
			different[path] = true
		default:
			different[table] = true
		}
	}
	keys := slices.AppendSeq([]string{}, maps.Keys(different)) // not nil, which is null in JSON
	slices.Sort(keys)
	return keys
}

func merged(a, b map[string]string) map[string]string {
	all := maps.Clone(a)
	maps.Copy(all, b)
	return all
}

// has reports whether a table has a key. The top level always does.
func has(values map[string]string, table string) bool {
	for path := range values {
		if strings.HasPrefix(path, table+".") || table == "" {
			return true
		}
	}
	return false
}

func (l *Loaded) values() map[string]string {
	all := map[string]string{}
	for key := range l.Config.keys() {
		all[key.Path] = key.TOML()
	}
	return all
}
