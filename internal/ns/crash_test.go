package ns

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/crius-run/crius/test/kit/wait"
)

// Threads and files must be released. Not parallel: it counts those of the
// whole process.
func TestNoLeak(t *testing.T) {
	count := func(dir string) int {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	s := spec(t)
	s.UIDs, s.GIDs = []IDMap{{0, 100000, 65536}}, []IDMap{{0, 100000, 65536}}
	cycle := func() {
		set := create(t, s)
		Do(set.Net, func() error { return nil })
		remove(t, s)
	}
	cycle()
	files, threads := count("/proc/self/fd"), count("/proc/self/task")
	for range 30 {
		cycle()
	}
	wait.For(t, "the files to be closed", func() bool { return count("/proc/self/fd") <= files })
	const slack = 8 // the Go runtime's own
	wait.For(t, "the threads to end", func() bool { return count("/proc/self/task") <= threads+slack })
}

func crashSpec(dir string) Spec {
	ids := []IDMap{{0, 100000, 65536}}
	return Spec{Dir: dir, Name: "crashed", Net: true, IPC: true, UTS: true, Hostname: "h",
		UIDs: ids, GIDs: ids, Sysctls: map[string]string{"kernel.shmmni": "5"}}
}

// createForever is the victim in TestCrash.
func createForever(s Spec) {
	fmt.Println("ready")
	for mapped := true; ; mapped = !mapped {
		now := s
		if !mapped {
			now.UIDs, now.GIDs = nil, nil
		}
		if _, err := Create(now); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		if err := Remove(now); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
}

// A process killed at any instant of Create or Remove leaves nothing that
// Remove with the recorded Spec would not find: no file, no mount, no process.
func TestCrash(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	halves := 0
	for range 25 {
		victim := exec.Command("/proc/self/exe")
		victim.Env = append(os.Environ(), crashDir+"="+dir)
		victim.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		out, err := victim.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := victim.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		if !lines.Scan() || lines.Text() != "ready" {
			t.Fatalf("victim said %q", lines.Text())
		}
		time.Sleep(rand.N(15 * time.Millisecond))
		victim.Process.Kill()
		for lines.Scan() {
			t.Errorf("victim said %q", lines.Text())
		}
		victim.Wait()
		if len(remains(t, dir)) > 0 {
			halves++
		}
		remove(t, crashSpec(dir))
		if left := remains(t, dir); len(left) > 0 {
			t.Fatalf("left %q", left)
		}
		// The kernel kills the orphans by itself, but only after the parent is
		// gone.
		wait.For(t, "the victim's session to end", func() bool { return !hasSession(victim.Process.Pid) })
	}
	if halves == 0 {
		t.Error("no kill ever hit a half-made set: the test proves nothing")
	}
}

// hasSession reports whether a process of the session is alive.
func hasSession(id int) bool {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	return slices.ContainsFunc(stats, func(stat string) bool {
		text, _ := os.ReadFile(stat)
		fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
		return len(fields) > 3 && fields[3] == strconv.Itoa(id) && fields[0] != "Z"
	})
}
