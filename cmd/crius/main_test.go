package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/internal/fault"
)

// crius runs the program and returns its exit code and output. Unless the
// arguments name a configuration file, an empty one is used.
func crius(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	if !strings.Contains(strings.Join(args, " "), "--config") {
		args = append([]string{"--config", write(t, "crius.toml", "")}, args...)
	}
	var out, errs strings.Builder
	code = run(context.Background(), newRoot(), args, &out, &errs)
	return code, out.String(), errs.String()
}

// write creates a file in a directory of its own.
func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestExitCodesAndErrors(t *testing.T) {
	bad := write(t, "bad.toml", "lisen = 1\nroot = 2\n")
	for _, c := range []struct {
		args []string
		code int
		errs string
	}{
		{[]string{"config"}, 0, ""},
		{[]string{"config", "--default"}, 0, ""},
		{[]string{"version"}, 0, ""},
		{[]string{"--help"}, 0, ""},
		{[]string{"completion", "bash"}, 0, ""},
		{[]string{"frobnicate"}, 2, "crius: unknown command \"frobnicate\" (see crius --help)\n"},
		{[]string{"chekc"}, 2, "crius: unknown command \"chekc\"; did you mean check? (see crius --help)\n"},
		{[]string{"pod"}, 2, "crius: unknown command \"pod\"; did you mean pods? (see crius --help)\n"},
		{[]string{"imagse"}, 2, "crius: unknown command \"imagse\"; did you mean images? (see crius --help)\n"},
		{[]string{"list"}, 2, "crius: unknown command \"list\"; did you mean pods or ps? (see crius --help)\n"},
		{[]string{"rm", "x"}, 2, "crius: unknown command \"rm\": that is for crictl rm (see crius --help)\n"},
		{[]string{"completion", "bsh"}, 2, "crius: no completion for \"bsh\": must be bash, zsh or fish (see crius completion --help)\n"},
		// What is empty is mostly a variable of a script that is not set: it names no pod, even if there is only one.
		{[]string{"logs", ""}, 2, "crius: POD is empty: crius logs POD [CONTAINER] (see crius logs --help)\n"},
		{[]string{"logs", "web", ""}, 2, "crius: CONTAINER is empty: crius logs POD [CONTAINER] (see crius logs --help)\n"},
		{[]string{"checkpoint", ""}, 2, "crius: POD is empty: crius checkpoint POD [CONTAINER] (see crius checkpoint --help)\n"},
		{[]string{"pull", ""}, 2, "crius: IMAGE is empty: crius pull IMAGE (see crius pull --help)\n"},
		{[]string{"exec", "", "--", "ls"}, 2, "crius: POD is empty: crius exec POD -- COMMAND (see crius exec --help)\n"},
		{[]string{"exec", "web", "-c", "", "--", "ls"}, 2, "crius: --container is empty: crius exec POD -- COMMAND (see crius exec --help)\n"},
		{[]string{"a\n\x1b[2J"}, 2, `crius: unknown command "a\n\x1b[2J" (see crius --help)` + "\n"},
		{[]string{"--frobnicate"}, 2, "crius: unknown flag: --frobnicate (see crius --help)\n"},
		{[]string{"config", "now"}, 2, "crius: unexpected argument \"now\": only --from-crio and --from-containerd take a path (see crius config --help)\n"},
		{[]string{"config", "--from-crio", "--default"}, 2, "crius: --default, --from-crio and --from-containerd are mutually exclusive (see crius config --help)\n"},
		{[]string{"config", "--from-crio", "--from-containerd"}, 2, "crius: --default, --from-crio and --from-containerd are mutually exclusive (see crius config --help)\n"},
		{[]string{"config", "--from-crio", "config/testdata/crio-defaults"}, 0, ""},
		{[]string{"config", "--from-crio=/etc/crio"}, 2, "crius: invalid argument \"/etc/crio\" for \"--from-crio\" flag: it takes no value; the path is an argument of its own: --from-crio /etc/crio (see crius config --help)\n"},
		{[]string{"config", "--accept", "crio.x"}, 2, "crius: --accept is for --from-crio and --from-containerd (see crius config --help)\n"},
		{[]string{"config", "--from-crio", "config/testdata/crio-defaults", "--accept", "crio.x"}, 1, "crius: --accept crio.x: nothing of the configuration of CRI-O is lost under this name\n"},
		{[]string{"config", "--from-containerd", "config/testdata/containerd/v3.toml"}, 0, ""},
		{[]string{"config", "--from-crio", "/nonexistent"}, 1, "crius: no configuration of CRI-O at /nonexistent: it should be a directory with crio.conf and crio.conf.d, or a file; if it is elsewhere, give its path as the argument\n"},
		{[]string{"config", "--from-containerd", bad}, 1, "crius: " + bad + ": version: version 1 is not supported: migrate the file with containerd config migrate (containerd 1.7 or earlier)\n"},
		{[]string{"completion", "tcsh"}, 2, "crius: no completion for \"tcsh\": must be bash, zsh or fish (see crius completion --help)\n"},
		{[]string{"completion"}, 2, "crius: bash|zsh|fish is missing: crius completion bash|zsh|fish (see crius completion --help)\n"},
		{[]string{"logs"}, 2, "crius: POD is missing: crius logs POD [CONTAINER] (see crius logs --help)\n"},
		{[]string{"logs", "a", "b", "c"}, 2, "crius: unexpected argument \"c\": crius logs POD [CONTAINER] (see crius logs --help)\n"},
		{[]string{"ps", "x"}, 2, "crius: unexpected argument \"x\": crius ps takes none (see crius ps --help)\n"},
		{[]string{"pods", "--al"}, 2, "crius: unknown flag: --al (see crius pods --help)\n"},
		{[]string{"help", "logs"}, 0, ""},
		{[]string{"help", "flags"}, 0, ""},
		{[]string{"help", "flgs"}, 2, "crius: no help for \"flgs\": crius help lists the commands, crius help flags the flags that set options (see crius --help)\n"},
		{[]string{"version", "-o", "xml"}, 2, "crius: invalid argument \"xml\" for \"-o, --output\" flag: must be text or json (see crius version --help)\n"},
		{[]string{"--network-timeout", "5"}, 2, "crius: invalid argument \"5\" for \"--network-timeout\" flag: must be a duration such as \"5m\" or \"1m30s\", got \"5\" (see crius --help)\n"},
		{[]string{"--config", "/nonexistent", "config"}, 1, "crius: read configuration: /nonexistent: no such file or directory\n"},
		{[]string{"--config", bad, "config"}, 1, "crius: " + bad + ":1: lisen: unknown key; did you mean api.listen?\ncrius: " + bad + ":2: root: must be of type string, got 2\n"},
		{[]string{"--config", bad, "serve"}, exitConfig, "crius: " + bad + ":1: lisen: unknown key; did you mean api.listen?\ncrius: " + bad + ":2: root: must be of type string, got 2\n"},
		{[]string{"--log-level=loud"}, exitConfig, "crius: --log-level: log_level: must be one of debug, info, warn, error, got \"loud\"\n"},
		{[]string{"--root=/\x1b[2J\u202e/../x", "--run-root=/\x1b[2J\u202e/../x", "config"}, 1, "crius: --run-root: run_root: must differ from root: a reboot may empty run_root, but root must survive it\n"},
	} {
		code, _, errs := crius(t, c.args...)
		if code != c.code || errs != c.errs {
			t.Errorf("crius %q: exit code %d, error %q, want %d and %q", c.args, code, errs, c.code, c.errs)
		}
	}
}

