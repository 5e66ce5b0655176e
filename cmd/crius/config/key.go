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
	model string // Path as in Schema: "runtime.handlers.NAME.path"
	value reflect.Value
}

// Name is the key inside its section.
func (k Key) Name() string { return k.Path[strings.LastIndexByte(k.Path, '.')+1:] }

// Flag is the name of the command line flag that sets the key.
func (k Key) Flag() string { return strings.NewReplacer(".", "-", "_", "-").Replace(k.Path) }

// TOML is the key's value as the configuration file would have it.
func (k Key) TOML() string { return format(k.value.Interface()) }

// Type names the key's type for people.
func (k Key) Type() string { return typeName(k.value) }

// Schema is the default configuration as sections and keys, in the order of
// the template. The tables of runtime handlers and workloads stand in it once, under NAME.
func Schema() []Section {
	c := Default()
	c.Runtime.Workloads = anyWorkload()
	c.Runtime.Handlers = map[string]oci.Handler{anyName: oci.DefaultHandlerConfig(anyName)}
	return sections(&c)
}

// anyName stands for the name that an operator gives to a table.
const anyName = "NAME"

func anyWorkload() map[string]annotation.Workload {
	return map[string]annotation.Workload{anyName: {}}
}

// sections lists the tables of a configuration. Their keys can set it, except
// for those below a map of tables.
func sections(c *Config) []Section {
	return tables(reflect.ValueOf(c).Elem(), Section{}, "")
}

// tables lists the table v with the tables inside it. own says what is known of
// it, model is its path as in Schema.
func tables(v reflect.Value, own Section, model string) []Section {
	var inner []Section
	for f := range fields(v) {
		at, like := join(own.Path, f.name), join(model, f.name)
		switch f.value.Kind() {
		case reflect.Struct:
			inner = append(inner, tables(f.value, Section{Path: at, Help: f.help}, like)...)
		case reflect.Map:
			for i, name := range names(f.value) {
				s := Section{Path: join(at, name)}
				if i == 0 {
					s.Help = f.help
				}
				inner = append(inner, tables(element(f.value, name), s, join(like, anyName))...)
			}
		default:
			own.Keys = append(own.Keys, Key{Path: at, Help: f.help, model: like, value: f.value})
		}
	}
	return append([]Section{own}, inner...)
}

// keys are the options of c that stand in it exactly once, and so have a flag:
// all but those of runtime handlers and workloads.
func keys(c *Config) map[string]Key {
	all := map[string]Key{}
	for _, s := range sections(c) {
		for _, k := range s.Keys {
			if k.Path == k.model {
				all[k.Path] = k
			}
		}
	}
	return all
}

// field is what the tags say about a struct field.
type field struct {
	name, help string
	value      reflect.Value
}

// fields yields the fields of the struct v that the configuration can set.
func fields(v reflect.Value) iter.Seq[field] {
	return func(yield func(field) bool) {
		for i := range v.NumField() {
			tag := v.Type().Field(i).Tag
			name := tag.Get("toml")
			if name == "" {
				continue
			}
			if !yield(field{name, tag.Get("help"), v.Field(i)}) {
				return
			}
		}
	}
}

// names are the sorted names of the tables in the map m.
func names(m reflect.Value) []string {
	var all []string
	for _, k := range m.MapKeys() {
		all = append(all, k.String())
	}
	slices.Sort(all)
	return all
}

// element is a settable copy of the table called name in m, or a new one.
func element(m reflect.Value, name string) reflect.Value {
	copied := reflect.New(m.Type().Elem()).Elem()
	if old := m.MapIndex(reflect.ValueOf(name)); old.IsValid() {
		copied.Set(old)
	} else if handler, ok := copied.Addr().Interface().(*oci.Handler); ok {
		*handler = oci.DefaultHandlerConfig(name)
	}
	return copied
}

// join extends a path by one name, which is quoted where TOML wants it.
func join(path, name string) string {
	name = toml.Key{name}.String()
	if path == "" {
		return name
	}
	return path + "." + name
}
