package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
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
		equal(t, "number of descriptors beyond the standard ones", leakedFDs(f.FDs), 0)
	})
}

func leakedFDs(fds map[int]string) int {
	n := 0
	for fd, to := range fds {
		if fd > 2 && !ownDescriptor(to) {
			n++
		}
	}
	return n
}

// A child that keeps the output open must not keep the caller waiting for ever,
// nor occupy the server once the caller has its answer: a probe may leave one
// each time.
func TestExecSyncWithALingeringChild_CVE_2026_53495(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	c := w.run(t, "runc").start(t, "sleep")
	probe := func(int) error {
		r, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{
			ContainerId: c.id, Cmd: append([]string{"/probe"}, steps("echo first ; orphan sleep 1h ; exit 2")...), Timeout: scene.LimitSeconds,
		})
		if err == nil && (r.ExitCode != 2 || string(r.Stdout) != "first\n" || !strings.Contains(string(r.Stderr), incomplete)) {
			err = fmt.Errorf("it ended with %d and said %q", r.ExitCode, r.Stdout)
		}
		return err
	}
	const few, many = 12, 36
	crowd(t, few, probe)
	stacks, before := w.goroutines(t), w.load(t)
	crowd(t, many, probe)
	var now inventory.Load
	if !wait.Until(t.Context(), func() bool { now = w.load(t); return now.Total() <= before.Total()+2 }) {
		t.Errorf("file descriptors went from %v to %v", before.FDs, now.FDs)
	}
	more := func() (kinds []string) {
		for kind, n := range w.goroutines(t) {
			if n > stacks[kind]+2 {
				kinds = append(kinds, fmt.Sprintf("%d goroutines, before %d, made at %s", n, stacks[kind], kind))
			}
		}
		return kinds
	}
	if !wait.Until(t.Context(), func() bool { return len(more()) == 0 }) {
		t.Error(strings.Join(more(), "\n"))
	}
}

// incomplete is what the standard error of an answer says if output is missing.
const incomplete = "output incomplete"

// What descendants of a command write after its end is in the answer, or the answer says
// that it is not complete; within the time that the command has.
func TestExecSyncOfLateOutput(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, "sleep")
		var all strings.Builder
		for i := range 200 {
			fmt.Fprintf(&all, "line %d\n", i+1)
		}
		r := c.execResult(t, "orphan lines 200 1ms ; exit 2")
		equal(t, "exit code", r.ExitCode, 2)
		complete := string(r.Stdout) == all.String()
		// It may be complete just before the time is up, and the server not know that.
		if told := strings.Contains(string(r.Stderr), incomplete); !told && !complete || !strings.HasPrefix(all.String(), string(r.Stdout)) {
			t.Errorf("%d bytes of %d, and standard error says %q", len(r.Stdout), all.Len(), r.Stderr)
		}
		for _, timeout := range []int64{0, 1} {
			var r *cri.ExecSyncResponse
			wait.For(t, "a command to start and end within its time", func() (ended bool) {
				var err error
				r, err = w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{
					ContainerId: c.id, Timeout: timeout, Cmd: append([]string{"/probe"}, steps("orphan sleep 1h ; echo done")...),
				})
				if status.Code(err) == codes.DeadlineExceeded { // a second is not enough for a busy machine
					timeout++
					return false
				}
				must(t, err)
				return true
			})
			equal(t, "output", string(r.Stdout), "done\n")
			if !strings.Contains(string(r.Stderr), incomplete) {
				t.Errorf("timeout %d: standard error says %q", timeout, r.Stderr)
			}
		}
		wait.Retry(t, func() error { // if the machine pauses for two seconds, the end of the output comes too late
			if said := string(c.execResult(t, "echo done").Stderr); said != "" {
				return fmt.Errorf("standard error without a descendant says %q", said)
			}
			return nil
		})
	})
}

func TestExecSyncErrors(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	running, created, exited := p.start(t, "sleep"), p.create(t, "sleep"), p.start(t, "exit 0")
	exited.wait(t)
	exec := func(c *container, cmd ...string) error {
		r, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.id, Cmd: cmd, Timeout: scene.LimitSeconds})
		if err == nil && r.ExitCode != 0 {
			err = fmt.Errorf("code %d: %s", r.ExitCode, r.Stderr)
		}
		return err
	}
	wantCode(t, exec(created, "/probe", "echo"), codes.FailedPrecondition, created.id[:12])
	wantCode(t, exec(exited, "/probe", "echo"), codes.FailedPrecondition, exited.id[:12])
	wantCode(t, exec(running), codes.InvalidArgument)
}

