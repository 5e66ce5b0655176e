package foreign

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/BurntSushi/toml"

	"github.com/crius-run/crius/oci/annotation"
)

// The tables [crio.runtime.runtimes.NAME].

// defaultRuntime names the default handler. CRI-O's own default was runc before
// version 1.31.
func (c *conversion) defaultRuntime() {
	path := []string{"crio", "runtime", "default_runtime"}
	c.set("runtime.default_handler", c.defaultName(), c.from(path), "")
}

func (c *conversion) defaultName() string {
	if name := c.text("crio", "runtime", "default_runtime"); name != "" {
		return name
	}
	tables := c.top.table("crio", "runtime", "runtimes")
	if tables.table("crun") == nil && tables.table("runc") != nil {
		return "runc"
	}
	return "crun"
}

// runtimes writes a handler for each table.
func (c *conversion) runtimes() {
	tables := c.top.table("crio", "runtime", "runtimes")
	names := []string{}
	if tables != nil {
		names = slices.Sorted(maps.Keys(tables.tables))
	}
	for _, name := range names {
		(&crioRuntime{c, name, c.inherited(tables, name)}).handler()
	}
}

// inherited returns the table of a runtime with the keys that it inherits from the default
// runtime.
func (c *conversion) inherited(tables *table, name string) *table {
	own := tables.table(name)
	inherits, set := own.leaves["inherit_default_runtime"]
	base := tables.table(c.defaultName())
	if yes, ok := inherits.value.(bool); set && !ok {
		c.problem(inherits.place, runtimeKey(name, "inherit_default_runtime"), "must be true or false, got "+Format(inherits.value))
		return own
	} else if !yes || base == nil {
		return own
	}
	merged := newTable()
	merged.overlay(own, func([]string) bool { return true })
	for _, key := range []string{"runtime_path", "runtime_type", "runtime_config_path"} {
		delete(merged.leaves, key)
		if l, ok := base.leaves[key]; ok {
			merged.leaves[key] = l
		}
	}
	if _, ok := base.leaves["runtime_path"]; !ok {
		merged.leaves["runtime_path"] = leaf{c.defaultName(), inherits.place}
	}
	return merged
}

func runtimeKey(name, key string) string {
	return keyOf([]string{"crio", "runtime", "runtimes", name, key})
}

// crioRuntime is the table of a runtime.
type crioRuntime struct {
	*conversion
	name string
	own  *table
}

// text returns the string value of a key of the table, "" if it is not set.
func (r *crioRuntime) text(key string) (string, leaf) {
	l, set := r.own.leaves[key]
	if !set {
		return "", l
	}
	text, ok := l.value.(string)
	if !ok {
		r.problem(l.place, runtimeKey(r.name, key), "must be of type string, got "+Format(l.value))
	}
	return text, l
}

// put sets a key of the handler from a key of the table, or from its default if the key is not set.
func (r *crioRuntime) put(key string, value any, from leaf, foreign, note string) {
	origin := from.place + " " + runtimeKey(r.name, foreign)
	if from.place == "" {
		origin = "default of " + crio
	}
	r.set("runtime.handlers."+toml.Key{r.name}.String()+"."+key, value, origin, note)
}

func (r *crioRuntime) handler() {
	kind, of := r.text("runtime_type")
	switch kind {
	case "", "oci":
		r.put("type", "oci", of, "runtime_type", "")
	case "vm":
		r.put("type", "shim", of, "runtime_type", "")
	case "pod":
		r.put("type", "oci", of, "runtime_type", "")
		r.remark(runtimeKey(r.name, "runtime_type"), of, "each container has its own monitor (crius-conmon) instead of one per pod")
	default:
		r.problem(of.place, runtimeKey(r.name, "runtime_type"), fmt.Sprintf(`must be "oci", "vm" or "pod", got %q`, kind))
	}
	if path, from := r.text("runtime_path"); path != "" {
		r.put("path", path, from, "runtime_path", "")
	}
	if file, from := r.text("runtime_config_path"); file != "" {
		if kind == "vm" {
			r.put("options", []string{"--ConfigPath=" + file}, from, "runtime_config_path", "")
		} else {
			r.remark(runtimeKey(r.name, "runtime_config_path"), from, "only shims (runtime_type \"vm\") are given a configuration file, in CRI-O as well")
		}
	}
	r.annotations(kind)
}

// annotations allows the annotations that CRI-O allows. CRI-O always passes Kata's own
// annotations to Kata.
func (r *crioRuntime) annotations(kind string) {
	var patterns []string
	from, set := r.own.leaves["allowed_annotations"]
	if set {
		var err error
		if patterns, err = patternsOf(from.value); err != nil {
			r.problem(from.place, runtimeKey(r.name, "allowed_annotations"), err.Error())
		}
	}
	note := ""
	if kind == "vm" {
		patterns = append(patterns, "io.katacontainers.*")
		note = "CRI-O passes Kata's annotations by default"
	}
	if len(patterns) == 0 {
		return
	}
	r.put("allowed_annotations", patterns, from, "allowed_annotations", note)
	r.put("allowed_container_annotations", patterns, from, "allowed_annotations", "")
}

// annotationsNotDone remarks on annotations that a table of a runtime or a workload allows, on which
// CRI-O acts and crius does not.
func (c *conversion) annotationsNotDone() {
	for _, kind := range []string{"runtimes", "workloads"} {
		tables := c.top.table("crio", "runtime", kind)
		if tables == nil {
			continue
		}
		for _, name := range slices.Sorted(maps.Keys(tables.tables)) {
			l := tables.tables[name].leaves["allowed_annotations"]
			prefixes, _ := textsOf(l.value) // an error has been reported
			for _, old := range slices.Sorted(maps.Keys(annotation.NotDone)) {
				not := annotation.NotDone[old]
				if key := allowed(prefixes, old, not.Key); key != "" {
					c.remark(keyOf([]string{"crio", "runtime", kind, name, "allowed_annotations"}), leaf{key, l.place}, not.Means)
				}
			}
		}
	}
}

// allowed returns the first of the keys that prefixes allow; empty: none.
func allowed(prefixes []string, keys ...string) string {
	for _, key := range keys {
		if slices.ContainsFunc(prefixes, func(prefix string) bool { return strings.HasPrefix(key, prefix) }) {
			return key
		}
	}
	return ""
}
