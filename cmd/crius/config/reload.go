package config

import (
	"maps"
	"reflect"
	"slices"
	"strings"
)

// Live lists the options and tables of tables that a reload applies, in the order of the
// template.
func Live() []string {
	c := Default()
	return liveIn(reflect.ValueOf(c), "")
}

func liveIn(table reflect.Value, path string) (live []string) {
	for f := range fields(table) {
		at := join(path, f.name)
		switch {
		case f.value.Kind() == reflect.Struct:
			live = append(live, liveIn(f.value, at)...)
		case f.live():
			live = append(live, at)
		}
	}
	return live
}

// Reloaded returns the configuration l with those values of wanted that a reload applies.
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

// copyLive gives the table dst the values of src that a reload applies. The tables of a
// map come and go as a whole.
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

// Differences are the keys whose values are not the same in two configurations. A
// table that only one of them has, such as that of a handler, counts as one.
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
	keys := slices.AppendSeq([]string{}, maps.Keys(different)) // not nil, which JSON calls null
	slices.Sort(keys)
	return keys
}

func merged(a, b map[string]string) map[string]string {
	all := maps.Clone(a)
	maps.Copy(all, b)
	return all
}

// has tells whether there is a key in the table; there always is at the top.
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
