package config

import (
	"encoding/json"
	"maps"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"unicode"

	"github.com/spf13/pflag"

	"github.com/crius-run/crius/oci"
)

func template(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	if err := WriteTemplate(&b); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestTemplateIsTheSampleFile(t *testing.T) {
	const golden = "../../../contrib/crius.toml"
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if template(t) != string(want) {
		t.Errorf("%s is out of date: run make generate", golden)
	}
}

func TestTemplateRoundTrips(t *testing.T) {
	asItIs := template(t)
	// Keys follow the # immediately, prose after a space.
	inForce := regexp.MustCompile(`(?m)^#(\S)`).ReplaceAllString(asItIs, "$1")
	for what, text := range map[string]string{"as it is": asItIs, "with its comments in force": inForce} {
		n := newNode(t)
		n.write(n.file, text)
		loaded, err := n.load()
		if err != nil {
			t.Errorf("%s: %v", what, err)
			continue
		}
		delete(loaded.Config.Runtime.Workloads, anyName) // only an example
		equal(t, what, normal(loaded.Config), normal(Default()))
		said := loaded.Origin("network.timeout") != "default"
		equal(t, what+" says something", said, text == inForce)
	}
}

func TestTemplateFitsTheScreen(t *testing.T) {
	for _, line := range strings.Split(template(t), "\n") {
		if strings.HasPrefix(line, "# ") && len(line) > 79 {
			t.Errorf("%d columns: %s", len(line), line)
		}
	}
}

// TestEveryOption checks all options of all packages: each has a help text, a supported
// type and a valid name.
func TestEveryOption(t *testing.T) {
	name := regexp.MustCompile(`^[a-z][a-z0-9_]*$`)
	text := template(t)
	for _, s := range Schema() {
		for _, k := range s.Keys {
			first, last := rune(k.Help[0]), rune(k.Help[len(k.Help)-1])
			if unicode.IsUpper(first) && unicode.IsLower(rune(k.Help[1])) && !strings.HasPrefix(k.Help, "Go ") || last == '.' {
				t.Errorf("help of %s is a whole sentence: %q", k.Path, k.Help)
			}
			if !name.MatchString(k.Name()) {
				t.Errorf("%s: the last part is not lower case with underscores", k.Path)
			}
			if !strings.Contains(text, "\n#"+k.Name()+" = ") {
				t.Errorf("%s is not in the template", k.Path)
			}
			for _, choice := range k.Choices() {
				if !strings.Contains(k.Help, choice) {
					t.Errorf("%s: the choice %q is not explained in %q", k.Path, choice, k.Help)
				}
			}
			k.Type()
		}
	}
}

func TestWriteNamesOrigins(t *testing.T) {
	n := newNode(t)
	n.write(n.file, "[network]\ndefault_network = \"a\\\"b\\\\\\u009b\\u202e\"")
	n.dropIn("\x1b[31m.toml", "[runtime.handlers.kata]\npath = '/opt/kata'")
	var b strings.Builder
	if err := n.mustLoad("--api-listen=/run/x.sock").Write(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"root = \"/var/lib/crius\" # default\n",
		"\n[api]\nlisten = \"/run/x.sock\" # flag --api-listen\nsocket_mode = 0o660 # default\n",
		"\n[runtime.handlers.kata]\ntype = \"oci\" # default\npath = \"/opt/kata\" # drop-in " + n.dir + `/\U0000001B[31m.toml:2` + "\n",
		`default_network = "a\"b\\\U0000009B\U0000202E" # file ` + n.file + ":2\n",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is not in\n%s", want, b.String())
		}
	}
}

func TestComment(t *testing.T) {
	long := strings.Repeat("x", 100)
	for text, want := range map[string]string{
		"":                                  "",
		"short":                             "# short\n",
		strings.Repeat("word ", 15) + "x":   "# " + strings.Repeat("word ", 15) + "x\n",
		strings.Repeat("word ", 15) + "xyz": "# " + strings.TrimSpace(strings.Repeat("word ", 15)) + "\n# xyz\n",
		long + " end":                       "# " + long + "\n# end\n",
	} {
		equal(t, text, comment(text), want)
	}
}

func TestFlags(t *testing.T) {
	set := pflag.NewFlagSet("test", pflag.ContinueOnError)
	flags := AddFlags(set)
	for path, k := range new(Config).flagged() {
		f := set.Lookup(k.Flag())
		if f == nil {
			t.Errorf("%s has no flag", path)
		} else if f.Usage != k.Help {
			t.Errorf("flag of %s says %q", path, f.Usage)
		}
	}
	for _, path := range []string{"runtime.handlers.runc.path", "pod.state_dir"} {
		if set.Lookup((Key{Path: path}).Flag()) != nil {
			t.Errorf("%s has a flag", path)
		}
	}
	equal(t, "choices", flags.Choices()["runtime-cgroup-driver"], []string{"systemd", "cgroupfs"})
	equal(t, "default of a list", set.Lookup("network-plugin-dirs").DefValue, "[/opt/cni/bin, /usr/lib/cni, /usr/libexec/cni]")
	equal(t, "default of a duration", set.Lookup("network-timeout").DefValue, "2m")
	equal(t, "default of a mode", set.Lookup("api-socket-mode").DefValue, "0o660")
}