// A kubelet ignores a probe whose ExecSync returns an error, so a liveness
// probe without its program would never restart the container.
func TestProbeWithoutItsProgramFails_k8s_106682(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	for _, handler := range scene.Handlers {
		c := w.run(t, handler).start(t, "sleep")
		for program, want := range map[string]int32{"/no/such/program": 127, "no-such-program": 127, "/etc/passwd": 126, "/etc": 126} {
			r, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.id, Cmd: []string{program}, Timeout: scene.LimitSeconds})
			if err != nil {
				t.Errorf("%s, %s: %v", handler, program, err)
				continue
			}
			if r.ExitCode != want || !strings.Contains(string(r.Stderr), program) || strings.Count(string(r.Stderr), "\n") != 1 {
				t.Errorf("%s, %s: code %d, stderr %q; want %d", handler, program, r.ExitCode, r.Stderr, want)
			}
		}
	}
	if log := scene.Read(t, w.LogFile()); strings.Contains(log, "level=ERROR") {
		t.Errorf("the server logs errors:\n%s", log)
	}
}

// A runtime's error about a container that ends while a command is started in
// it varies; for the client it has one meaning.
func TestExecSyncMeetsTheEndOfItsContainer(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		for range 5 {
			c := p.start(t, "sleep")
			var group sync.WaitGroup
			for range 4 {
				group.Go(func() {
					for {
						_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.id, Cmd: []string{"/probe", "echo"}, Timeout: scene.LimitSeconds})
						if err == nil {
							continue // also if it was killed with its container
						}
						if status.Code(err) != codes.FailedPrecondition {
							t.Error(err)
						}
						return
					}
				})
			}
			c.stop(t, 0)
			group.Wait()
		}
	})
	if log := scene.Read(t, w.LogFile()); strings.Contains(log, "level=ERROR") {
		t.Errorf("the server logs errors:\n%s", log)
	}
}

// The process that crun has forked for a missing program is dead and a child of
// the server. Until it is reaped the container's init cannot end, so that a
// stop took twenty seconds.
func TestFailedExecLeavesNoZombie(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	c := w.run(t, "crun").start(t, "sleep")
	for range 20 {
		r, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.id, Cmd: []string{"/no/such/program"}, Timeout: scene.LimitSeconds})
		if err != nil || r.ExitCode != 127 {
			t.Fatalf("a missing program was run: %v, %v", r, err)
		}
	}
	wait.For(t, "the server to have no dead children", func() bool { return len(w.deadChildren(t)) == 0 })
}

// deadChildren returns the server's children that have not been reaped.
func (w *world) deadChildren(t *testing.T) (dead []string) {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", w.PID()))
	if err != nil || len(files) == 0 {
		t.Fatalf("%q, %v", files, err)
	}
	for _, file := range files {
		text, _ := os.ReadFile(file) // the thread may have ended
		for pid := range strings.FieldsSeq(string(text)) {
			if stat, err := os.ReadFile("/proc/" + pid + "/stat"); err == nil && strings.Contains(string(stat), ") Z ") {
				dead = append(dead, string(stat))
			}
		}
	}
	return dead
}

func TestManyExecsAtOnce(t *testing.T) {
	t.Parallel()
	w := shared(t)
	c := w.run(t, "crun").start(t, "sleep")
	var group sync.WaitGroup
	for i := range 8 {
		group.Go(func() {
			r, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{
				ContainerId: c.id, Timeout: scene.LimitSeconds, Cmd: []string{"/probe", "echo", fmt.Sprint(i), ";", "exit", fmt.Sprint(i)},
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
	c := w.run(t, "crun").start(t, "sleep")
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.id, Cmd: []string{"/probe", "sleep"}})
	}()
	wait.For(t, "the exec to start", func() bool { return len(w.processesOf(t, c.id)) > 1 })
	c.stop(t, 0)
	scene.Receive(t, "the exec to end with its container", done)
}
