package integration

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
)

// A pod keeps the program, root and options of the runtime that it was made with, whatever
// the configuration says when the server is started again: all verbs work, and the
// runtime's root is empty afterwards.
func TestPodKeepsItsRuntimeWhenTheConfigurationChanges(t *testing.T) {
	t.Parallel()
	roots, programs := t.TempDir(), t.TempDir()
	root := func(name string) string { return filepath.Join(roots, name) }
	link := func(name string) string { return filepath.Join(programs, name) }
	table := func(name, path string, more ...string) string {
		return fmt.Sprintf("[runtime.handlers.%s]\npath = %q\n%s\n", name, path, strings.Join(more, "\n"))
	}
	rooted := func(name string) string { return fmt.Sprintf("root = %q", root(name)) }

	var before, after strings.Builder
	for i, name := range handlers {
		path, err := exec.LookPath(name)
		must(t, err)
		for _, program := range []string{"replaced-", "lost-"} {
			must(t, os.Symlink(path, link(program+name)))
		}
		other := handlers[1-i]
		// Its table goes, and the default of that name, which has another root, is back.
		before.WriteString(table(name, name, rooted(name)))
		before.WriteString(table("removed-"+name, path, rooted("removed-"+name)))
		// Everything about it changes, also the kind of runtime.
		before.WriteString(table("changed-"+name, path, rooted("changed-"+name), `options = ["--debug"]`))
		after.WriteString(table("changed-"+name, other, rooted("elsewhere-"+name), `options = ["--no-such-flag"]`))
		// Its program is installed in another place.
		before.WriteString(table("replaced-"+name, link("replaced-"+name), rooted("replaced-"+name)))
		after.WriteString(table("replaced-"+name, path))
		// Its program is removed, and the handler has another kind of runtime.
		before.WriteString(table("lost-"+name, link("lost-"+name), rooted("lost-"+name)))
		after.WriteString(table("lost-"+name, other))
	}
	w := private(t, node.Options{Config: before.String()})

	type served struct {
		handler string
		pod     *pod
		c       *container
	}
	var all []served
	for _, name := range handlers {
		for _, prefix := range []string{"", "removed-", "changed-", "replaced-", "lost-"} {
			p := w.run(t, prefix+name, func(c *cri.PodSandboxConfig) { c.Metadata.Name += prefix + name })
			all = append(all, served{prefix + name, p, p.start(t, "sleep")})
		}
	}
	must(t, w.Stop())
	for _, name := range handlers {
		must(t, os.Remove(link("replaced-"+name)))
		must(t, os.Remove(link("lost-"+name)))
	}
	must(t, w.Configure("10-options", after.String()))
	must(t, w.Start(t.Context()))

	for _, s := range all {
		equal(t, s.handler, s.c.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
		if strings.HasPrefix(s.handler, "lost-") {
			for _, err := range []error{execError(t, s.c), createError(t, s.pod)} {
				wantCode(t, err, codes.Unavailable, s.handler, link(s.handler), "is gone")
			}
		} else {
			equal(t, s.handler+": exec", s.c.exec(t, "echo served"), "served\n")
			_, err := w.Runtime().UpdateContainerResources(t.Context(), &cri.UpdateContainerResourcesRequest{
				ContainerId: s.c.id, Linux: &cri.LinuxContainerResources{CpuShares: 99},
			})
			if err != nil {
				t.Errorf("%s: update: %v", s.handler, err)
			}
			equal(t, s.handler+": new container", s.pod.finish(t, "echo made"), "made\n")
		}
		s.pod.stop(t)
		s.pod.remove(t)
		if left, err := os.ReadDir(root(s.handler)); err != nil && !errors.Is(err, fs.ErrNotExist) || len(left) > 0 {
			t.Errorf("%s: left in the root: %v, %v", s.handler, left, err)
		}
	}
	// New pods are made as the configuration says now.
	p := w.run(t, handlers[0])
	p.start(t, "sleep")
	if left, err := os.ReadDir(root(handlers[0])); err != nil || len(left) > 0 {
		t.Errorf("a new pod is in the old root: %v, %v", left, err)
	}
}

func execError(t *testing.T, c *container) error {
	t.Helper()
	_, err := c.pod.w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.id, Cmd: []string{"/probe", "echo"}})
	return err
}

func createError(t *testing.T, p *pod) error {
	t.Helper()
	_, err := p.try(t.Context(), steps("sleep"))
	return err
}
