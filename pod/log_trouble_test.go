package pod

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/pod/audit"
	"github.com/crius-run/crius/test/kit/wait"
)

// A log that lacks what the container writes shows in the container's status, in the counts and
// in a check, until it is well again or the container has ended.
func TestLogTroubleIsShown(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	id := b.start(e, pod, "c")
	task := b.node.tasks[id]
	about := func() (texts []string) {
		found, err := e.Audit().Verify(t.Context(), false)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range found {
			texts = append(texts, f.Object+": "+f.Wrong)
		}
		return texts
	}
	shows := func(reason string) {
		t.Helper()
		wait.For(t, "the reason "+reason, func() bool { v, err := e.Container(id); return err == nil && v.LogReason == reason })
		v, _ := e.Container(id)
		logs := 0
		if reason != "" {
			logs = 1
		}
		if (v.LogMessage != "") != (reason != "") || e.Summary().Logs != logs || len(about()) != logs {
			t.Errorf("%q: message %q, %d troubles; check: %q", reason, v.LogMessage, e.Summary().Logs, about())
		}
	}
	shows("")
	task.report(conmon.LogTrouble{Reason: conmon.LogBlocked, Message: "write log /l: no space left on device"})
	shows(conmon.LogBlocked)
	if found := about(); !strings.Contains(found[0], "container "+id) || !strings.Contains(found[0], "write log /l: no space left on device") {
		t.Errorf("check: %q", found)
	}
	task.report(conmon.LogTrouble{Reason: conmon.LogDetached, Message: "log /l was deleted"})
	shows(conmon.LogDetached)
	task.report(conmon.LogTrouble{})
	shows("")
	task.report(conmon.LogTrouble{Reason: conmon.LogDetached, Message: "log /l was deleted"})
	shows(conmon.LogDetached)
	if err := e.StopContainer(t.Context(), id, 0); err != nil {
		t.Fatal(err)
	}
	if v, err := e.Container(id); err != nil || v.Reason != "Error" || v.LogReason != "" || e.Summary().Logs != 0 {
		t.Errorf("after the end: %q, %v; %d troubles", v.Reason, err, e.Summary().Logs)
	}
	b.remove(e, pod)
	b.close(e)
	b.nothingLeft()
}

// The log of a silent container is missed by a check alone: its monitor looks only when
// something is written.
func TestCheckMissesTheLogOfASilentContainer(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	e := b.engine()
	cfg := podConfig("a")
	cfg.LogDirectory = t.TempDir()
	pod, err := e.RunSandbox(t.Context(), "", cfg)
	if err != nil {
		t.Fatal(err)
	}
	logged := containerConfig("c")
	logged.LogPath = "0.log"
	file := filepath.Join(cfg.LogDirectory, logged.LogPath)
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	id, err := e.CreateContainer(t.Context(), pod, logged, nil)
	if err != nil {
		t.Fatal(err)
	}
	check := func() []audit.Finding {
		found, err := e.Audit().Verify(t.Context(), false)
		if err != nil {
			t.Error(err)
		}
		return found
	}
	if found := check(); len(found) != 0 {
		t.Errorf("with its log: %+v", found)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if found := check(); len(found) != 1 || found[0].Object != "container "+id || !strings.Contains(found[0].Wrong, file) {
		t.Errorf("without its log: %+v", found)
	}
	b.remove(e, pod)
	b.close(e)
	b.nothingLeft()
}

// A trouble that comes and goes is logged once a minute, and so is its end.
func TestLogTroublesAreNotLoggedWithoutEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var w logWarning
		lines := 0
		for range 10 * 60 { // ten minutes
			for _, reason := range []string{conmon.LogBlocked, ""} {
				if !w.recently(reason) {
					lines++
				}
				time.Sleep(500 * time.Millisecond)
			}
		}
		if lines < 10 || lines > 20 {
			t.Errorf("%d lines", lines)
		}
		if w.recently(conmon.LogDetached) {
			t.Error("another trouble is not logged")
		}
	})
}
