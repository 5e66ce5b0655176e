package main

import (
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/crius-run/crius/test/kit/claim"
)

func TestMain(m *testing.M) {
	actIfAsked()
	os.Exit(m.Run())
}

// isolated returns a shell script in place of a test program.
func isolated(t *testing.T, script string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", isolateRole, "/bin/sh", "-c", script)
	cmd.Env = append(os.Environ(), tmpVariable+"="+t.TempDir())
	return cmd
}

func TestIsolatedProgramsAreLookedAfter(t *testing.T) {
	for what, c := range map[string]struct {
		script string
		code   int
		says   string
	}{
		"exit code":             {"exit 3", 3, ""},
		"killed":                {"kill -9 $$", 1, "was killed: killed"},
		"nothing left":          {"sleep 1000 & kill $!; wait; echo fine", 0, "fine"},
		"orphans are reaped":    {"(sh -c 'exit 5' & echo $! >$TMPDIR/pid); while kill -0 $(cat $TMPDIR/pid); do :; done; rm $TMPDIR/pid", 0, ""},
		"a PID namespace":       {"test $$ -lt 10 && test -d /proc/$$", 0, ""},
		"signatures of its own": {"test $(stat -f -c %T /var/lib/containers) = tmpfs", 0, ""},
		"a process left":        {"sleep 1000 & echo $!", 1, `process`},
		"a mount left":          {"mkdir $TMPDIR/m && mount -t tmpfs tmpfs $TMPDIR/m", 1, "/m\n"},
		"a file left":           {"echo > $TMPDIR/forgotten", 1, "/forgotten"},
		"a failure with a file": {"echo > $TMPDIR/forgotten; exit 4", 4, "/forgotten"},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			out, err := isolated(t, c.script).CombinedOutput()
			code := 0
			var exit *exec.ExitError
			if errors.As(err, &exit) {
				code = exit.ExitCode()
			} else if err != nil {
				t.Fatal(err)
			}
			if code != c.code || !strings.Contains(string(out), c.says) {
				t.Errorf("exit code %d, want %d and %q in: %s", code, c.code, c.says, out)
			}
		})
	}
}

// Descendants of a test program have its standard output, which ends only when
// all of them have ended.
func TestKilledRunnerEndsEverything(t *testing.T) {
	cmd := isolated(t, "setsid sh -c 'trap : TERM HUP; while :; do sleep 1000; done' & echo started; wait")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, len("started\n"))
	if _, err := io.ReadFull(out, line); err != nil || !bytes.Equal(line, []byte("started\n")) {
		t.Fatalf("%q, %v", line, err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if rest, err := io.ReadAll(out); err != nil || len(rest) > 0 {
		t.Errorf("%q, %v", rest, err)
	}
	cmd.Wait()
}

// A frozen process of a cgroup v1 does not even receive its SIGKILL, and init's
// own end waits for it.
func TestFrozenProcessesEndToo(t *testing.T) {
	owned, err := claim.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := owned.Release(); err != nil {
			t.Error(err)
		}
	})
	freeze := "mkdir /sys/fs/cgroup/$0 && (sleep 1000 & echo $! >/sys/fs/cgroup/$0/cgroup.procs) && echo 1 >/sys/fs/cgroup/$0/cgroup.freeze"
	if _, err := os.Stat("/sys/fs/cgroup/freezer"); err == nil {
		freeze = "cd /sys/fs/cgroup/freezer && mkdir $0 && (sleep 1000 & echo $! >$0/cgroup.procs) && echo FROZEN >$0/freezer.state"
	}
	cmd := isolated(t, freeze)
	cmd.Args = append(cmd.Args, owned.ID)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || !strings.Contains(string(out), "process ") {
		t.Errorf("%v: %s", err, out)
	}
}
