package integration

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/testkit/node"
	"github.com/crius-run/crius/internal/testkit/wait"
)

// refusedServer starts a second server on the node, which is to end by itself, and
// returns what it says.
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

// Two servers do not share an image store or a run root, whether or not the first
// one runs at the moment: the second is refused, is told of the first, and changes
// nothing (O1).
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
		}
	}
	refused("beside the server", fmt.Sprint("process ", w.PID()))
	w.silent(t, "after the refusal")
	must(t, w.Kill())
	refused("beside its containers", "does not run now", "crius wipe")
	must(t, w.Start(t.Context()))
	w.silent(t, "with the server again")
	c.exec(t, "echo alive")
}
