package integration

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

// The time limit ends everything that the exec has started, whatever it is
// doing and however it hides.
func TestExecSyncTimeoutEndsEverything_crio_4999(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		var group sync.WaitGroup
		for _, line := range []string{
			"sleep",
			"ignore TERM INT HUP QUIT ; sleep",
			"orphan sleep 1h ; orphan fork 2 sleep 1h ; sleep",
			"fork 3 flood 1ms ; flood 1ms",
			"cat ; flood -err 1ms",
			"orphan sleep 1h ; orphan flood 1ms ; exit 0",
		} {
			c := p.start(t, "sleep")
			before := len(w.processesOf(t, c.id))
			group.Go(func() {
				r, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{
					ContainerId: c.id, Timeout: 1, Cmd: append([]string{"/probe"}, steps(line)...),
				})
				if err == nil && strings.HasSuffix(line, "exit 0") {
					return // it has ended in time, and its children belong to the container
				}
				if status.Code(err) != codes.DeadlineExceeded || !strings.Contains(err.Error(), "within 1s") {
					t.Errorf("%q answered code %d and %v, want DeadlineExceeded", line, r.GetExitCode(), err)
				}
				// The killed processes would otherwise run for ever.
				if !wait.Until(t.Context(), func() bool { return len(w.processesOf(t, c.id)) == before }) {
					t.Errorf("%q: processes survive it: %v", line, w.processesOf(t, c.id))
				}
				equal(t, line+": state of the container", c.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
			})
		}
		group.Wait()
	})
}

// The time may be up before the runtime reports the start of a command that has
// already ended: its orphans are killed nevertheless.
func TestExecSyncTimeoutEndsOrphansOfALateStart(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, handler string) {
		w, runtime := brittle(t, handler)
		c := w.run(t, "brittle").start(t, "sleep")
		before := len(w.processesOf(t, c.id))
		runtime.does(t, "exec", "hangafter")
		_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{
			ContainerId: c.id, Timeout: 1, Cmd: append([]string{"/probe"}, steps("orphan sleep ; orphan fork 2 sleep ; exit 0")...),
		})
		wantCode(t, err, codes.DeadlineExceeded, "within 1s")
		c.only(t, before)
	})
}

// Processes that an earlier exec has left on purpose, or that another exec is
// running, are not affected by a later one.
func TestExecSyncTimeoutSparesOthers(t *testing.T) {
	t.Parallel()
	w := shared(t)
	c := w.run(t, "crun").start(t, "fork 2 sleep ; sleep")
	other := c.session(t, w.spdy(), "echo here ; fork 2 sleep ; line ; exit 5", withInput)
	shows(t, other, "here")
	c.only(t, 6)
	_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.id, Timeout: 1, Cmd: []string{"/probe", "fork", "2", "sleep", ";", "sleep"}})
	wantCode(t, err, codes.DeadlineExceeded)
	c.only(t, 6)
	typed(t, other, "go\n")
	c.only(t, 5) // its session lasts as long as those that it has started
}

// Zero means no limit; a caller that leaves ends its exec.
func TestExecSyncWhoseCallerGoes(t *testing.T) {
	t.Parallel()
	w := shared(t)
	c := w.run(t, "crun").start(t, "sleep")
	before := len(w.processesOf(t, c.id))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := w.Runtime().ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: c.id, Cmd: []string{"/probe", "fork", "2", "sleep", ";", "sleep"}})
		done <- err
	}()
	c.only(t, before+3)
	cancel()
	wantCode(t, <-done, codes.Canceled)
	c.only(t, before)
}

// When a server is killed nothing waits for its command, or ends it when its
// time is up: the next server does. Sessions and daemons live on.
func TestExecSyncOfAKilledServerIsEnded(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, handler string) {
		w := private(t, node.Options{})
		c := w.run(t, handler).start(t, "fork 2 sleep ; sleep")
		c.session(t, w.spdy(), "fork 1 sleep ; sleep", withInput)
		c.only(t, 5)
		ended := make(chan error, 1)
		go func() {
			_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.id, Cmd: []string{"/probe", "fork", "2", "sleep", ";", "sleep"}})
			ended <- err
		}()
		c.only(t, 8)
		must(t, w.Crash(t.Context()))
		wantCode(t, <-ended, codes.Unavailable)
		c.only(t, 5)
		wait.For(t, "the directories of commands to go", func() bool {
			left, err := filepath.Glob(filepath.Join(w.RunRoot(), "containers", c.id, "exec-*"))
			return err == nil && len(left) == 0
		})
	})
}

// An inspection of a node does not end a running probe.
func TestCheckLeavesCommandsAlone(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, "sleep")
		before := len(w.processesOf(t, c.id))
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			_, err := w.Runtime().ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: c.id, Cmd: []string{"/probe", "sleep"}})
			ended <- err
		}()
		c.only(t, before+1)
		for _, command := range []string{"check", "status"} {
			if out, err := w.crius(t, command); err != nil {
				t.Errorf("crius %s: %v: %s", command, err, out)
			}
		}
		c.only(t, before+1)
		cancel()
		wantCode(t, <-ended, codes.Canceled)
	})
}

// A kubelet accepts no answer above 16 MiB: two streams share it as they come,
// and it contains the beginning of each; one alone may use all except the
// other's 64 KiB.
func TestExecSyncOutputIsBounded_CVE_2022_1708_CVE_2022_31030(t *testing.T) {
	t.Parallel()
	w := shared(t)
	const bound, free, much = 16 << 20, 64 << 10, 17 << 20
	c := w.run(t, "crun").start(t, "sleep")
	for name, test := range map[string]struct {
		line           string
		stdout, stderr int // at least
	}{
		"stdout alone": {fmt.Sprintf("noise %d ; exit 4", much), bound - free - 1024, 0},
		"both":         {fmt.Sprintf("noise %d ; noise -err %d ; exit 4", much/2+1024, much/2+1024), free, free},
	} {
		r := c.execResult(t, test.line)
		equal(t, name+": exit code", r.ExitCode, 4)
		if n := proto.Size(r); n > bound {
			t.Errorf("%s: the answer has %d bytes, want at most %d", name, n, bound)
		}
		if n := len(r.Stdout) + len(r.Stderr); n < bound-free-1024 {
			t.Errorf("%s: %d bytes of output, which could have been more", name, n)
		}
		if len(r.Stdout) < test.stdout || len(r.Stderr) < test.stderr {
			t.Errorf("%s: %d and %d bytes, want at least %d and %d", name, len(r.Stdout), len(r.Stderr), test.stdout, test.stderr)
		}
		equal(t, name+": sum of stdout", sum(string(r.Stdout)), noiseSum(int64(len(r.Stdout))))
		equal(t, name+": sum of stderr", sum(string(r.Stderr)), noiseSum(int64(len(r.Stderr))))
	}
}
