package oci

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/crius-run/crius/internal/fault"
	testprogram "github.com/crius-run/crius/test/kit/program"
)

// kept is a table with one handler, and the runtime of a pod that was made with it.
type kept struct {
	table   *Table
	cfg     Config
	path    string // of the runtime
	runtime Runtime
}

func keep(t *testing.T, answer string) *kept {
	t.Helper()
	path := script(t, "echo "+answer)
	cfg := Config{DefaultHandler: "h", CgroupDriver: "systemd", Monitor: "/bin/true", MonitorCgroup: "/m", Handlers: map[string]Handler{
		"h": {Type: "oci", Path: path, Root: filepath.Join(t.TempDir(), "root"), Options: []string{"--one"}, MinMemory: 1},
	}}
	table := must(NewTable(cfg, t.TempDir()))
	made := must(table.Get("h"))
	origin := OriginOf(made.Handler(), must(made.Probe(t.Context())))
	return &kept{table, cfg, path, must(table.Bind("h", *origin))}
}

// again binds the pod to its origin as the next server does.
func (k *kept) again(t *testing.T, handlers map[string]Handler) Runtime {
	t.Helper()
	origin := *k.runtime.(driver).configured().origin
	cfg := k.cfg
	cfg.Handlers = handlers
	if handlers["h"].Path == "" {
		cfg.DefaultHandler = slices.Collect(maps.Keys(handlers))[0]
	}
	k.table = must(NewTable(cfg, t.TempDir()))
	return must(k.table.Bind("h", origin))
}

// commandLine is what the runtime is called with, without its path.
func commandLine(t *testing.T, r Runtime) (path, args string) {
	t.Helper()
	a, err := r.Probe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	argv := r.(*cli).argv(a, "state", "x")
	return argv[0], strings.Join(argv[1:], " ")
}

func TestBoundRuntimeIsThatOfTheOrigin(t *testing.T) {
	k := keep(t, "runc version 1.2.3")
	root := k.cfg.Handlers["h"].Root
	other := script(t, "echo crun version 1.20")
	changed := Handler{Type: "oci", Path: other, Root: "/other", Options: []string{"--two"}, MinMemory: 2}
	for what, c := range map[string]struct {
		handlers map[string]Handler
		minimum  int64
	}{
		"unchanged": {k.cfg.Handlers, 1},
		"changed":   {map[string]Handler{"h": changed}, 2},
		"removed":   {map[string]Handler{"other": changed}, 1},
	} {
		r := k.again(t, c.handlers)
		path, args := commandLine(t, r)
		if want := "--root " + root + " --systemd-cgroup --one state x"; path != k.path || args != want {
			t.Errorf("%s: %s %s, want %s", what, path, args, want)
		}
		if got := r.Handler().MinMemory; got != c.minimum {
			t.Errorf("%s: rules for new containers: min_memory %d", what, got)
		}
		roots := map[string]bool{}
		for _, one := range k.table.All() {
			roots[one.Handler().Root] = true
		}
		if !roots[root] {
			t.Errorf("%s: All has the roots %v", what, roots)
		}
	}
}

// Pods that are made after a reload follow the new rules; the runtime of earlier ones is
// still among all.
func TestBindAfterReload(t *testing.T) {
	k := keep(t, "runc version 1.2.3")
	origin := *k.runtime.(driver).configured().origin
	h := k.cfg.Handlers["h"]
	h.MinMemory = 2
	k.cfg.Handlers = map[string]Handler{"h": h}
	if err := k.table.Reload(k.cfg); err != nil {
		t.Fatal(err)
	}
	if got := must(k.table.Bind("h", origin)).Handler().MinMemory; got != 2 {
		t.Errorf("min_memory %d", got)
	}
	if got := k.runtime.Handler().MinMemory; got != 1 {
		t.Errorf("min_memory of a pod from before: %d", got)
	}
	h.Path, h.Root = "/elsewhere", "/other"
	k.cfg.Handlers = map[string]Handler{"h": h}
	if err := k.table.Reload(k.cfg); err != nil {
		t.Fatal(err)
	}
	var roots []string
	for _, r := range k.table.All() {
		roots = append(roots, r.Handler().Root)
	}
	if !slices.Contains(roots, origin.Handler.Root) || !slices.Contains(roots, "/other") {
		t.Errorf("roots %v", roots)
	}
}

// What concerns new containers of all handlers holds at once for those of earlier pods, too.
func TestPodsFromBeforeAReloadFollowTheNode(t *testing.T) {
	k := keep(t, "runc version 1.2.3")
	cfg := k.cfg
	cfg.LogRate, cfg.LogBurst, cfg.LogMaxSize, cfg.LogJournal, cfg.AttachWait = 1, 2, 3, "/journal", time.Minute
	cfg.Handlers = map[string]Handler{"other": k.cfg.Handlers["h"]}
	cfg.DefaultHandler = "other"
	for _, criu := range []string{"/missing/criu", ""} {
		cfg.Criu = criu
		if err := k.table.Reload(cfg); err != nil {
			t.Fatal(err)
		}
		now := k.runtime.(*cli).node.Load()
		if want := (logs{1, 2, 3, "/journal"}); now.log != want || now.attachWait != time.Minute {
			t.Errorf("%+v", now)
		}
		_, got := now.criu.Ready(t.Context())
		if _, want := k.table.Criu(t.Context()); got == nil || got.Error() != want.Error() {
			t.Errorf("criu %q: %v, of the table: %v", criu, got, want)
		}
	}
}

// If the program is gone, that of the handler of the same name serves if it understands the
// state. Otherwise the error says what is missing, and a removal needs no runtime.
func TestProgramOfTheOriginIsGone(t *testing.T) {
	for what, c := range map[string]struct {
		now  string // what the handler of the same name reports; empty: there is none
		then func(path string) error
		says string // empty: the handler's program serves
	}{
		"moved":              {"runc version 1.3.0", os.Remove, ""},
		"removed":            {"", os.Remove, "is gone"},
		"other kind":         {"crun version 1.20", os.Remove, "is gone"},
		"replaced":           {"", becomesCrun, `is now "crun version 1.20"`},
		"replaced and moved": {"runc version 1.3.0", becomesCrun, ""},
	} {
		t.Run(strings.ReplaceAll(what, " ", "-"), func(t *testing.T) {
			k := keep(t, "runc version 1.2.3")
			root := k.cfg.Handlers["h"].Root
			if err := c.then(k.path); err != nil {
				t.Fatal(err)
			}
			handlers, next := map[string]Handler{"other": {Type: "oci", Path: "/none"}}, ""
			if c.now != "" {
				next = script(t, "echo "+c.now)
				handlers["h"] = Handler{Type: "oci", Path: next, Root: "/other"}
			}
			r := k.again(t, handlers)
			if c.says == "" {
				if path, args := commandLine(t, r); path != next || !strings.HasPrefix(args, "--root "+root+" ") {
					t.Errorf("%s %s", path, args)
				}
				return
			}
			_, err := r.Probe(t.Context())
			if !errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "handler h: "+k.path) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v", err)
			}
			state := filepath.Join(root, "x")
			if err := os.MkdirAll(state, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := r.Delete(t.Context(), Ref{ID: "x", Dir: t.TempDir()}); err != nil {
				t.Errorf("delete: %v", err)
			}
			if _, err := os.Lstat(state); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("state: %v", err)
			}
		})
	}
}

func becomesCrun(path string) error {
	return testprogram.Write(path, []byte("#!/bin/sh\necho crun version 1.20\n"))
}
