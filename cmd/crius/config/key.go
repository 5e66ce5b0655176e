package config

import (
	"iter"
	"reflect"
	"slices"
	"strings"

	"github.com/BurntSushi/toml"

	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/annotation"
)

// Section is one TOML table of the configuration.
type Section struct {
	Path string // "runtime.handlers.runc"; empty for the top level
	Help string
	Keys []Key
}

// Key is one option.
type Key struct {
	Path  string // "runtime.handlers.runc.path"
	Help  string // one sentence without its full stop
	model string // Path in Schema: "runtime.handlers.NAME.path"
	field
}

// Name returns the key within its section.
func (k Key) Name() string { return k.Path[strings.LastIndexByte(k.Path, '.')+1:] }

// Flag returns the name of the command line flag that sets the key.
func (k Key) Flag() string { return strings.NewReplacer(".", "-", "_", "-").Replace(k.Path) }

// TOML returns the value in the syntax of the configuration file.
func (k Key) TOML() string { return format(k.value.Interface()) }

// Type returns the name of the key's type for people.
func (k Key) Type() string { return typeName(k.value) }

// Live reports whether a reload applies a changed value; any other needs a restart of the
// server.
func (k Key) Live() bool { return k.live() }

// WhyRestart says why a changed value needs a restart of the server; empty: a reload applies it.
func (k Key) WhyRestart() string { return k.whyRestart() }

// Choices returns the allowed values; nil: any.
func (k Key) Choices() []string {
	if list := k.tag.Get("choices"); list != "" {
		return strings.Split(list, ",")
	}
	return nil
}

// isInput reports whether the key names files or directories that crius only reads.
func (k Key) isInput() bool { return k.tag.Get("input") == "yes" }

func (k Key) formName() string { return k.tag.Get("form") }

// form returns the rule for the key's values beyond its type and choices.
func (k Key) form() form { return forms[k.formName()] }

// Schema returns the default configuration as sections and keys, in the order of the
// template. It has the tables of runtime handlers and workloads once, under NAME.
func Schema() []Section {
	c := Default()
	c.Runtime.Workloads = anyWorkload()
	c.Runtime.Handlers = map[string]oci.Handler{anyName: oci.DefaultHandlerConfig(anyName)}
	return c.sections()
}

// anyName stands for the name that an operator gives to a table.
const anyName = "NAME"

func anyWorkload() map[string]annotation.Workload {
	return map[string]annotation.Workload{anyName: {}}
}

// sections lists the tables of the configuration. Setting the value of a key changes the
// configuration, except below a map of tables.
func (c *Config) sections() []Section {
	return tables(reflect.ValueOf(c).Elem(), Section{}, "")
}

// tables lists the table v and the tables inside it. own has the path and the help of v,
// model is its path in Schema.
func tables(v reflect.Value, own Section, model string) []Section {
	var inner []Section
	for f := range fields(v) {
		at, like := join(own.Path, f.name), join(model, f.name)
		switch f.value.Kind() {
		case reflect.Struct:
			inner = append(inner, tables(f.value, Section{Path: at, Help: f.help()}, like)...)
		case reflect.Map:
			for i, name := range names(f.value) {
				s := Section{Path: join(at, name)}
				if i == 0 {
					s.Help = f.help()
				}
				inner = append(inner, tables(element(f.value, name), s, join(like, anyName))...)
			}
		default:
			own.Keys = append(own.Keys, Key{Path: at, Help: f.help(), model: like, field: f})
		}
	}
	return append([]Section{own}, inner...)
}

// keys yields the options of all tables.
func (c *Config) keys() iter.Seq[Key] {
	return func(yield func(Key) bool) {
		for _, s := range c.sections() {
			for _, k := range s.Keys {
				if !yield(k) {
					return
				}
			}
		}
	}
}

// flagged returns the options that have a flag, by their paths: all except those of runtime
// handlers and workloads, which may exist several times.
func (c *Config) flagged() map[string]Key {
	all := map[string]Key{}
	for k := range c.keys() {
		if k.Path == k.model {
			all[k.Path] = k
		}
	}
	return all
}

// names returns the sorted names of the tables in the map m.
func names(m reflect.Value) []string {
	var all []string
	for _, k := range m.MapKeys() {
		all = append(all, k.String())
	}
	slices.Sort(all)
	return all
}

// element returns a settable copy of the table called name in m, or a new table.
func element(m reflect.Value, name string) reflect.Value {
	copied := reflect.New(m.Type().Elem()).Elem()
	if old := m.MapIndex(reflect.ValueOf(name)); old.IsValid() {
		copied.Set(old)
	} else if handler, ok := copied.Addr().Interface().(*oci.Handler); ok {
		*handler = oci.DefaultHandlerConfig(name)
	}
	return copied
}

// join extends a path by one name, quoted if TOML requires it.
func join(path, name string) string {
	name = toml.Key{name}.String()
	if path == "" {
		return name
	}
	return path + "." + name
}
