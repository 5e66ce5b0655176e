package integration

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// hooks is a node's directory of hooks, and the diary that its programs keep.
type hooks struct{ dir, diary string }

func hooksOf(t *testing.T, w *world) *hooks {
	t.Helper()
	h := &hooks{w.Path("hooks.d"), w.Path("hooks.diary")}
	must(t, os.MkdirAll(h.dir, 0o755))
	return h
}

// put writes a hook file whose program is the script, in which DIARY is the
// diary.
func (h *hooks) put(t *testing.T, name, when, stage, script string) (file string) {
	t.Helper()
	program := filepath.Join(filepath.Dir(h.dir), "hook-"+name)
	file = filepath.Join(h.dir, name+".json")
	scene.WriteProgram(t, program, []byte("#!/bin/sh\n"+strings.ReplaceAll(script, "DIARY", h.diary)+"\n"))
	must(t, os.WriteFile(file, []byte(`{"version": "1.0.0", "hook": {"path": "`+program+`"}, "when": {`+when+`}, "stages": ["`+stage+`"]}`), 0o644))
	return file
}

// told returns the words that the hooks wrote about a container, in order.
func (h *hooks) told(t *testing.T, id string) (words []string) {
	t.Helper()
	text, err := os.ReadFile(h.diary)
	must(t, err)
	for line := range strings.Lines(string(text)) {
		if word, of, _ := strings.Cut(strings.TrimSpace(line), " "); of == id {
			words = append(words, word)
		}
	}
	return words
}

// tell returns a script that writes a word and the id in the container's state
// into the diary.
func tell(word string) string {
	return `id=$(sed 's/.*"id": *"\([^"]*\)".*/\1/'); PATH=/usr/bin:/bin; echo "` + word + ` $id" >> DIARY`
}

func TestHooksRunInTheirStages(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	h := hooksOf(t, w)
	const when = `"annotations": {"^hooked$": "yes"}`
	stages := []string{"createRuntime", "createContainer", "poststart", "poststop"}
	for _, stage := range stages {
		h.put(t, stage, when, stage, tell(stage))
	}
	must(t, os.WriteFile(filepath.Join(h.dir, "inside.json"), []byte(`{"version": "1.0.0", "when": {`+when+`},
		"hook": {"path": "/probe", "args": ["probe", "note", "/inside", "started"]}, "stages": ["startContainer"]}`), 0o644))
	hooked := func(c *cri.ContainerConfig) { c.Annotations = map[string]string{"hooked": "yes"} }
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		c, plain := p.start(t, "sleep", hooked), p.start(t, "sleep")
		wait.For(t, "the hooks of the start", func() bool { return len(h.told(t, c.id)) == 3 })
		wait.For(t, "what the hook in the container writes", func() bool { // crun start does not wait for it
			return strings.TrimSpace(c.exec(t, "await /inside ; cat /inside")) == "started"
		})
		c.remove(t)
		wait.For(t, "the hook after the stop", func() bool { return len(h.told(t, c.id)) == 4 })
		equalSlices(t, "hooks", h.told(t, c.id), stages)
		plain.remove(t)
		equalSlices(t, "hooks of a container that matches none", h.told(t, plain.id), nil)
	})
}

// The first process of a shared PID namespace is a container as well.
func TestHooksOfTheInfraContainer(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	h := hooksOf(t, w)
	h.put(t, "a", `"always": true`, "createRuntime", tell("made"))
	forPod, forContainer := pidMode(cri.NamespaceMode_POD)
	p := w.run(t, "crun", forPod)
	c := p.start(t, "sleep", forContainer)
	equalSlices(t, "hooks of the infra container", h.told(t, p.id), []string{"made"})
	equalSlices(t, "hooks of the container", h.told(t, c.id), []string{"made"})
}

func TestPrecreateHookChangesTheContainer(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	h := hooksOf(t, w)
	h.put(t, "env", `"commands": ["/probe$"]`, "precreate", `exec /bin/sed 's/"FROM_IMAGE=yes"/"FROM_HOOK=yes"/'`)
	each(t, func(t *testing.T, handler string) {
		f := w.run(t, handler).facts(t)
		if !slices.Contains(f.Env, "FROM_HOOK=yes") || slices.Contains(f.Env, "FROM_IMAGE=yes") {
			t.Errorf("environment %q", f.Env)
		}
	})
}

// A hook that restricts containers must not be missing because of a typing
// error.
func TestBrokenHookFailsCreation(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	h := hooksOf(t, w)
	p := w.run(t, "crun")
	p.runs(t)
	before := mustInventory(t, w)
	for what, test := range map[string]struct {
		breaking func(t *testing.T) (file string)
		code     codes.Code
		says     string
	}{
		"typing error": {func(t *testing.T) string {
			return h.put(t, "x", `"alway": true`, "poststop", "")
		}, codes.FailedPrecondition, `unknown field "alway"`},
		"writable by all": {func(t *testing.T) string {
			file := h.put(t, "x", `"always": true`, "poststop", "")
			must(t, os.Chmod(file, 0o666))
			return file
		}, codes.FailedPrecondition, "writable by users other than UID 0"},
		"failing precreate hook": {func(t *testing.T) string {
			return h.put(t, "x", `"always": true`, "precreate", "echo forbidden >&2; exit 1")
		}, codes.FailedPrecondition, "forbidden"},
		"failing runtime hook": {func(t *testing.T) string {
			return h.put(t, "x", `"always": true`, "createRuntime", "cat >/dev/null; exit 1") // otherwise crun may fail to write to it first
		}, codes.Unknown, "hook"},
	} {
		t.Run(what, func(t *testing.T) {
			file := test.breaking(t)
			_, err := p.try(t.Context(), steps("sleep"))
			if status.Code(err) != test.code || !strings.Contains(err.Error(), test.says) {
				t.Errorf("CreateContainer: %v, want %s and %q", err, test.code, test.says)
			}
			out, err := w.crius(t, "check")
			if reported := strings.Contains(out, file); reported != (test.says != "forbidden" && test.says != "hook") {
				t.Errorf("crius check: %v, %s", err, out)
			}
			must(t, os.Remove(file))
			w.Restored(t, before)
			p.runs(t)
		})
	}
}