func TestFlagValues(t *testing.T) {
	for _, c := range []struct {
		args []string
		key  string
		want string // TOML, or the end of the error
	}{
		{[]string{"--pod-read-only"}, "pod.read_only", "true"},
		{[]string{"--pod-read-only=false"}, "pod.read_only", "false"},
		{[]string{"--pod-read-only=si"}, "", "must be true or false"},
		{[]string{"--pod-pids-limit=many"}, "", "must be a number"},
		{[]string{"--pod-pids-limit=99999999999999999999"}, "", "must be a number"},
		{[]string{"--api-socket-mode=600"}, "api.socket_mode", "0o600"},
		{[]string{"--api-socket-mode=rw"}, "", `must be permission bits such as 0o660, got "rw"`},
		{[]string{"--network-timeout=1m0s"}, "network.timeout", `"1m"`},
		{[]string{"--network-timeout=5"}, "", `must be a duration such as "5m" or "1m30s", got "5"`},
		{[]string{"--network-plugin-dirs=/a", "--network-plugin-dirs", "/b,c"}, "network.plugin_dirs", `["/a", "/b,c"]`},
		{[]string{"--pod-default-capabilities="}, "pod.default_capabilities", `[]`},
		{[]string{"--pod-default-capabilities=", "--pod-default-capabilities=KILL"}, "pod.default_capabilities", `["KILL"]`},
		{[]string{"--root=/\xff"}, "", "must be valid UTF-8"},
	} {
		set := pflag.NewFlagSet("test", pflag.ContinueOnError)
		flags := AddFlags(set)
		err := set.Parse(c.args)
		if c.key == "" {
			if err == nil || !strings.HasSuffix(err.Error(), c.want) {
				t.Errorf("%q: error %v, want %q", c.args, err, c.want)
			}
			continue
		}
		if err != nil {
			t.Errorf("%q: %v", c.args, err)
			continue
		}
		loaded, err := Load(Sources{Flags: flags})
		if err != nil {
			t.Errorf("%q: %v", c.args, err)
			continue
		}
		equal(t, strings.Join(c.args, " "), loaded.Config.flagged()[c.key].TOML(), c.want)
	}
}

func TestDistance(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{
		{"", "", 0}, {"", "abc", 3}, {"abc", "", 3}, {"listen", "listen", 0}, {"lisen", "listen", 1},
		{"Socket-Mode", "socket_mode", 0}, {"kitten", "sitting", 3},
	} {
		equal(t, c.a+" "+c.b, distance(c.a, c.b), c.want)
	}
}

func TestUnsupportedOptionTypePanics(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("an option of type float64 passes")
		}
	}()
	v := reflect.New(reflect.TypeFor[float64]()).Elem()
	_ = assign(v, 1.0)
}

// crictl info and crius status -o json have the names of the configuration file, not those of Go.
func TestTablesHaveTheNamesOfTheFile(t *testing.T) {
	tables := Default().Tables()
	for _, s := range Schema() {
		for _, k := range s.Keys {
			var at any = tables
			for part := range strings.SplitSeq(strings.ReplaceAll(k.Path, "handlers."+anyName, "handlers.runc"), ".") {
				table, _ := at.(map[string]any)
				at = table[part]
			}
			if at == nil && !strings.Contains(k.Path, "workloads") && k.Type() != "list of strings" {
				t.Errorf("%s is missing", k.Path)
			}
		}
	}
	api, _ := tables["api"].(map[string]any)
	equal(t, "mode", api["socket_mode"], any("0o660"))
	equal(t, "duration", api["stream_idle_timeout"], any("4h0m0s"))
}

// crius check compares what the server says with the files.
func TestTablesAreReadAgain(t *testing.T) {
	c := Default()
	c.Runtime.Handlers = maps.Clone(c.Runtime.Handlers)
	c.Runtime.Handlers["more"] = oci.Handler{Type: "oci", Path: "more"}
	c.Pod.PidsLimit = 77
	text, err := json.Marshal(c.Tables())
	if err != nil {
		t.Fatal(err)
	}
	got, err := ReadTables(text)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "differences", Differences(got, &Loaded{Config: c}), []string{})
	equal(t, "differences from the defaults", Differences(got, &Loaded{Config: Default()}), []string{"pod.pids_limit", "runtime.handlers.more"})
	for wrong, want := range map[string]string{`{"API": {}}`: "missing", `{"api": 1}`: "missing", `[]`: "array"} {
		if _, err := ReadTables([]byte(wrong)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", wrong, err)
		}
	}
}
