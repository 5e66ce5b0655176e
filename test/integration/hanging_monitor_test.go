package integration

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

// Monitors that hang during a restart of the server are queried concurrently
// and delay nothing else. Their containers run on and are reported as
// unreachable; they can be stopped, or continue normally when the monitors
// respond again.
func TestServerStartsWhileMonitorsHang(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	forPod, forContainer := pidMode(cri.NamespaceMode_POD)
	p := w.run(t, "crun", forPod)
	asleep := w.monitors(t, p.id)
	var containers []*container
	for _, line := range []string{"sleep", "ignore TERM ; sleep", "sleep"} {
		c := p.start(t, line, forContainer)
		containers = append(containers, c)
		asleep = append(asleep, w.monitors(t, c.id)...)
	}
	wake := func() {
		for _, pid := range asleep {
			_ = unix.Kill(pid, unix.SIGCONT) // some are gone by then
		}
	}
	t.Cleanup(wake)
	well := w.run(t, "crun").start(t, "sleep")
	for _, pid := range asleep {
		must(t, unix.Kill(pid, unix.SIGSTOP))
	}
	wait.Retry(t, func() error { // the server waits for them for five seconds
		must(t, w.Kill())
		started := make(chan error, 1)
		go func() { started <- w.Start(t.Context()) }()
		// Each query lasts until its time is up: if they were sequential, there
		// would be one connection at a time.
		most := 0
		wait.For(t, "the server to ask all hanging monitors at once, or to start", func() bool {
			over := len(started) > 0
			most = max(most, len(questions(t, w.PID())))
			return over || most >= len(asleep)
		})
		must(t, <-started)
		if most < len(asleep) {
			return fmt.Errorf("at most %d of %d hanging monitors were asked at once", most, len(asleep))
		}
		return nil
	})
	well.exec(t, "echo alive")
	equal(t, "state of the pod", p.status(t).State, cri.PodSandboxState_SANDBOX_READY)
	for _, c := range containers {
		equal(t, "state of a container", c.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
	}
	found := w.check(t)
	for _, c := range containers {
		if !found.says("FAIL", "container "+c.id, "does not answer") {
			t.Errorf("the check does not name %s: %+v", c.id, found)
		}
	}

	stopped := containers[1]
	stopped.stop(t, 1)
	s := stopped.status(t)
	equal(t, "state of the stopped container", s.State, cri.ContainerState_CONTAINER_EXITED)
	equal(t, "its exit code", s.ExitCode, 137)
	wake()
	for _, c := range []*container{containers[0], containers[2]} {
		wait.For(t, "the container to be taken up", func() bool {
			_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.id, Cmd: []string{"/probe", "echo", "alive"}})
			return err == nil
		})
	}
	p.stop(t)
	p.remove(t)
	w.silent(t, "when all are awake")
}

// A monitor that hangs keeps nobody waiting for good: the caller learns which one it is, and
// calls for other containers do not wait.
func TestCallsOfHangingMonitorsEnd(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{}) // what hangs is seen by crius check
	p := w.run(t, "runc")
	hanging, well := p.start(t, "sleep"), p.start(t, "sleep")
	monitor := w.monitors(t, hanging.id)[0]
	must(t, unix.Kill(monitor, unix.SIGSTOP))
	t.Cleanup(func() { _ = unix.Kill(monitor, unix.SIGCONT) })
	reopen := func(id string) error {
		_, err := w.Runtime().ReopenContainerLog(t.Context(), &cri.ReopenContainerLogRequest{ContainerId: id})
		return err
	}
	var reopened chan error
	wait.Retry(t, func() error {
		reopened = make(chan error, 1)
		go func(ended chan<- error) { ended <- reopen(hanging.id) }(reopened)
		err := reopen(well.id)
		if err == nil && len(reopened) > 0 {
			err = errors.New("it waited for the monitor that hangs")
		}
		return err
	})
	resp, err := w.Runtime().Attach(t.Context(), &cri.AttachRequest{ContainerId: hanging.id, Stdout: true, Stderr: true})
	must(t, err)
	attached := w.spdy().Open(t.Context(), resp.Url, kubelet.Wants{Stdout: true, Stderr: true})
	named := "process " + strconv.Itoa(monitor)
	wantCode(t, <-reopened, codes.DeadlineExceeded, named)
	if err := attached.Wait(wait.Limit); err == nil || !strings.Contains(err.Error(), named) {
		t.Errorf("attach to a container whose monitor hangs: %v, want an error that says %q", err, named)
	}
	must(t, unix.Kill(monitor, unix.SIGCONT))
	must(t, reopen(hanging.id))
}

// questions returns the connections of unix sockets that a process has opened
// to others: its own end has no name.
func questions(t *testing.T, pid int) (open []string) {
	t.Helper()
	proc := filepath.Join("/proc", strconv.Itoa(pid))
	table, err := os.ReadFile(filepath.Join(proc, "net", "unix"))
	if err != nil {
		return nil // it has only just been started, or has ended
	}
	const connected = "03"
	nameless := map[string]bool{}
	for line := range strings.Lines(string(table)) {
		if f := strings.Fields(line); len(f) == 7 && f[5] == connected {
			nameless["socket:["+f[6]+"]"] = true
		}
	}
	links, _ := filepath.Glob(filepath.Join(proc, "fd", "*")) // the pattern is well-formed
	for _, link := range links {
		if to, _ := os.Readlink(link); nameless[to] {
			open = append(open, to)
		}
	}
	return open
}
