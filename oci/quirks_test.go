package oci

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/wait"
)

// A runtime is identified by what it reports, not by the name of its file.
func TestQuirksFollowTheReportedVersion(t *testing.T) {
	for version, want := range map[string]struct {
		sandboxed, start bool
		systemd, wait    string
	}{
		"runc version 1.1.5+ds1":                {systemd: "--systemd-cgroup"},
		"crun version 1.8.1":                    {systemd: "--systemd-cgroup"},
		"youki version: 0.5.3":                  {systemd: "--systemd-cgroup"},
		"something of its own":                  {systemd: "--systemd-cgroup"},
		"":                                      {systemd: "--systemd-cgroup"},
		"runsc version release-20260527.0":      {sandboxed: true, start: true, systemd: "--systemd-cgroup", wait: "wait"},
		"runsc version VERSION_MISSING":         {sandboxed: true, start: true, systemd: "--systemd-cgroup", wait: "wait"},
		"kata-runtime  : 1.13.0-alpha0":         {sandboxed: true},
		"runc version 1.3.0 (built with runsc)": {systemd: "--systemd-cgroup"},
	} {
		got := quirksOf(version)
		if got.sandboxed != want.sandboxed || got.start != want.start || got.systemd != want.systemd || got.wait != want.wait {
			t.Errorf("%q: %+v", version, got)
		}
	}
}

func tableOf(t *testing.T, handlers map[string]Handler) *Table {
	t.Helper()
	table, err := NewTable(Config{DefaultHandler: slices.Min(slices.Collect(maps.Keys(handlers))), CgroupDriver: "systemd", Monitor: "/bin/true", MonitorCgroup: "/m", Handlers: handlers}, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return table
}

// The command line is the runtime's flags, then the operator's, then the verb;
// flags that the runtime lacks are left out.
func TestCommandLine(t *testing.T) {
	for program, want := range map[string]string{
		"runc version 1.2.3": "--root /r --systemd-cgroup --debug state x",
		"kata-runtime : 1.2": "--root /r --debug state x",
	} {
		path := script(t, `[ "$1" = --version ] && echo '`+program+`'`)
		r, err := tableOf(t, map[string]Handler{"h": {Type: "oci", Path: path, Root: "/r", Options: []string{"--debug"}}}).Get("")
		if err != nil {
			t.Fatal(err)
		}
		a, err := r.Probe(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(r.(*cli).argv(a, "state", "x")[1:], " "); got != want {
			t.Errorf("%s: %s, want %s", program, got, want)
		}
	}
}

// A reload is all or nothing, and an unchanged handler stays the same object.
func TestTableReload(t *testing.T) {
	table := tableOf(t, map[string]Handler{"a": {Type: "oci", Path: "true"}, "b": {Type: "oci", Path: "true"}})
	get := func(name string) Runtime { r, _ := table.Get(name); return r }
	a, b := get("a"), get("b")
	cfg := Config{DefaultHandler: "a", CgroupDriver: "systemd", MonitorCgroup: "/m", Handlers: map[string]Handler{
		"a": {Type: "oci", Path: "true"}, "b": {Type: "oci", Path: "true", MinMemory: 1}, "c": {Type: "oci", Path: "/none"},
	}}
	for _, bad := range []func(*Config){
		func(c *Config) { c.DefaultHandler = "x" },
		func(c *Config) {
			c.Handlers = maps.Clone(c.Handlers)
			c.Handlers["s"] = Handler{Type: "vm", Path: "true"}
		},
	} {
		wrong := cfg
		bad(&wrong)
		if err := table.Reload(wrong); !errors.Is(err, fault.Invalid) || len(table.Names()) != 2 || get("b") != b {
			t.Errorf("%v; handlers: %v", err, table.Names())
		}
	}
	if err := table.Reload(cfg); err != nil {
		t.Fatal(err)
	}
	if get("a") != a || get("b") == b || get("b").Handler().MinMemory != 1 || !slices.Equal(table.Names(), []string{"a", "b", "c"}) {
		t.Errorf("handlers: %v", table.Names())
	}
	reports, errs := table.Report(context.Background())
	if len(reports) != 3 || reports[2].Ready || reports[2].Error == "" || errs[2] == nil || !reports[0].Default {
		t.Errorf("%+v, %v", reports, errs)
	}
}

func TestParentsIn(t *testing.T) {
	got := parentsIn("UID       PID       PPID      C         TTY       STIME     TIME      CMD\n0         1         0         0         ?         21:41     10ms      probe\n0         15        1         0         ?         21:41     0s        sh -c x\nx y\n")
	if !maps.Equal(got, map[int]int{1: 0, 15: 1}) {
		t.Errorf("%v", got)
	}
	for _, table := range []string{"", "\n", "nothing of the kind", "PID PPID\n1", "PID PPID\n1 1\na b"} {
		if got := parentsIn(table); len(got) != 0 {
			t.Errorf("%q: %v", table, got)
		}
	}
}

func TestLastError(t *testing.T) {
	file := filepath.Join(t.TempDir(), "log")
	if got := lastError(file); got != "" {
		t.Errorf("%q", got)
	}
	text := strings.Repeat(`{"msg":"noise","level":"warning"}`+"\n", 5000) +
		`{"msg":"first","level":"error"}` + "\n" + `{"msg":"no such program","level":"error","time":"x"}` + "\n" + `{"msg":"later","level":"info"}` + "\nhalf a li"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := lastError(file); got != "no such program" {
		t.Errorf("%q", got)
	}
}

// crius itself removes the state files of a runtime that has been uninstalled,
// of any kind.
func TestForgetWithoutTheRuntime(t *testing.T) {
	root := t.TempDir()
	r, err := tableOf(t, map[string]Handler{"h": {Type: "oci", Path: "/none", Root: root}}).Get("h")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(root, "one"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"one_sandbox:two.state", "one_sandbox:two.lock", "runsc-one.sock", "other"} {
		if err := os.WriteFile(filepath.Join(root, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.(*cli).forget(t.Context(), Ref{ID: "one"}); err != nil {
		t.Fatal(err)
	}
	left, err := os.ReadDir(root)
	if err != nil || len(left) != 1 || left[0].Name() != "other" {
		t.Errorf("%v, %v", left, err)
	}
}

// In a shared sandbox only the runtime may kill a container whose monitor is
// lost: the process is shared by all.
func TestLostInASandbox(t *testing.T) {
	dir, root := t.TempDir(), t.TempDir()
	text := `{"version":1,"monitor":{"pid":1,"start_time":1},"container":{"pid":` + "PID" + `,"start_time":1}}`
	if err := os.WriteFile(filepath.Join(dir, "monitor.json"), []byte(strings.Replace(text, "PID", "1", 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := tableOf(t, map[string]Handler{"h": {Type: "oci", Path: "/none", Root: root}}).Get("h")
	if err != nil {
		t.Fatal(err)
	}
	task, err := r.Load(t.Context(), Ref{ID: "one", Dir: dir, ExitFile: filepath.Join(dir, "exit.json"), Holder: "two"})
	if err != nil {
		t.Fatal(err)
	}
	if err := task.Signal(t.Context(), unix.SIGTERM); !errors.Is(err, fault.Precondition) {
		t.Errorf("signal: %v", err)
	}
	stateFiles := filepath.Join(root, "one_sandbox:two.state")
	if err := os.WriteFile(stateFiles, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), wait.Limit)
	defer cancel()
	if err := task.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(stateFiles); err == nil {
		t.Error("the runtime has not been asked to forget it")
	}
}
