package config

import (
	"maps"
	"slices"

	"github.com/spf13/pflag"
)

// Flags are the command line flags of a configuration.
type Flags struct {
	set    *pflag.FlagSet // all flags of the command line
	own    *pflag.FlagSet // only those of the configuration
	parsed Config
}

// AddFlags adds a flag for each option to set, except for options of handlers and
// workloads. The type of a value is checked while the command line is parsed.
func AddFlags(set *pflag.FlagSet) *Flags {
	f := &Flags{set: set, own: pflag.NewFlagSet("configuration", pflag.ContinueOnError), parsed: Default()}
	options := f.parsed.flagged()
	for _, path := range slices.Sorted(maps.Keys(options)) {
		key := options[path]
		flag := set.VarPF(&flagValue{key: key}, key.Flag(), "", key.Help)
		if key.Type() == "boolean" {
			flag.NoOptDefVal = "true"
		}
		f.own.AddFlag(flag)
	}
	return f
}

// Set returns only the flags of the configuration.
func (f *Flags) Set() *pflag.FlagSet { return f.own }

// Has reports whether name is a flag of the configuration.
func (f *Flags) Has(name string) bool { return f.own.Lookup(name) != nil }

// Choices returns the allowed values of flags that allow only some, by the name of the
// flag.
func (f *Flags) Choices() map[string][]string {
	all := map[string][]string{}
	for _, key := range f.parsed.flagged() {
		if allowed := key.Choices(); allowed != nil {
			all[key.Flag()] = allowed
		}
	}
	return all
}

// apply sets the options whose flags were used.
func (f *Flags) apply(l *Loaded) {
	given, options := f.parsed.flagged(), l.Config.flagged()
	for path, key := range options {
		if f.set.Changed(key.Flag()) {
			key.value.Set(given[path].value)
			l.origin[path] = origin{"flag", "--" + key.Flag()}
		}
	}
}

// flagValue is the option behind a flag.
type flagValue struct {
	key  Key
	used bool
}

func (v *flagValue) Set(text string) error {
	err := assignText(v.key.value, text, !v.used)
	v.used = true
	return err
}

// String returns the value as the command line accepts it, without TOML's quotes.
func (v *flagValue) String() string {
	if !v.key.value.IsValid() { // pflag calls it on a zero flagValue
		return ""
	}
	return plain(v.key.value.Interface())
}

func (v *flagValue) Type() string { return v.key.Type() }
