package config

import (
	"maps"
	"slices"

	"github.com/spf13/pflag"
)

// Flags are the command line flags of a configuration.
type Flags struct {
	set    *pflag.FlagSet // of the command line, with other flags
	own    *pflag.FlagSet // those of the configuration alone
	parsed Config
}

// AddFlags gives set one flag for each option but those of single runtime
// handlers. A flag's value is checked while the command line is parsed.
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

// Set are the flags of the configuration, without others of the command line.
func (f *Flags) Set() *pflag.FlagSet { return f.own }

// Has tells whether name is a flag of the configuration.
func (f *Flags) Has(name string) bool { return f.own.Lookup(name) != nil }

// Choices are the values that flags allow, by the name of the flag, for those
// that allow only some.
func (f *Flags) Choices() map[string][]string {
	all := map[string][]string{}
	for _, key := range f.parsed.flagged() {
		if allowed := key.Choices(); allowed != nil {
			all[key.Flag()] = allowed
		}
	}
	return all
}

// apply lays the flags that were used over a configuration.
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

// String is the value without TOML's quotes, as the command line takes it.
func (v *flagValue) String() string {
	if !v.key.value.IsValid() { // pflag asks a zero flagValue
		return ""
	}
	return plain(v.key.value.Interface())
}

func (v *flagValue) Type() string { return v.key.Type() }
