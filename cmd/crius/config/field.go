package config

import (
	"iter"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/server"
	"github.com/crius-run/crius/server/otlp"
)

// field is an option or a table of options. The tags of its struct field are the only place
// that describes an option:
//
//	toml     the name of the key
//	help     one sentence for people, without its full stop
//	apply    when a changed value takes effect: reload, or "restart: " and the reason; required
//	choices  the values that are allowed, separated by commas; absent: any
//	form     the rule for its values, one of forms; absent: none beyond the type
//	input    yes: names files or directories that crius only reads
type field struct {
	name  string
	tag   reflect.StructTag
	value reflect.Value
	index int
}

// fields yields the options and tables of the struct v.
func fields(v reflect.Value) iter.Seq[field] {
	return func(yield func(field) bool) {
		for i := range v.NumField() {
			tag := v.Type().Field(i).Tag
			name := tag.Get("toml")
			if name == "" {
				continue
			}
			if !yield(field{name, tag, v.Field(i), i}) {
				return
			}
		}
	}
}

func (f field) help() string { return f.tag.Get("help") }

// live reports whether a reload applies a changed value; any other needs a restart of the
// server. A table is live if all its options are.
func (f field) live() bool {
	switch f.value.Kind() {
	case reflect.Struct:
		return allLive(f.value)
	case reflect.Map:
		return allLive(reflect.Zero(f.value.Type().Elem()))
	default:
		return f.tag.Get("apply") == "reload"
	}
}

// whyRestart says why a changed value needs a restart; empty: it does not.
func (f field) whyRestart() string {
	_, why, _ := strings.Cut(f.tag.Get("apply"), "restart: ")
	return why
}

func allLive(table reflect.Value) bool {
	for f := range fields(table) {
		if !f.live() {
			return false
		}
	}
	return true
}

// form is a rule for the values of an option.
type form struct {
	words string            // completes "must be" in an error
	ok    func(string) bool // checks a text; nil: any is fine
	above bool              // a number must be above 0
}

// Forms that also decide how values are compared.
const (
	pathForm    = "path"
	programForm = "program"
)

var cveNumber = regexp.MustCompile(`^CVE-\d{4}-\d{4,}$`)

// forms are the rules, by their names in the tag form.
var forms = map[string]form{
	pathForm: {words: "an absolute path", ok: filepath.IsAbs},
	"path or empty": {words: "an absolute path or an empty string", ok: func(text string) bool {
		return text == "" || filepath.IsAbs(text)
	}},
	programForm: {words: "an absolute path or a bare name to search in PATH", ok: func(text string) bool {
		return filepath.IsAbs(text) || text != "" && !strings.Contains(text, "/")
	}},
	"version or empty": {words: "a semantic version such as 1.37.0, or an empty string", ok: func(text string) bool {
		return text == "" || server.IsVersion(text)
	}},
	"criu or empty": {words: "an absolute path that ends in /criu, the name criu or an empty string", ok: func(text string) bool {
		return text == "" || text == "criu" || filepath.IsAbs(text) && filepath.Base(text) == "criu"
	}},
	"collector or empty": {words: "http://HOST:PORT, https://HOST:PORT or an empty string", ok: func(text string) bool {
		_, ok := otlp.ParseEndpoint(text)
		return ok || text == ""
	}},
	"CVE": {words: "a CVE, such as CVE-2024-21626", ok: cveNumber.MatchString},
	"annotation": {words: "of the form KEY=VALUE", ok: func(text string) bool {
		return strings.IndexByte(text, '=') > 0
	}},
	"annotation pattern": {words: "an annotation key or a pattern of *, ? and [...], with every bracket closed", ok: func(text string) bool {
		_, err := path.Match(text, "")
		return err == nil
	}},
	"flag": {words: "a flag of the form --name=value that crius does not set itself", ok: func(text string) bool {
		name, _, _ := strings.Cut(strings.TrimLeft(text, "-"), "=")
		return strings.HasPrefix(text, "-") && name != "" && !slices.Contains([]string{"root", "systemd-cgroup"}, name)
	}},
	"first or empty": {words: "first or an empty string", ok: func(text string) bool {
		return text == "" || text == oci.FirstCPU
	}},
	"positive": {words: "more than 0", above: true},
}
