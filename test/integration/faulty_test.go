package integration

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/scene"
)

// failing is the program of test/failing.
var failing = sync.OnceValues(func() ([]byte, error) {
	path, err := tools.Failing(context.Background())
	if err != nil {
		return nil, err
	}
	return os.ReadFile(path)
})

// A faulty program runs the real one and misbehaves when told to.
type faulty struct{ dir string }

// install puts a faulty program called name into dir, in front of the real one.
func install(t *testing.T, dir, name, real string) *faulty {
	t.Helper()
	program, err := failing()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "faults"), 0o755); err != nil {
		t.Fatal(err)
	}
	scene.WriteProgram(t, filepath.Join(dir, name), program)
	if err := os.Symlink(real, filepath.Join(dir, "real")); err != nil {
		t.Fatal(err)
	}
	return &faulty{dir}
}

// cni makes the node's bridge plugin one that can be told to fail.
func (w *world) cni(t *testing.T) *faulty {
	t.Helper()
	return install(t, w.Path("cni", "bin"), "bridge", "/usr/lib/cni/bridge")
}

// does says what to do at a verb from now on; see test/failing for the words.
func (f *faulty) does(t *testing.T, verb, words string) {
	t.Helper()
	if err := os.Remove(filepath.Join(f.dir, "faults", verb+".calls")); err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	put(t, filepath.Join(f.dir, "faults", verb), words)
}

// heal ends all faults, but not calls that already hang.
func (f *faulty) heal(t *testing.T) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(f.dir, "faults", "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if err := os.Remove(file); err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
	}
}

// kill ends the program wherever it hangs.
func (f *faulty) kill(t *testing.T) {
	t.Helper()
	links, err := filepath.Glob("/proc/[0-9]*/exe")
	must(t, err)
	for _, link := range links {
		if program, _ := os.Readlink(link); filepath.Dir(program) != f.dir {
			continue
		}
		pid, err := strconv.Atoi(strings.Split(link, "/")[2])
		must(t, err)
		if err := unix.Kill(pid, unix.SIGKILL); err != nil && err != unix.ESRCH {
			t.Fatal(err)
		}
	}
}

// calls counts the journal's lines with this verb and outcome, by id.
func (f *faulty) calls(t *testing.T, verb, outcome string) map[string]int {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(f.dir, "journal"))
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	out := map[string]int{}
	for line := range strings.Lines(string(data)) {
		words := strings.SplitN(strings.TrimSpace(line), " ", 3)
		if len(words) == 3 && words[0] == verb && words[2] == outcome {
			out[words[1]]++
		}
	}
	return out
}
