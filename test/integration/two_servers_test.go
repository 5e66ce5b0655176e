package integration

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

// refusedServer starts a second server on the node, which must exit by itself,
// and returns its output.
func (w *world) refusedServer(t *testing.T, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), wait.Limit)
	defer cancel()
	argv := w.Argv(append([]string{"serve", "--api-listen", w.Path("second.sock")}, args...)...)
	var out []byte
	err := w.Do(func() (err error) {
		out, err = exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
		return err
	})
	if exit := new(exec.ExitError); !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("%q: %v", args, err)
	}
	return string(out)
}

// Two servers do not share an image store or a run root, whether or not the
// first one is running: the second is refused with an error that names the
// first, and changes nothing (O1).
func TestSecondServerIsRefused(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	c := w.run(t, "crun").start(t, "sleep")
	ofStore := []string{"--root", w.Path("second"), "--run-root", w.Path("second-run")}
	ofRunRoot := []string{"--root", w.Path("second"), "--image-root", w.Path("second-images"), "--image-run-root", w.Path("second-imgrun")}
	refused := func(when string, words ...string) {
		t.Helper()
		for _, args := range [][]string{ofStore, ofRunRoot} {
			said := w.refusedServer(t, args...)
			for _, word := range append(words, w.StateRoot()) {
				if !strings.Contains(said, word) {
					t.Errorf("%s: %q does not say %q", when, said, word)
				}
			}
			for _, name := range []string{"second", "second-run", "second-images", "second-imgrun"} {
				if _, err := os.Lstat(w.Path(name)); !errors.Is(err, os.ErrNotExist) {
					t.Errorf("%s: %s is left: %v", when, name, err)
				}
			}
		}
	}
	refused("beside the server", fmt.Sprint("process ", w.PID()))
	w.silent(t, "after the refusal")
	must(t, w.Kill())
	refused("beside its containers", "is not running", "crius wipe")
	must(t, w.Start(t.Context()))
	w.silent(t, "with the server again")
	c.exec(t, "echo alive")
}

// Two servers that share the cgroup parent, the directory of namespaces and the
// leases leave each other's pods alone, including dead containers and pods
// without any, whatever they check, repair and wipe (O12).
func TestServersLeaveEachOthersPodsAlone(t *testing.T) {
	t.Parallel()
	first := private(t, node.Options{})
	p := first.run(t, "crun")
	running, dead := p.start(t, "sleep"), p.start(t, "exit 3")
	dead.wait(t)
	bare := first.run(t, "crun")
	second := private(t, node.Options{Config: fmt.Sprintf("[pod]\nnamespaces_dir = %q\ncgroup_parent = %q\n", first.Path("ns"), first.CgroupParent())})
	must(t, second.Write("cni/net.d/10-p.conflist", strings.ReplaceAll(portless, `{{.Path "cni" "leases"}}`, first.Path("cni", "leases"))))
	other := second.run(t, "crun").start(t, "sleep")

	second.silent(t, "the second server")
	first.silent(t, "the first server")
	for _, w := range []*world{second, first} {
		if found := w.check(t, "--repair"); len(found) != 1 || found[0].Status != "ok" {
			t.Errorf("repair: %+v", found)
		}
	}
	other.exec(t, "echo alive")
	if out, code := second.wipe(t, "", "--yes"); code != 0 {
		t.Errorf("wipe: code %d: %s", code, out)
	}
	must(t, second.Kill())
	if out, code := second.wipe(t, "", "--yes"); code != 0 {
		t.Errorf("wipe without a server: code %d: %s", code, out)
	}
	must(t, second.Start(t.Context()))
	first.silent(t, "after the wipe of the second")
	running.exec(t, "echo alive")
	bare.start(t, "sleep").exec(t, "echo alive")
}
