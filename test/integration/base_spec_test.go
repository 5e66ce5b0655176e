package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crius-run/crius/test/kit/node"
)

// The base spec of a handler applies to each of its containers, and to no other
// handler.
func TestBaseRuntimeSpec(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	base, tool := filepath.Join(dir, "base.json"), filepath.Join(dir, "tool")
	write := func(text string) {
		t.Helper()
		must(t, os.WriteFile(base, []byte(text), 0o600))
	}
	write("{}")
	must(t, os.WriteFile(tool, nil, 0o600))
	config := ""
	for name, path := range map[string]string{"based": "runc", "based-crun": "crun"} {
		config += fmt.Sprintf("[runtime.handlers.%s]\npath = %q\nbase_runtime_spec = %q\n", name, path, base)
	}
	w := spotless(t, node.Options{Config: config})
	for _, handler := range []string{"based", "based-crun"} {
		t.Run(handler, func(t *testing.T) {
			write(`{"process": {"env": ["OF_BASE=1"], "rlimits": [{"type": "RLIMIT_CORE", "soft": 5, "hard": 6}], "args": ["/evil"]},
				"mounts": [{"destination": "/opt/tool", "type": "bind", "source": "` + tool + `", "options": ["bind", "ro"]}]}`)
			p := w.run(t, handler)
			c := p.start(t, "sleep")
			f := c.facts(t)
			if !slices.Contains(f.Env, "OF_BASE=1") || f.Limits["Max core file size"].Hard != "6" || f.Mount("/opt/tool") == nil {
				t.Errorf("environment %q, limits %v, mounts %+v", f.Env, f.Limits, f.Mounts)
			}
			write(`{"process": {"env": ["OF_BASE=2"]}}`)
			if f := p.start(t, "sleep").facts(t); !slices.Contains(f.Env, "OF_BASE=2") {
				t.Errorf("after a change: %q", f.Env)
			}
			write("nonsense")
			_, err := p.try(t.Context(), steps("sleep"))
			if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), handler+".base_runtime_spec: "+base) {
				t.Errorf("with a broken base: %v", err)
			}
			if f := w.run(t, "runc").start(t, "sleep").facts(t); slices.Contains(f.Env, "OF_BASE=1") {
				t.Errorf("another handler: %q", f.Env)
			}
		})
	}
}
