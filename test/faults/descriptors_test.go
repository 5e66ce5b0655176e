package faults

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// descriptors counts the open descriptors of a process, and the inotify
// instances among them.
func descriptors(t *testing.T, pid int) (all, inotify int) {
	t.Helper()
	dir := filepath.Join("/proc", strconv.Itoa(pid), "fd")
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if target, _ := os.Readlink(filepath.Join(dir, e.Name())); strings.Contains(target, "inotify") {
			inotify++
		}
	}
	return len(entries), inotify
}

// With 1024 descriptors and 128 inotify instances, the defaults of
// distributions, 300 pods run: a pod costs the server few descriptors, and no
// process an inotify instance. FULL=1 runs them all.
func TestPodsCostFewDescriptors_containerd_10468(t *testing.T) {
	t.Parallel()
	const limit, promised = 1024, 300
	w := spotless(t, node.Options{})
	if err := unix.Prlimit(w.PID(), unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: limit, Max: limit}, nil); err != nil {
		t.Fatal(err)
	}
	v := watch(t, w)
	empty, inotify := descriptors(t, w.PID())
	pods := many(6, promised)
	var last *scene.Container
	for range pods {
		last = w.Pod(t, "crun").Start(t, "sleep")
	}
	scene.Equal(t, "output of an exec", last.Exec(t, "echo inside"), "inside\n")
	var full, now int
	var perPod, need float64
	measure := func() bool { // a request has some for a moment
		full, now = descriptors(t, w.PID())
		perPod = float64(full-empty) / float64(pods)
		need = float64(empty) + perPod*promised
		return need <= limit*3/4 && now == inotify // the rest is for execs and streams
	}
	if !wait.Until(t.Context(), measure) {
		t.Errorf("%d pods would need %.0f descriptors of %d, and %d have %d inotify instances more", promised, need, limit, pods, now-inotify)
	}
	scene.Equal(t, "inotify instances of the monitors", inotifyOfMonitors(t, w), 0)
	t.Logf("%d descriptors without, %d with %d pods: %.1f for each", empty, full, pods, perPod)
	v.unaffected(t)
}

func inotifyOfMonitors(t *testing.T, w *scene.World) (sum int) {
	t.Helper()
	for _, pid := range inventory.Processes(inventory.Scope{Cgroup: fmt.Sprintf("/%s/monitors", w.ID)}) {
		_, inotify := descriptors(t, pid)
		sum += inotify
	}
	return sum
}
