package hooks

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/internal/fault"
	testprogram "github.com/crius-run/crius/test/kit/program"
	"github.com/crius-run/crius/test/kit/wait"
)

// hookFile is a hook for every container.
const hookFile = `{"version": "1.0.0", "hook": {"path": "/bin/true", "args": ["true", %q]}, "when": {"always": true}, "stages": ["createRuntime"]}`

func put(t *testing.T, dir, name, text string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// program makes a shell script.
func program(t *testing.T, script string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "hook")
	if err := testprogram.Write(path, []byte("#!/bin/sh\n"+script+"\n")); err != nil {
		t.Fatal(err)
	}
	return path
}

func newSpec() *specs.Spec {
	return &specs.Spec{
		Version:     "1.2.0",
		Process:     &specs.Process{Args: []string{"/usr/bin/app", "serve"}},
		Root:        &specs.Root{Path: "/rootfs"},
		Annotations: map[string]string{"in.spec": "spec"},
		Linux:       &specs.Linux{CgroupsPath: "/crius/id"},
	}
}

// names returns the second argument of each hook.
func names(hooks []specs.Hook) (found []string) {
	for _, h := range hooks {
		found = append(found, h.Args[1])
	}
	return found
}

func TestLaterDirectoryReplacesFilesOfEarlierOnes(t *testing.T) {
	t.Parallel()
	low, high := t.TempDir(), t.TempDir()
	put(t, low, "20-b.json", fmt.Sprintf(hookFile, "low b"))
	put(t, low, "10-A.json", "broken, and replaced")
	put(t, high, "10-A.json", fmt.Sprintf(hookFile, "high A"))
	put(t, high, "10-a.json", fmt.Sprintf(hookFile, "high a"))
	put(t, high, "05-z.JSON", "another suffix")
	put(t, high, "README", "no hook")
	put(t, low, "09.json", fmt.Sprintf(hookFile, "low 09"))
	set, err := Read([]string{"/nothing", low, high})
	if err != nil {
		t.Fatal(err)
	}
	s := newSpec()
	if err := set.Inject(t.Context(), s, Container{}); err != nil {
		t.Fatal(err)
	}
	if got, want := names(s.Hooks.CreateRuntime), []string{"low 09", "high A", "high a", "low b"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestReadOfNothing(t *testing.T) {
	t.Parallel()
	for _, dirs := range [][]string{nil, {"/nothing"}, {t.TempDir()}} {
		if set, err := Read(dirs); len(set) > 0 || err != nil {
			t.Errorf("%q: %v, %v", dirs, set, err)
		}
	}
}

// A user who can change a hook file is root on the node.
func TestReadRefusesWhatOthersCanChange(t *testing.T) {
	t.Parallel()
	for what, change := range map[string]func(dir, file string) error{
		"file of another user":         func(_, file string) error { return os.Chown(file, 1001, 0) },
		"file writable by group":       func(_, file string) error { return os.Chmod(file, 0o664) },
		"file writable by all":         func(_, file string) error { return os.Chmod(file, 0o646) },
		"directory of another user":    func(dir, _ string) error { return os.Chown(dir, 1001, 0) },
		"directory writable by group":  func(dir, _ string) error { return os.Chmod(dir, 0o775) },
		"link to another user's file":  func(_, file string) error { return linkToOther(file) },
		"dangling link":                func(_, file string) error { return errors.Join(os.Remove(file), os.Symlink("nowhere", file)) },
		"link to /dev/zero":            func(_, file string) error { return errors.Join(os.Remove(file), os.Symlink("/dev/zero", file)) },
		"directory in place of a file": func(_, file string) error { return errors.Join(os.Remove(file), os.Mkdir(file, 0o755)) },
		"large file":                   func(_, file string) error { return os.Truncate(file, maxFile+1) },
		"file in place of a directory": func(dir, file string) error {
			return errors.Join(os.Remove(file), os.Remove(dir), os.WriteFile(dir, nil, 0o644))
		},
	} {
		dir := filepath.Join(t.TempDir(), "hooks.d")
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		file := put(t, dir, "a.json", fmt.Sprintf(hookFile, "a"))
		if _, err := Read([]string{dir}); err != nil {
			t.Fatal(err)
		}
		if err := change(dir, file); err != nil {
			t.Fatal(err)
		}
		set, err := Read([]string{dir})
		if !errors.Is(err, fault.Precondition) || len(set) > 0 || !strings.Contains(err.Error(), dir) {
			t.Errorf("%s: %d hooks, %v", what, len(set), err)
		}
	}
}

func linkToOther(file string) error {
	other := file + ".other"
	return errors.Join(os.Rename(file, other), os.Chown(other, 1001, 0), os.Symlink(other, file))
}

func TestReadIsBounded(t *testing.T) {
	t.Parallel()
	hooks, entries := t.TempDir(), t.TempDir()
	for i := range maxHooks + 1 {
		put(t, hooks, fmt.Sprintf("%d.json", i), fmt.Sprintf(hookFile, "x"))
	}
	for i := range maxEntries + 1 {
		put(t, entries, fmt.Sprintf("%d.txt", i), "")
	}
	for _, dir := range []string{hooks, entries} {
		if set, err := Read([]string{dir}); !errors.Is(err, fault.Precondition) || len(set) > 0 {
			t.Errorf("%d hooks, %v", len(set), err)
		}
	}
}

// Check reports everything that is wrong; correct hooks still count.
func TestCheckReportsEveryBrokenHook(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put(t, dir, "good.json", fmt.Sprintf(hookFile, "good"))
	put(t, dir, "a.json", "{")
	put(t, dir, "b.json", strings.Replace(fmt.Sprintf(hookFile, "b"), "1.0.0", "2.0.0", 1))
	put(t, dir, "c.json", strings.NewReplacer("/bin/true", "/nothing", "true}", "false}").Replace(fmt.Sprintf(hookFile, "c")))
	usable, errs := Check([]string{dir})
	if usable != 1 || len(errs) != 3 {
		t.Fatalf("%d, %q", usable, errs)
	}
	for i, want := range []string{"a.json", `"2.0.0" is not supported, must be 1.0.0 or 0.1.0`, "/nothing"} {
		if !strings.Contains(errs[i].Error(), want) {
			t.Errorf("%v lacks %q", errs[i], want)
		}
	}
}

func TestParseRefusesInvalidHooks(t *testing.T) {
	t.Parallel()
	const good = `{"version": "1.0.0", "hook": {"path": "/x"}, "when": {"always": true}, "stages": ["poststop"], "comment": "ignored"}`
	if _, err := parse([]byte(good)); err != nil {
		t.Fatal(err)
	}
	for old, replaced := range map[string]string{
		`"1.0.0"`:          `""`,
		`"/x"`:             `"x"`,
		`"path": "/x"`:     `"args": ["/x"]`,
		`"/x"}`:            `"/x", "timeout": 0}`,
		`["poststop"]`:     `["poststop", "preStart"]`,
		`"poststop"`:       ``,
		`"stages"`:         `"stage"`,
		`{"always": true}`: `{}`,
		`"always": true`:   `"annotations": {}`,
		`"always": tr`:     `"annotations": {"(": ""}, "always": tr`,
		`"always": t`:      `"annotations": {"": "("}, "always": t`,
		`"always": `:       `"commands": ["["], "always": `,
		`"always":`:        `"annotation": {"a": "b"}, "always":`,
		`"when"`:           `"if"`,
		`true}`:            `"yes"}`,
		`"ignored"}`:       `"ignored"} {}`,
	} {
		text := strings.Replace(good, old, replaced, 1)
		if h, err := parse([]byte(text)); err == nil || text == good {
			t.Errorf("%s: %+v", text, h)
		}
	}
}

func TestConditionsHaveToHoldTogether(t *testing.T) {
	t.Parallel()
	c := Container{Annotations: map[string]string{"pod.example/a": "fast", "b": "slow", "in.spec": "request"}, BindMounts: true}
	for when, want := range map[string]bool{
		`"always": true`:                                    true,
		`"always": false`:                                   false,
		`"always": false, "hasBindMounts": true`:            false,
		`"hasBindMounts": true`:                             true,
		`"hasBindMounts": false`:                            false,
		`"commands": ["^/usr/bin/"]`:                        true,
		`"commands": ["^/bin/", "app$"]`:                    true,
		`"commands": ["serve"]`:                             false,
		`"always": true, "commands": ["serve"]`:             false,
		`"annotations": {"^pod\\.example/a$": "^fa"}`:       true,
		`"annotations": {"a$": "fast", "^b$": "slow"}`:      true,
		`"annotations": {"a$": "fast", "^b$": "fast"}`:      false,
		`"annotations": {"^b$": "fast"}`:                    false,
		`"annotations": {"^in.spec$": "spec"}`:              true,
		`"annotations": {"^in.spec$": "request"}`:           false,
		`"annotations": {"b": ""}, "hasBindMounts": true`:   true,
		`"annotations": {"^c$": ""}, "hasBindMounts": true`: false,
		`"annotations": {"b": ""}, "commands": ["serve"]`:   false,
		`"commands": ["app"], "annotations": {"^c$": ".*"}`: false,
	} {
		h, err := parse([]byte(`{"version": "1.0.0", "hook": {"path": "/bin/true"}, "when": {` + when + `}, "stages": ["poststart"]}`))
		if err != nil {
			t.Fatal(err)
		}
		s := newSpec()
		if err := (Set{h}).Inject(t.Context(), s, c); err != nil {
			t.Fatal(err)
		}
		if got := s.Hooks != nil; got != want {
			t.Errorf("%s: %t", when, got)
		}
	}
	h := &hook{when: conditions{bindMounts: true}}
	if s := newSpec(); h.when.match(s, nil, false) {
		t.Error("no bind mounts, and matched")
	}
	h = &hook{when: conditions{commands: []*regexp.Regexp{regexp.MustCompile("")}}}
	if s := (&specs.Spec{Process: &specs.Process{}}); h.when.match(s, nil, false) {
		t.Error("no command, and matched")
	}
}

func TestHooksRunInTheirStages(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put(t, dir, "a.json", `{"version": "1.0.0", "when": {"always": true},
		"hook": {"path": "/bin/true", "args": ["true", "a"], "env": ["A=b"], "timeout": 3},
		"stages": ["prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"]}`)
	set, err := Read([]string{dir})
	if err != nil {
		t.Fatal(err)
	}
	s := newSpec()
	s.Hooks = &specs.Hooks{CreateRuntime: []specs.Hook{{Path: "/cdi", Args: []string{"", "cdi"}}}}
	if err := set.Inject(t.Context(), s, Container{}); err != nil {
		t.Fatal(err)
	}
	if got := names(s.Hooks.CreateRuntime); !slices.Equal(got, []string{"cdi", "a"}) {
		t.Errorf("createRuntime: %q", got)
	}
	all := s.Hooks
	for stage, list := range map[string][]specs.Hook{
		"prestart":        all.Prestart, //nolint:staticcheck // deprecated, and still what hook files ask for
		"createContainer": all.CreateContainer, "startContainer": all.StartContainer, "poststart": all.Poststart, "poststop": all.Poststop,
	} {
		if len(list) != 1 || list[0].Path != "/bin/true" || list[0].Env[0] != "A=b" || *list[0].Timeout != 3 {
			t.Errorf("%s: %+v", stage, list)
		}
	}
}

// A program that is missing, or that others can change, is refused for the
// containers that would run it. A program that runs in the container is the
// image's.
func TestInjectRefusesProgramsThatOthersCanChange(t *testing.T) {
	t.Parallel()
	open, plain := program(t, "true"), put(t, t.TempDir(), "plain", "")
	if err := os.Chmod(open, 0o757); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{open, plain, "/nothing", "/bin"} {
		for _, stage := range []string{precreate, prestart, createRuntime, createContainer, poststart, poststop} {
			h := &hook{file: "a.json", hook: specs.Hook{Path: path}, stages: []string{startContainer, stage}}
			err := Set{h}.Inject(t.Context(), newSpec(), Container{})
			if !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "a.json") {
				t.Errorf("%s of %s: %v", stage, path, err)
			}
			h.when.never = true
			if err := (Set{h}).Inject(t.Context(), newSpec(), Container{}); err != nil {
				t.Errorf("%s of %s that does not match: %v", stage, path, err)
			}
		}
		inside := &hook{hook: specs.Hook{Path: path}, stages: []string{startContainer}}
		if err := (Set{inside}).Inject(t.Context(), newSpec(), Container{}); err != nil {
			t.Errorf("%s in the container: %v", path, err)
		}
	}
}

func TestPrecreateHooksChangeTheSpecInTurn(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	first := program(t, `[ "$*" = "1 2" ] && [ "$A" = b ] && [ -z "$HOME" ] && exec sed 's/app/changed/'`)
	second := program(t, `exec sed 's/changed/twice/'`)
	put(t, dir, "1.json", fmt.Sprintf(`{"version": "1.0.0", "hook": {"path": %q, "args": ["x", "1", "2"], "env": ["A=b"]}, "when": {"always": true}, "stages": ["precreate"]}`, first))
	put(t, dir, "2.json", fmt.Sprintf(`{"version": "1.0.0", "hook": {"path": %q}, "when": {"always": true}, "stages": ["precreate", "poststop"]}`, second))
	set, err := Read([]string{dir})
	if err != nil {
		t.Fatal(err)
	}
	s := newSpec()
	if err := set.Inject(t.Context(), s, Container{}); err != nil {
		t.Fatal(err)
	}
	if s.Process.Args[0] != "/usr/bin/twice" || len(s.Hooks.Poststop) != 1 {
		t.Errorf("%+v, %+v", s.Process, s.Hooks)
	}
}

func TestPrecreateHookFailureFailsTheContainer(t *testing.T) {
	t.Parallel()
	late := program(t, "echo begun >&2; sleep 1000")
	for what, test := range map[string]struct {
		script string
		want   string
		err    error
	}{
		"exit code":          {"echo reason >&2; exit 3", "exit status 3", fault.Precondition},
		"its reason":         {"echo reason >&2; exit 3", "reason", fault.Precondition},
		"no threads":         {"echo runtime: failed to create new OS thread '(have 3 already; errno=11)' >&2; exit 2", "pids.max", fault.Exhausted},
		"no output":          {"exit 0", "is not an OCI configuration", fault.Precondition},
		"no JSON":            {"echo '{]'", "is not an OCI configuration", fault.Precondition},
		"endless output":     {"exec yes", "output exceeds", fault.Precondition},
		"another root":       {"sed s,/rootfs,/,", "root.path", fault.Precondition},
		"no root":            {"sed s,root,ruut,", "root.path", fault.Precondition},
		"another cgroup":     {"sed s,/crius/id,/,", "linux.cgroupsPath", fault.Precondition},
		"another terminal":   {`sed 's,"args":,"terminal":true\,"args":,'`, "process.terminal", fault.Precondition},
		"nothing but braces": {"echo '{}'", "process.terminal", fault.Precondition},
		"time":               {"exec " + late, "did not finish within 1s and was killed", fault.Timeout},
	} {
		timeout := 1
		if what != "time" {
			timeout = 60
		}
		h := &hook{file: "a.json", hook: specs.Hook{Path: program(t, test.script), Timeout: &timeout}, stages: []string{precreate}}
		err := Set{h}.Inject(t.Context(), newSpec(), Container{})
		if !errors.Is(err, test.err) || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), "a.json") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// The pod of a container may be stopped while the container is being created.
func TestPrecreateHookEndsWithItsContext(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	began := filepath.Join(dir, "began")
	h := &hook{hook: specs.Hook{Path: program(t, "(echo > "+began+"; sleep 1000)")}, stages: []string{precreate}}
	ctx, cancel := context.WithCancelCause(t.Context())
	go func() {
		wait.Until(t.Context(), func() bool { _, err := os.Stat(began); return err == nil })
		cancel(errors.New("stopped"))
	}()
	if err := (Set{h}).Inject(ctx, newSpec(), Container{}); err == nil || !strings.Contains(err.Error(), "stopped") {
		t.Error(err)
	}
}

// One file of the old schema, which CRI-O and podman read, kept every container of the node from
// being created.
func TestOldSchemaIsRead(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		file        string
		annotations map[string]string
		binds       bool
		runs        bool
	}{
		"by command":               {`"cmds": [".*/app$"]`, nil, false, true},
		"by another command":       {`"cmd": ["^/bin/other$"]`, nil, false, false},
		"by the value alone":       {`"annotations": ["^yes$"]`, map[string]string{"any.key": "yes"}, false, true},
		"by another value":         {`"annotation": ["^yes$"]`, map[string]string{"yes": "no"}, false, false},
		"by mounts":                {`"hasbindmounts": true`, nil, true, true},
		"one of two is enough":     {`"cmds": ["^/bin/other$"], "hasbindmounts": true`, nil, true, true},
		"none of two":              {`"cmds": ["^/bin/other$"], "hasbindmounts": true`, nil, false, false},
		"no condition, no runs":    {`"x": 1`, nil, true, false},
		"with its version, quoted": {`"version": "0.1.0", "cmds": [""]`, nil, false, true},
	} {
		dir := t.TempDir()
		put(t, dir, "old.json", `{"hook": "/bin/true", "arguments": ["two"], "stage": ["prestart"], `+c.file+`}`)
		set, err := Read([]string{dir})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		s := newSpec()
		if err := set.Inject(t.Context(), s, Container{Annotations: c.annotations, BindMounts: c.binds}); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		var args []string
		if s.Hooks != nil {
			for _, h := range s.Hooks.Prestart { //nolint:staticcheck // what old files ask for
				args = append(args, h.Args...)
			}
		}
		if runs := slices.Equal(args, []string{"/bin/true", "two"}); runs != c.runs || !runs && len(args) > 0 {
			t.Errorf("%s: the hook runs: %v with %q", name, runs, args)
		}
	}
	for _, broken := range []string{`{"hook": "true", "stages": ["prestart"]}`, `{"hook": "/bin/true"}`, `{"hook": "/bin/true", "stages": ["soon"]}`, `{"hook": "/bin/true", "stages": ["prestart"], "cmds": ["("]}`} {
		dir := t.TempDir()
		put(t, dir, "old.json", broken)
		if _, err := Read([]string{dir}); err == nil {
			t.Errorf("%s: not refused", broken)
		}
	}
}
