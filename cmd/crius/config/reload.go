package config

import (
	"maps"
	"slices"
	"strings"
)

// Reloaded is the configuration l with those values of another one that a reload
// puts in force.
func (l *Loaded) Reloaded(wanted *Loaded) *Loaded {
	next := &Loaded{Config: l.Config, Files: wanted.Files, origin: maps.Clone(l.origin)}
	next.Config.LogLevel = wanted.Config.LogLevel
	next.Config.Runtime.Handlers = wanted.Config.Runtime.Handlers
	next.Config.Runtime.DefaultHandler = wanted.Config.Runtime.DefaultHandler
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
	return key == "log_level" || key == "runtime.default_handler" || strings.HasPrefix(key, "runtime.handlers.")
}

// Differences are the keys whose values are not the same in two configurations,
// tables that only one of them has included.
func Differences(a, b *Loaded) []string {
	before, after := a.values(), b.values()
	different := map[string]bool{}
	for key, value := range after {
		if old, ok := before[key]; !ok || old != value {
			different[key] = true
		}
	}
	for key := range before {
		if _, ok := after[key]; !ok {
			different[key] = true
		}
	}
	return slices.Sorted(maps.Keys(different))
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
