package oci

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/crius-run/crius/internal/fault"
	testprogram "github.com/crius-run/crius/test/kit/program"
	"github.com/crius-run/crius/test/kit/wait"
)

func script(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "runtime")
	if err := testprogram.Write(path, []byte("#!/bin/sh\n"+text+"\n")); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestCommand(t *testing.T) {
	out, err := command{argv: []string{"/bin/cat"}, stdin: []byte("text")}.run(t.Context())
	if string(out) != "text" || err != nil {
		t.Errorf("%q, %v", out, err)
	}
	_, err = command{argv: []string{"/bin/sh", "-c", "echo why it failed >&2; exit 3"}}.run(t.Context())
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 3 || !strings.HasSuffix(err.Error(), ": why it failed") {
		t.Errorf("%v", err)
	}
	const crash = "echo 'runtime: failed to create new OS thread (have 5 already; errno=11)' >&2; head -c 9000 /dev/zero | tr '\\0' 0 >&2; exit 2"
	_, err = command{argv: []string{"/bin/sh", "-c", crash}}.run(t.Context())
	if !errors.Is(err, fault.Exhausted) || !strings.Contains(err.Error(), "pids.max") || strings.Contains(err.Error(), "0000") {
		t.Errorf("no room for threads: %v", err)
	}
	out, err = command{argv: []string{"/bin/sh", "-c", "head -c 10000000 /dev/zero"}}.run(t.Context())
	if len(out) != maxOutput || err != nil {
		t.Errorf("flood: kept %d, %v", len(out), err)
	}
}

// A runtime that gets no threads is the fault of nobody in the pod.
func TestExecWithoutRoomForTheRuntime(t *testing.T) {
	t.Parallel()
	for said, want := range map[string]bool{"fork/exec /proc/self/exe: resource temporarily unavailable": true, "no such file": false} {
		err := crowded("", fmt.Errorf("runc exec: exit status 255: %s", said))
		if errors.Is(err, fault.Exhausted) != want || strings.Contains(err.Error(), "pids.max") != want || strings.Count(err.Error(), said) != 1 {
			t.Errorf("%v", err)
		}
	}
}

// TestCommandTimeout: a hanging command leaves no process behind, and a
// grandchild that keeps the output open does not delay the return.
func TestCommandTimeout(t *testing.T) {
	pidFile := filepath.Join(t.TempDir(), "pid")
	script := "sleep 1000 & echo $! >" + pidFile + ".new; mv " + pidFile + ".new " + pidFile + "; wait"
	var text []byte
	for limit := 100 * time.Millisecond; text == nil; limit *= 5 { // a busy machine may need more to get that far
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		if _, err := (command{argv: []string{"/bin/sh", "-c", script}}).run(ctx); !errors.Is(err, fault.Timeout) {
			t.Fatalf("got %v", err)
		}
		text, _ = os.ReadFile(pidFile)
	}
	var pid int
	fmt.Sscan(string(text), &pid)
	wait.For(t, "the child that was killed to be dead", func() bool { return !alive(pid) })
}

// alive reports whether pid runs; a zombie does not.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !bytes.Contains(stat, []byte(") Z "))
}

// asked probes the runtime itself, without a features file.
func asked(ctx context.Context, path string) (*Abilities, error) { return ask(ctx, path, nil) }

func TestProbe(t *testing.T) {
	features := `{"ociVersionMin":"1.0.0","ociVersionMax":"1.2.0","mountOptions":["rro"],"linux":{"namespaces":["mount","cgroup"]}}`
	for name, tc := range map[string]struct {
		script string
		want   Abilities
	}{
		"features": {`case $1 in --version) echo "runc version 1.2.3";; features) echo '` + features + `';; esac`,
			Abilities{Version: "runc version 1.2.3", RecursiveReadOnly: true, CgroupNamespaces: true}},
		"none":       {`case $1 in --version) echo "other version 1.2.3";; *) exit 1;; esac`, Abilities{Version: "other version 1.2.3"}},
		"garbage":    {`case $1 in --version) echo "runc version 1.2.3";; *) echo "{";; esac`, Abilities{Version: "runc version 1.2.3", CgroupNamespaces: true}},
		"old crun":   {`case $1 in --version) printf "crun version 1.8.1\nspec: 1.0.0\n";; *) exit 1;; esac`, Abilities{Version: "crun version 1.8.1", RecursiveReadOnly: true, CgroupNamespaces: true}},
		"older crun": {`case $1 in --version) echo "crun version 1.3";; *) exit 1;; esac`, Abilities{Version: "crun version 1.3", CgroupNamespaces: true}},
		"binary":     {`case $1 in --version) printf '\377%0300d' 1;; *) exit 1;; esac`, Abilities{Version: "?" + strings.Repeat("0", 199)}},
	} {
		path := script(t, tc.script)
		var p prober
		got, err := p.probe(t.Context(), path, asked)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got.Version != tc.want.Version || got.RecursiveReadOnly != tc.want.RecursiveReadOnly || got.IDMap || got.CgroupNamespaces != tc.want.CgroupNamespaces || got.Path != path {
			t.Errorf("%s: %+v", name, got)
		}
		if (got.Features != nil) != (name == "features") {
			t.Errorf("%s: features %+v", name, got.Features)
		}
	}
}

