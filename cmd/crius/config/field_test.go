package config

import (
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/crius-run/crius/server"
)

// Every option says when a changed value takes effect, and all its tags are known.
func TestTagsOfOptions(t *testing.T) {
	known := []string{"toml", "json", "help", "apply", "choices", "form", "input"} // json: a pod's record has its handler
	used := map[string]bool{}
	for _, s := range Schema() {
		for _, k := range s.Keys {
			equal(t, "model of "+k.Path, k.model, k.Path)
			for _, m := range regexp.MustCompile(`(\w+):"`).FindAllStringSubmatch(withoutValues(string(k.tag)), -1) {
				if !slices.Contains(known, m[1]) {
					t.Errorf("%s has the tag %s, which means nothing", k.Path, m[1])
				}
			}
			if apply := k.tag.Get("apply"); (apply != "reload") != (k.WhyRestart() != "") {
				t.Errorf("%s has the tag apply:%q: say that a changed value takes effect at a reload, or after a restart and why", k.Path, apply)
			}
			if input, has := k.tag.Lookup("input"); has && input != "yes" {
				t.Errorf("%s has the tag input:%q instead of yes", k.Path, input)
			}
			if choices, has := k.tag.Lookup("choices"); has && slices.Contains(strings.Split(choices, ","), "") {
				t.Errorf("%s has an empty choice: %q", k.Path, choices)
			}
			if name, has := k.tag.Lookup("form"); has && forms[name].words == "" {
				t.Errorf("%s has the form %q, which is none of forms", k.Path, name)
			}
			used[k.formName()] = true
		}
	}
	for name := range forms {
		if !used[name] {
			t.Errorf("no option has the form %q", name)
		}
	}
}

// withoutValues replaces the values in a tag by empty ones.
func withoutValues(tag string) string {
	return regexp.MustCompile(`"(\\.|[^"\\])*"`).ReplaceAllString(tag, `""`)
}

func TestPodMetricChoicesAreThoseOfTheServer(t *testing.T) {
	c := Default()
	equal(t, "choices", c.flagged()["metrics.included_pod_metrics"].Choices(), append(server.PodMetricKinds(), server.AllPodMetrics))
}

// The tables of a map are replaced as a whole, and so are live only as a whole.
func TestTablesOfAMapAreLiveAsAWhole(t *testing.T) {
	type mixed struct {
		A string `toml:"a" apply:"reload"`
		B string `toml:"b" apply:"restart: it is read at the start"`
	}
	type table struct {
		Mixed map[string]mixed `toml:"mixed"`
	}
	for f := range fields(reflect.ValueOf(table{})) {
		equal(t, "live", f.live(), false)
	}
}
