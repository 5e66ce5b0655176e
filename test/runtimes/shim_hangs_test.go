package runtimes

import (
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/scene"
)

// A command whose shim does not answer holds up its caller no longer than it was
// to take. When the shim is back nothing is left of the command.
func TestExecOfHangingShim(t *testing.T) {
	eachShim(t, func(t *testing.T, w *scene.World, handler string) {
		c := w.Pod(t, handler).Start(t, "sleep")
		shim, _ := shimOf(t, runDir(c))
		if err := unix.Kill(shim, unix.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		defer unix.Kill(shim, unix.SIGCONT)
		began := time.Now()
		_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"/probe", "sleep"}, Timeout: 1})
		scene.WantCode(t, err, codes.DeadlineExceeded)
		if took := time.Since(began); took > 8*time.Second { // to take the command back may need 20
			t.Errorf("a command that had 1 s returns after %s", took)
		}
		if err := unix.Kill(shim, unix.SIGCONT); err != nil {
			t.Fatal(err)
		}
		var left map[int]string
		if !scene.Eventually(func() bool { left = c.Facts(t).Processes; return len(left) == 2 }) {
			t.Errorf("still there: %v", left)
		}
		var dirs []string
		if !scene.Eventually(func() bool { dirs, _ = filepath.Glob(filepath.Join(runDir(c), "exec-*")); return len(dirs) == 0 }) {
			t.Errorf("still there: %v", dirs)
		}
	})
}