func TestDropInsStandBesideTheFile(t *testing.T) {
	file := write(t, "node.toml", "")
	other := t.TempDir()
	if err := os.Mkdir(file+".d", 0o700); err != nil {
		t.Fatal(err)
	}
	for path, text := range map[string]string{
		filepath.Join(file+".d", "10.toml"): "root = '/beside'",
		filepath.Join(other, "10.toml"):     "root = '/other'",
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for want, args := range map[string][]string{
		`root = "/beside" # drop-in ` + file: {"--config", file, "config"},
		`root = "/other" # drop-in ` + other: {"--config", file, "--config-dir", other, "config"},
		`root = "/flag" # flag --root`:       {"config", "--config", file, "--root", "/flag"},
	} {
		if _, out, errs := crius(t, args...); !strings.HasPrefix(out, want) {
			t.Errorf("crius %q prints %q and %q, want %q", args, out, errs, want)
		}
	}
	if code, _, errs := crius(t, "--config", file, "--config-dir", other+"x", "config"); code != 1 {
		t.Errorf("a drop-in directory that was named and does not exist: exit code %d, %q", code, errs)
	}
}

func TestConfigPrintsAConfiguration(t *testing.T) {
	_, inForce, _ := crius(t, "--network-default-network=pods", "config")
	_, again, errs := crius(t, "--config", write(t, "crius.toml", inForce), "config")
	if !strings.Contains(again, `default_network = "pods" # file `) {
		t.Errorf("what `crius config` prints cannot be read: %s%s", again, errs)
	}
}

func TestVersion(t *testing.T) {
	_, text, _ := crius(t, "version")
	_, document, _ := crius(t, "version", "-o", "json")
	var info versionInfo
	if err := json.Unmarshal([]byte(document), &info); err != nil {
		t.Fatal(err)
	}
	if info.Crius == "" || info.Go == "" || info.CRI[0] != "v1" {
		t.Errorf("version is %+v", info)
	}
	for _, want := range []string{info.Crius, info.Go, "v1, v1alpha2"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in %q", want, text)
		}
	}
}

