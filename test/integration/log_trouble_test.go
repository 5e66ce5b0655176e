package integration

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/wait"
)

// tmpfs is a file system of the test's own, of 4 MiB.
func (w *world) tmpfs(t *testing.T) string {
	t.Helper()
	dir := w.dir(t)
	must(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0755,size=4m"))
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	return dir
}

// A container whose log's disk is full, or whose log was deleted, says so in its status as
// long as it lasts, and the server's log says what to do. No line is lost on a full disk.
func TestTroublesOfALogAreTold(t *testing.T) {
	t.Parallel()
	w := shared(t)
	disk := w.tmpfs(t)
	ballast := filepath.Join(disk, "ballast")
	c := w.run(t, "crun", kubelet.LogsBelow(disk)).start(t, "lines 1000000 50ms")
	becomes := func(reason string, words ...string) {
		t.Helper()
		var s *cri.ContainerStatus
		wait.For(t, "the reason "+reason+" in the status", func() bool { s = c.status(t); return s.Reason == reason })
		equal(t, "state", s.State, cri.ContainerState_CONTAINER_RUNNING)
		for _, word := range words {
			if !strings.Contains(s.Message, word) {
				t.Errorf("%s: message %q lacks %q", reason, s.Message, word)
			}
		}
		if reason != "" {
			wait.For(t, "the server's log to tell", func() bool { return strings.Contains(w.LogAbout(50, c.id), words[0]) })
		} else {
			equal(t, "message", s.Message, "")
		}
	}

	becomes("")
	full, err := os.Create(ballast)
	must(t, err)
	defer full.Close()
	wait.For(t, "the disk to be full", func() bool {
		_, err := full.Write(make([]byte, 64<<10))
		return errors.Is(err, unix.ENOSPC)
	})
	becomes(conmon.LogBlocked, "no space left on device", c.logFile(), "nothing is lost")
	must(t, os.Remove(ballast))
	must(t, full.Truncate(0))
	becomes("")
	lines := len(c.log(t))
	wait.For(t, "the log to grow", func() bool { return len(c.log(t)) > lines })
	for i, r := range c.log(t) {
		if want := fmt.Sprint("line ", i+1); r.Content != want {
			t.Fatalf("%q in the log, want %q", r.Content, want)
		}
	}

	must(t, os.Remove(c.logFile()))
	becomes(conmon.LogDetached, c.logFile()+" was deleted", "reopen the log")
	_, err = w.Runtime().ReopenContainerLog(t.Context(), &cri.ReopenContainerLogRequest{ContainerId: c.id})
	must(t, err)
	becomes("")
	wait.For(t, "the new log to grow", func() bool { return len(c.log(t)) > 0 })
}
