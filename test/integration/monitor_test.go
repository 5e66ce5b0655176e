package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
)

// monitors returns the crius-conmon processes of a container.
func (w *world) monitors(t *testing.T, id string) []int {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var out []int
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil || !strings.Contains(strings.SplitN(string(data), "\x00", 2)[0], "conmon") {
			continue
		}
		pid, err := strconv.Atoi(strings.Split(file, "/")[2])
		if err != nil {
			t.Fatal(err)
		}
		cwd, _ := os.Readlink(filepath.Join(filepath.Dir(file), "cwd"))
		if strings.Contains(string(data), id) || strings.Contains(cwd, id) {
			out = append(out, pid)
		}
	}
	return out
}

// A container whose monitor is gone has no process that takes its output and
// its exit code: it is ended with a reason, and everything of it can be
// removed.
func TestALostMonitorEndsItsContainer(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	for name, while := range map[string]func(t *testing.T, kill func()){
		"server up": func(t *testing.T, kill func()) { kill() },
		"server down": func(t *testing.T, kill func()) {
			if err := w.Kill(); err != nil {
				t.Fatal(err)
			}
			kill()
			if err := w.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := w.run(t, "crun")
			c, other := p.start(t, "sleep"), p.start(t, "sleep")
			monitors := w.monitors(t, c.id)
			if len(monitors) != 1 {
				t.Fatalf("the container's monitors are %v, want one", monitors)
			}
			while(t, func() { unix.Kill(monitors[0], unix.SIGKILL) })
			s := c.wait(t)
			if s.ExitCode == 0 || s.Reason == "" || s.Reason == "Completed" || !strings.Contains(s.Message, "monitor") {
				t.Errorf("code %d, reason %q, message %q", s.ExitCode, s.Reason, s.Message)
			}
			c.only(t, 0)
			equal(t, "state of the other container", other.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
			c.stop(t, 1)
			c.remove(t)
		})
	}
}

// The monitor must neither be charged to, nor die with, the container
// (CVE-2019-14891), and must be unreachable from a pod (CVE-2020-15257).
func TestTheMonitorLivesApart_CVE_2019_14891_CVE_2020_15257(t *testing.T) {
	t.Parallel()
	w := shared(t)
	c := w.run(t, "crun").start(t, "sleep")
	monitors := w.monitors(t, c.id)
	if len(monitors) != 1 {
		t.Fatalf("the container's monitors are %v, want one", monitors)
	}
	proc := filepath.Join("/proc", strconv.Itoa(monitors[0]))
	for _, line := range strings.Split(read(t, filepath.Join(proc, "cgroup")), "\n") {
		if strings.Contains(line, w.CgroupParent()) {
			t.Errorf("the monitor is in the pods' cgroup: %s", line)
		}
	}
	if !strings.Contains(read(t, filepath.Join(proc, "cgroup")), "/"+w.ID+"/monitors") {
		t.Errorf("the monitor is not in the configured cgroup:\n%s", read(t, filepath.Join(proc, "cgroup")))
	}
	own, _ := os.Readlink(filepath.Join(proc, "ns", "net"))
	equal(t, "network namespace of the monitor", own, w.netNS(t))
	if a := strings.Join(mustInventory(t, w).About("abstract socket"), "\n"); a != "" {
		t.Errorf("abstract sockets: %s", a)
	}
}

// A container's output goes through a process that runs as root on the node: it
// neither starts programs nor connects to anything.
func TestMonitorsAreLockedDown(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, "echo ready ; sleep", func(c *cri.ContainerConfig) { c.Tty = true })
		c.says(t, "ready")
		pids := w.monitors(t, c.id)
		equal(t, "number of monitors", len(pids), 1)
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pids[0]))
		must(t, err)
		for _, thread := range threads {
			status := read(t, thread)
			for _, want := range []string{"NoNewPrivs:\t1\n", "Seccomp:\t2\n"} {
				if !strings.Contains(status, want) {
					t.Errorf("%s lacks %q:\n%s", thread, want, status)
				}
			}
		}
		equal(t, "container's no_new_privs", strings.Contains(c.procfs(t, "status"), "NoNewPrivs:\t0\n"), true)
	})
}
