package integration

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The end of the time ends all that the exec has started, whatever it is doing
// and however it has hidden.
func TestExecSyncTimeoutEndsEverything_crio_4999(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		var group sync.WaitGroup
		for _, line := range []string{
			"sleep",
			"ignore TERM INT HUP QUIT ; sleep",
			"fork 5 sleep 1h ; sleep",
			"orphan sleep 1h ; orphan fork 2 sleep 1h ; sleep",
			"fork 3 flood 1ms ; flood 1ms",
			"cat ; flood -err 1ms",
			"orphan sleep 1h ; orphan flood 1ms ; exit 0",
		} {
			c := p.start(t, "sleep")
			before := len(w.processesOf(t, c.id))
			group.Go(func() {
				began := time.Now()
				r, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{
					ContainerId: c.id, Timeout: 1, Cmd: append([]string{"/probe"}, steps(line)...),
				})
				took := time.Since(began)
				if took > patience { // what is killed would run for an hour
					t.Errorf("%q: a time-out of 1 s took %v", line, took)
				}
				if err == nil && strings.HasSuffix(line, "exit 0") {
					return // it has ended in time, and whom it left is the container's
				}
				if status.Code(err) != codes.DeadlineExceeded || took < time.Second {
					t.Errorf("%q: after %v answered code %d and %v, want DeadlineExceeded", line, took, r.GetExitCode(), err)
				}
				if !eventually(func() bool { return len(w.processesOf(t, c.id)) == before }) {
					t.Errorf("%q: processes survive it: %v", line, w.processesOf(t, c.id))
				}
				equal(t, line+": state of the container", c.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
			})
		}
		group.Wait()
	})
}

// What an earlier exec has left behind on purpose, and what another exec is
// doing, is none of a later one's business.
func TestExecSyncTimeoutSparesOthers(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, "fork 2 sleep ; sleep")
		other := c.session(t, w.spdy(), "echo here ; fork 2 sleep ; line ; exit 5", withInput)
		shows(t, other, "here")
		var before int
		if !eventually(func() bool { before = len(w.processesOf(t, c.id)); return before == 6 }) {
			t.Fatalf("the container has processes %v, want 6", w.processesOf(t, c.id))
		}
		_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.id, Timeout: 1, Cmd: []string{"/probe", "fork", "2", "sleep", ";", "sleep"}})
		wantCode(t, err, codes.DeadlineExceeded)
		if !eventually(func() bool { return len(w.processesOf(t, c.id)) == before }) {
			t.Errorf("there are %d processes, want the %d of before", len(w.processesOf(t, c.id)), before)
		}
		typed(t, other, "go\n")
		endsWith(t, other, 5)
	})
}

// Zero means no limit; a caller that goes takes its exec with it.
func TestExecSyncWhoseCallerGoes(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, "sleep")
		before := len(w.processesOf(t, c.id))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			_, err := w.Runtime().ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: c.id, Cmd: []string{"/probe", "fork", "2", "sleep", ";", "sleep"}})
			done <- err
		}()
		if !eventually(func() bool { return len(w.processesOf(t, c.id)) == before+3 }) {
			t.Fatalf("the exec never started: %v", w.processesOf(t, c.id))
		}
		cancel()
		wantCode(t, <-done, codes.Canceled)
		if !eventually(func() bool { return len(w.processesOf(t, c.id)) == before }) {
			t.Errorf("processes of the abandoned exec are left: %v", c.facts(t).Processes)
		}
	})
}

// A kubelet takes no answer above 16 MiB: two streams share it, and each has
// its beginning in it.
func TestExecSyncOfBothStreamsIsBounded_CVE_2022_31030(t *testing.T) {
	t.Parallel()
	w := shared(t)
	const bound = 16 << 20
	c := w.run(t, "crun").start(t, "sleep")
	r, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{
		ContainerId: c.id, Timeout: 60, Cmd: []string{"/probe", "noise", "20000000", ";", "noise", "-err", "20000000", ";", "exit", "4"},
	})
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "exit code", r.ExitCode, 4)
	if n := proto.Size(r); n > bound {
		t.Errorf("the answer has %d bytes, want at most %d", n, bound)
	}
	for name, out := range map[string][]byte{"stdout": r.Stdout, "stderr": r.Stderr} {
		if len(out) < bound/2-1024 {
			t.Errorf("%s has %d bytes, want half of %d", name, len(out), bound)
		}
		equal(t, "sum of "+name, sum(string(out)), noiseSum(int64(len(out))))
	}
}
