package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"
)

const templateHead = `# Configuration of crius, see crius.toml(5).
#
# Every key is shown with its default; leaving a key out has the same effect.
# Files in crius.toml.d/ beside this one are read afterwards, in the order of
# their names, and command line flags last. "crius config" prints the effective
# configuration and its origin. The server reads all of it again on SIGHUP
# (systemctl reload crius), and logs which changes need a restart.
`

// WriteTemplate writes a configuration file that sets nothing but shows each key in a
// comment, with its help and its default.
//
// The values are comments so that a copy of the file does not keep today's defaults on a
// node that is upgraded later.
func WriteTemplate(w io.Writer) error {
	c := Default()
	c.Runtime.Workloads = anyWorkload()
	var b strings.Builder
	b.WriteString(templateHead)
	for _, s := range c.sections() {
		mark := ""
		if slices.Contains(strings.Split(s.Path, "."), anyName) { // no such table exists by default
			mark = "#"
		}
		if s.Path != "" {
			fmt.Fprintf(&b, "\n%s%s[%s]\n", comment(s.Help), mark, s.Path)
		}
		for _, k := range s.Keys {
			fmt.Fprintf(&b, "\n%s#%s = %s\n", comment(k.Help), k.Name(), k.TOML())
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// Write writes the configuration in force as a configuration file, with the origin of each
// value in a comment.
func (l *Loaded) Write(w io.Writer) error {
	var b strings.Builder
	for i, s := range l.Config.sections() {
		if i > 0 {
			fmt.Fprintf(&b, "\n[%s]\n", s.Path)
		}
		for _, k := range s.Keys {
			fmt.Fprintf(&b, "%s = %s # %s\n", k.Name(), k.TOML(), strings.Trim(quote(l.Origin(k.Path)), `"`))
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// Setting is a value that is not a default.
type Setting struct {
	Key    string `json:"key"`
	Value  string `json:"value"` // in the syntax of the configuration file
	Origin string `json:"origin"`
}

// Settings lists the values that do not come from the defaults.
func (l *Loaded) Settings() []Setting {
	settings := []Setting{}
	for k := range l.Config.keys() {
		if _, ok := l.origin[k.Path]; ok {
			settings = append(settings, Setting{Key: k.Path, Value: k.TOML(), Origin: l.Origin(k.Path)})
		}
	}
	return settings
}

// Tables returns the options with their values by the names of the configuration file, for JSON.
func (c Config) Tables() map[string]any { return tableOf(reflect.ValueOf(c)) }

func tableOf(table reflect.Value) map[string]any {
	all := map[string]any{}
	for f := range fields(table) {
		switch f.value.Kind() {
		case reflect.Struct:
			all[f.name] = tableOf(f.value)
		case reflect.Map:
			named := map[string]any{}
			for _, name := range names(f.value) {
				named[name] = tableOf(element(f.value, name))
			}
			all[f.name] = named
		default:
			all[f.name] = shown(f.value.Interface())
		}
	}
	return all
}

// ReadTables reads the JSON of Tables. It fails if an option is missing: another version has written it.
func ReadTables(text []byte) (*Loaded, error) {
	l := new(Loaded)
	var tables map[string]any
	if err := json.Unmarshal(text, &tables); err != nil {
		return nil, err
	}
	return l, readTable(reflect.ValueOf(&l.Config).Elem(), tables)
}

func readTable(table reflect.Value, from map[string]any) (err error) {
	for f := range fields(table) {
		value, has := from[f.name]
		inner, _ := value.(map[string]any)
		switch {
		case !has:
			err = errors.New("it is missing")
		case f.value.Kind() == reflect.Struct:
			err = readTable(f.value, inner)
		case f.value.Kind() == reflect.Map:
			err = readTables(f.value, inner)
		default:
			err = assign(f.value, decoded(value))
		}
		if err != nil {
			return fmt.Errorf("%s: %w", f.name, err)
		}
	}
	return nil
}

func readTables(tables reflect.Value, from map[string]any) error {
	tables.Set(reflect.MakeMap(tables.Type()))
	for name, table := range from {
		inner, _ := table.(map[string]any)
		e := element(tables, name)
		if err := readTable(e, inner); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		tables.SetMapIndex(reflect.ValueOf(name), e)
	}
	return nil
}

// decoded returns a value from the JSON decoder as one from the TOML decoder.
func decoded(value any) any {
	switch v := value.(type) {
	case float64:
		return int64(v)
	case nil:
		return []any{}
	}
	return value
}

// shown returns what JSON has for a value: durations and modes as in the configuration file.
func shown(value any) any {
	switch v := value.(type) {
	case time.Duration:
		return v.String()
	case os.FileMode:
		return fmt.Sprintf("%O", v)
	}
	return value
}

// comment formats a text as lines of at most 79 columns that begin with "# ".
func comment(text string) string {
	var b strings.Builder
	column := 0
	for _, word := range strings.Fields(text) {
		switch {
		case column == 0:
			b.WriteString("#")
			column = 1
		case column+1+len(word) > 79:
			b.WriteString("\n#")
			column = 1
		}
		b.WriteString(" " + word)
		column += 1 + len(word)
	}
	if column > 0 {
		b.WriteString("\n")
	}
	return b.String()
}