func TestCompletion(t *testing.T) {
	for _, c := range []struct {
		words []string
		want  string
	}{
		{[]string{""}, "check\tCheck that"},
		{[]string{"--runtime-cgroup-driver", ""}, "systemd\ncgroupfs\n"},
		{[]string{"check", "--output", ""}, "text\njson\n"},
		{[]string{"completion", ""}, "bash\nzsh\nfish\n"},
		{[]string{"config", "--api-l"}, "--api-listen\tunix socket"},
	} {
		_, out, _ := crius(t, append([]string{"__complete"}, c.words...)...)
		if !strings.Contains(out, c.want) {
			t.Errorf("completion of %q is %q, want %q", c.words, out, c.want)
		}
		if strings.Contains(out, "generate") {
			t.Errorf("completion of %q offers a hidden command", c.words)
		}
	}
}

func TestReport(t *testing.T) {
	a, b, c := errors.New("a"), errors.New("b\nb"), errors.New("c")
	for what, x := range map[string]struct {
		err  error
		want string
	}{
		"none":          {nil, ""},
		"one":           {a, "crius: a\n"},
		"joined":        {errors.Join(a, errors.Join(b, c)), "crius: a\ncrius: b; b\ncrius: c\n"},
		"several wraps": {fmt.Errorf("x: %w: %w", a, fault.Invalid), "crius: x: a\n"},
		"usage":         {cli.UsageError{Err: a}, "crius: a (see crius --help)\n"},
	} {
		var out strings.Builder
		report(&out, x.err)
		if out.String() != x.want {
			t.Errorf("%s: %q, want %q", what, out.String(), x.want)
		}
	}
}

// A server that cannot start logs that with the priority of an error.
func TestReportToTheJournal(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "journal"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	t.Setenv("JOURNAL_STREAM", fmt.Sprintf("%d:%d", st.Dev, st.Ino))
	report(f, errors.Join(errors.New("a"), errors.New("b")))
	text, err := os.ReadFile(f.Name())
	if want := "<3>crius: a\n<3>crius: b\n"; err != nil || string(text) != want {
		t.Errorf("the journal gets %q, want %q (%v)", text, want, err)
	}
}

// Escape sequences of images and registries do not reach the terminal.
func TestEscapeSequencesAreNotPrinted_CVE_2021_25743(t *testing.T) {
	for text, want := range map[string]string{
		"":                          "",
		"plain \"text\" \\ ünïcode": "plain \"text\" \\ ünïcode",
		"\x1b]0;title\a":            `\x1b]0;title\a`,
		"line\r\nline\ttab":         `line\r; line\ttab`,
		"\u009b31m":                 `\u009b31m`,
		"\u202eback":                `\u202eback`,
		"bad \xff\xfe utf-8 \ufffd": `bad \xff\xfe utf-8 ` + "\ufffd",
		"\u2028":                    `\u2028`,
	} {
		if got := cli.Printable(text); got != want {
			t.Errorf("%q is printed as %q, want %q", text, got, want)
		}
	}
}

// The module list is the one that every program of the repository is built with.
func TestModulesAreFixed_CVE_2026_34986(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Version}}", "github.com/go-jose/go-jose/v4").Output()
	if err != nil {
		t.Fatal(err)
	}
	var major, minor, patch int
	if _, err := fmt.Sscanf(string(out), "v%d.%d.%d", &major, &minor, &patch); err != nil {
		t.Fatalf("version %q: %v", out, err)
	}
	if !slices.IsSortedFunc([][]int{{4, 1, 4}, {major, minor, patch}}, slices.Compare[[]int]) {
		t.Errorf("go-jose has version %s, want v4.1.4 or later", out)
	}
}

// brokenWriter is a closed standard output.
type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }

func TestOutputThatCannotBeWritten(t *testing.T) {
	for _, args := range [][]string{{"config", "--default"}, {"config"}, {"version", "-o", "json"}, {"completion", "zsh"}} {
		var errs strings.Builder
		args = append([]string{"--config", write(t, "crius.toml", "")}, args...)
		if code := run(context.Background(), newRoot(), args, brokenWriter{}, &errs); code != 1 || !strings.Contains(errs.String(), "closed pipe") {
			t.Errorf("crius %q: exit code %d, error %q", args, code, errs.String())
		}
	}
}

// crius exec exits with the code of its command and adds no message.
func TestExitCodeOfCommand(t *testing.T) {
	t.Parallel()
	var out, errs strings.Builder
	root := &cobra.Command{RunE: func(*cobra.Command, []string) error { return fmt.Errorf("exec: %w", cli.Exit(7)) }, SilenceErrors: true, SilenceUsage: true}
	if code := run(t.Context(), root, nil, &out, &errs); code != 7 || out.Len()+errs.Len() > 0 {
		t.Errorf("exit code %d, %q, %q", code, out.String(), errs.String())
	}
}

func TestRefusedAccessSaysRunAsRoot(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		text string
		uid  int
		want string
	}{
		{"open /run/crius/lock: permission denied", 65534, ": run as root"},
		{"open /run/crius/lock: permission denied", 0, ""},
		{"server at /s: permission denied: run as root", 65534, ""},
		{"no such file", 65534, ""},
	} {
		if got := advice(c.text, c.uid); got != c.want {
			t.Errorf("%q as %d: %q, want %q", c.text, c.uid, got, c.want)
		}
	}
}
