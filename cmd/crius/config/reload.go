package config

import (
	"maps"
	"slices"
	"strings"
)

// Reloaded is the configuration l with those values of another one that a reload
// puts in force.
func (l *Loaded) Reloaded(wanted *Loaded) *Loaded {
	next := &Loaded{Config: l.Config, Files: wanted.Files, Ignored: wanted.Ignored, origin: maps.Clone(l.origin)}
	next.Config.LogLevel = wanted.Config.LogLevel
	next.Config.Runtime.Handlers = wanted.Config.Runtime.Handlers
	next.Config.Runtime.DefaultHandler = wanted.Config.Runtime.DefaultHandler
	next.Config.Runtime.CRIOHandlersDir = wanted.Config.Runtime.CRIOHandlersDir
	maps.DeleteFunc(next.origin, func(key string, _ origin) bool { return live(key) })
	for key, from := range wanted.origin {
		if live(key) {
			next.origin[key] = from
		}
	}
	return next
}

// live reports whether a reload puts a key in force; all others want the server
// to be restarted.
func live(key string) bool {
	return key == "log_level" || key == "runtime.default_handler" || key == "runtime.crio_handlers_dir" || strings.HasPrefix(key, "runtime.handlers.")
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
	for _, s := range sections(&l.Config) {
		for _, k := range s.Keys {
			all[k.Path] = k.TOML()
		}
	}
	return all
}
