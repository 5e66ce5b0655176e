package integration

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestExecSync(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, "sleep", func(c *cri.ContainerConfig) {
			c.WorkingDir = "/tmp"
			c.Envs = []*cri.KeyValue{{Key: "SET", Value: []byte("here")}}
			c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: 1001}
		})
		r := c.execResult(t, "echo out ; echo -err err ; exit 7")
		equal(t, "stdout", string(r.Stdout), "out\n")
		equal(t, "stderr", string(r.Stderr), "err\n")
		equal(t, "exit code", r.ExitCode, 7)
		equal(t, "exit code of success", c.execResult(t, "exit 0").ExitCode, 0)

		f := c.facts(t)
		equal(t, "working directory", f.Cwd, "/tmp")
		equal(t, "uid", f.UID, 1001)
		if v, _ := f.Getenv("SET"); v != "here" {
			t.Errorf("environment %v lacks the container's", f.Env)
		}
		equal(t, "number of descriptors beyond the standard ones", foreignFDs(f.FDs), 0)
	})
}

func foreignFDs(fds map[int]string) int {
	n := 0
	for fd, to := range fds {
		if fd > 2 && !ownDescriptor(to) {
			n++
		}
	}
	return n
}

// The end of the time ends the whole exec, its children included.
func TestExecSyncTimeout(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, "sleep")
		before := len(w.processesOf(t, c.id))
		began := time.Now()
		_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{
			ContainerId: c.id, Timeout: 1,
			Cmd: append([]string{"/probe"}, steps("ignore TERM ; fork 2 sleep 1h ; orphan sleep 1h ; sleep 1h")...),
		})
		wantCode(t, err, codes.DeadlineExceeded, "within 1s")
		if took := time.Since(began); took < time.Second || took > patience {
			t.Errorf("a time-out of 1 s took %v", took)
		}
		if !eventually(func() bool { return len(w.processesOf(t, c.id)) == before }) {
			t.Errorf("processes of the exec survive it: %v", c.facts(t).Processes)
		}
		equal(t, "state of the container", c.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
	})
}

// A child that keeps the output open must not keep the caller waiting for ever.
func TestExecSyncWithALingeringChild(t *testing.T) {
	t.Parallel()
	w := shared(t)
	c := w.run(t, "runc").start(t, "sleep")
	began := time.Now()
	r, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{
		ContainerId: c.id, Timeout: 15,
		Cmd: append([]string{"/probe"}, steps("echo first ; orphan sleep 1h ; exit 2")...),
	})
	if err != nil && time.Since(began) > endless {
		t.Errorf("took %v: %v", time.Since(began), err)
	}
	if err == nil {
		equal(t, "exit code", r.ExitCode, 2)
		equal(t, "stdout", string(r.Stdout), "first\n")
	}
}

func TestExecSyncOutputIsBounded_CVE_2022_1708(t *testing.T) {
	t.Parallel()
	w := shared(t)
	const bound = 16 << 20
	c := w.run(t, "runc").start(t, "sleep")
	r, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{
		ContainerId: c.id, Timeout: 60,
		Cmd: append([]string{"/probe"}, steps(fmt.Sprintf("bytes %d ; bytes -err 1000 ; exit 4", 40<<20))...),
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Stdout) > bound {
		t.Errorf("stdout has %d bytes", len(r.Stdout))
	}
	if !strings.HasPrefix(numbered(0, bound), string(r.Stdout)) || len(r.Stdout) < bound/2 {
		t.Errorf("stdout has %d bytes that are not the first of the output", len(r.Stdout))
	}
	equal(t, "length of stderr", len(r.Stderr), 1000)
	equal(t, "exit code", r.ExitCode, 4)
}

func TestExecSyncErrors(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		running, created, exited := p.start(t, "sleep"), p.create(t, "sleep"), p.start(t, "exit 0")
		exited.wait(t)
		exec := func(c *container, cmd ...string) error {
			r, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.id, Cmd: cmd, Timeout: 60})
			if err == nil && r.ExitCode != 0 {
				err = fmt.Errorf("code %d: %s", r.ExitCode, r.Stderr)
			}
			return err
		}
		if err := exec(running, "/no/such/program"); err == nil || !strings.Contains(err.Error(), "no/such/program") {
			t.Errorf("missing program: %v", err)
		}
		wantCode(t, exec(created, "/probe", "echo"), codes.FailedPrecondition, created.id[:12])
		wantCode(t, exec(exited, "/probe", "echo"), codes.FailedPrecondition, exited.id[:12])
		wantCode(t, exec(running), codes.InvalidArgument)
	})
}

func TestManyExecsAtOnce(t *testing.T) {
	t.Parallel()
	w := shared(t)
	c := w.run(t, "crun").start(t, "sleep")
	var group sync.WaitGroup
	for i := range 16 {
		group.Go(func() {
			r, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{
				ContainerId: c.id, Timeout: 60, Cmd: []string{"/probe", "echo", fmt.Sprint(i), ";", "exit", fmt.Sprint(i)},
			})
			if err != nil || r.ExitCode != int32(i) || string(r.Stdout) != fmt.Sprintln(i) {
				t.Errorf("exec %d: %v, %v", i, r, err)
			}
		})
	}
	group.Wait()
}

func TestExecEndsWithItsContainer(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, "sleep")
		done := make(chan time.Duration, 1)
		began := time.Now()
		go func() {
			w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.id, Cmd: []string{"/probe", "sleep", "1h"}, Timeout: 600})
			done <- time.Since(began)
		}()
		if !eventually(func() bool { return len(w.processesOf(t, c.id)) > 1 }) {
			t.Fatal("the exec never started")
		}
		c.stop(t, 0)
		select {
		case <-done:
		case <-time.After(patience):
			t.Error("the exec goes on after its container has been stopped")
		}
	})
}