// TestProbeFollowsTheBinary: the answer is remembered, but only while the
// binary stays the same.
func TestProbeFollowsTheBinary(t *testing.T) {
	calls := filepath.Join(t.TempDir(), "calls")
	path := script(t, `echo called >>`+calls+`; echo "runc version 1.0.0"`)
	var p prober
	for range 3 {
		if a, err := p.probe(t.Context(), path, asked); err != nil || a.Version != "runc version 1.0.0" {
			t.Fatalf("%+v, %v", a, err)
		}
	}
	if n := strings.Count(string(must(os.ReadFile(calls))), "called"); n != 2 { // --version and features
		t.Errorf("binary ran %d times", n)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if _, err := p.probe(t.Context(), path, asked); err == nil || errors.Is(err, ErrNotInstalled) {
		t.Errorf("missing at its path: %v", err)
	}
	if err := testprogram.Write(path, []byte("#!/bin/sh\necho runc version 2.0.0\n")); err != nil {
		t.Fatal(err)
	}
	if a, err := p.probe(t.Context(), path, asked); err != nil || a.Version != "runc version 2.0.0" {
		t.Errorf("%+v, %v", a, err)
	}
	if _, err := p.probe(t.Context(), "no-such-runtime", asked); !errors.Is(err, ErrNotInstalled) || !errors.Is(err, fault.Unavailable) {
		t.Errorf("not in PATH: %v", err)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func TestTable(t *testing.T) {
	cfg := DefaultConfig()
	cfg.Monitor, cfg.MonitorCgroup = "/monitor", "/x"
	table, err := NewTable(cfg, "/run/x")
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(table.Names(), " "); got != "crun runc" {
		t.Errorf("names %q", got)
	}
	r, err := table.Get("")
	if err != nil || r.Handler().Root != "/run/x/runtime/runc" {
		t.Errorf("default handler: %+v, %v", r.Handler(), err)
	}
	_, err = table.Get("kata")
	if !errors.Is(err, fault.NotFound) || !strings.Contains(err.Error(), "crun, runc") {
		t.Errorf("unknown handler: %v", err)
	}
	cfg.DefaultHandler = "kata"
	if _, err := NewTable(cfg, "/run/x"); !errors.Is(err, fault.Invalid) {
		t.Errorf("unknown default: %v", err)
	}
	cfg.Handlers["kata"] = Handler{Type: "vm"}
	if _, err := NewTable(cfg, "/run/x"); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "handlers.kata.type") {
		t.Errorf("unknown type: %v", err)
	}
}

// A killed server may leave a start under way. The next server must not report
// that the container has not started when it starts a moment later: as long as
// the start hangs the answer is unknown.
func TestStartedWaitsForAStartUnderWay(t *testing.T) {
	const variable = "OCI_TEST_START"
	dir := os.Getenv(variable)
	server := dir != ""
	if !server {
		dir = t.TempDir()
	}
	runtime := filepath.Join(dir, "runtime")
	task := &cliTask{runtime: &cli{entry: &entry{name: "slow", handler: Handler{Path: runtime, Root: dir}}}, watched: watched{ref: Ref{ID: "c", Dir: dir}}}
	if server { // which is killed in this state
		t.Fatal(task.Start(t.Context()))
	}
	text := `#!/bin/sh
cd "$(dirname "$0")"
for word; do case "$word" in
--version) echo "slow version 1.0"; exit ;;
start) touch starting; while [ ! -e go ]; do sleep 0.05; done; touch started; exit ;;
state) if [ -e started ]; then echo '{"status":"running"}'; else echo '{"status":"created"}'; fi; exit ;;
esac; done
`
	if err := testprogram.Write(runtime, []byte(text)); err != nil {
		t.Fatal(err)
	}
	release := func() {
		if err := os.WriteFile(filepath.Join(dir, "go"), nil, 0o600); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(release)
	if started, err := task.Started(t.Context()); started || err != nil {
		t.Errorf("before: %v, %v", started, err)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestStartedWaitsForAStartUnderWay$")
	cmd.Env = append(os.Environ(), variable+"="+dir)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	wait.For(t, "the start to be under way", func() bool {
		_, err := os.Stat(filepath.Join(dir, "starting"))
		return err == nil
	})
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	if started, err := task.Started(t.Context()); started || !errors.Is(err, fault.Timeout) {
		t.Errorf("while it hangs: %v, %v", started, err)
	}
	release()
	wait.For(t, "the start to be over", func() bool {
		started, err := task.Started(t.Context())
		if err == nil && !started || err != nil && !errors.Is(err, fault.Timeout) {
			t.Fatalf("after: %v, %v", started, err)
		}
		return started
	})
}
