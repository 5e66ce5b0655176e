package main

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// count runs real `go test -json` over a module of the given files and returns
// the exit code and the output.
func count(t *testing.T, files map[string]string, flags ...string) (int, string) {
	t.Helper()
	dir := t.TempDir()
	files["go.mod"] = "module sample\n\ngo 1.21\n"
	for path, text := range files {
		path = filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var out strings.Builder
	argv := append([]string{"-C", dir, "test", "-json"}, flags...)
	tally := newTally(&out)
	err := read(exec.CommandContext(t.Context(), "go", append(argv, "./...")...), tally)
	return tally.conclude(err), out.String()
}

// inTest returns a test file with these functions.
func inTest(name, body string) map[string]string {
	return map[string]string{name + "/x_test.go": "package " + name + "\nimport (\"os\"; \"testing\"; \"time\")\nvar _, _, _ = os.Exit, time.Now, testing.Short\n" + body}
}

func TestCounts(t *testing.T) {
	for what, c := range map[string]struct {
		body  string
		flags []string
		code  int
		last  string
		shown []string
	}{
		"plain": {
			"func TestA(t *testing.T) {}\nfunc TestB(t *testing.T) { t.Log(`quiet`) }", nil,
			0, "2 passed, 0 failed, 0 skipped", []string{"ok ", "2 passed sample/p"},
		},
		"no tests": {
			"", nil,
			0, "0 passed, 0 failed, 0 skipped", nil,
		},
		"subtests count, their parent does not": {
			"func TestA(t *testing.T) { t.Run(`x`, func(t *testing.T) { t.Run(`y`, func(t *testing.T) {}) }); t.Run(`z`, func(t *testing.T) {}) }", nil,
			0, "2 passed, 0 failed, 0 skipped", nil,
		},
		"a skip says why": {
			"func TestA(t *testing.T) { t.Skip(`no moon`) }", nil,
			0, "0 passed, 0 failed, 1 skipped", []string{"skip  sample/p TestA", "no moon"},
		},
		"a failure is shown and counted once": {
			"func TestA(t *testing.T) { t.Run(`x`, func(t *testing.T) { t.Error(`broken`) }) }\nfunc TestB(t *testing.T) {}", nil,
			1, "1 passed, 1 failed, 0 skipped", []string{"FAIL  sample/p TestA/x", "broken"},
		},
		"a parent that fails by itself": {
			"func TestA(t *testing.T) { t.Run(`x`, func(t *testing.T) {}); t.Error(`left over`) }", nil,
			1, "1 passed, 1 failed, 0 skipped", []string{"FAIL  sample/p TestA", "left over"},
		},
		"a race in the output of a test that passes": {
			"func TestA(t *testing.T) { println(`WARNING: DATA RACE\nRead at\n==================\nquiet`) }\nfunc TestB(t *testing.T) { t.Error(`race detected`) }", nil,
			1, "1 passed, 1 failed, 0 skipped", []string{"WARNING: DATA RACE\nRead at\n==================\n"},
		},
		"a panic": {
			"func TestA(t *testing.T) {}\nfunc TestB(t *testing.T) { panic(`boom`) }", nil,
			1, "1 passed, 1 failed, 0 skipped", []string{"panic: boom"},
		},
		"a time limit": {
			"func TestA(t *testing.T) { <-make(chan int) }", []string{"-timeout=1s"},
			1, "0 passed, 1 failed, 0 skipped", []string{"test timed out"},
		},
		"the test program exits": {
			"func TestA(t *testing.T) { os.Exit(3) }", nil,
			1, "0 passed, 1 failed, 0 skipped", nil,
		},
		"TestMain fails after its tests": {
			"func TestA(t *testing.T) {}\nfunc TestMain(m *testing.M) { m.Run(); println(`left over`); os.Exit(1) }", nil,
			1, "1 passed, 1 failed, 0 skipped", []string{"left over"},
		},
		"no build": {
			"func TestA(t *testing.T) { undefined() }", nil,
			1, "0 passed, 1 failed, 0 skipped", []string{"undefined: undefined"},
		},
		"no such flag": {
			"", []string{"-frobnicate"},
			1, "0 passed, 1 failed, 0 skipped", nil,
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			code, out := count(t, inTest("p", c.body), c.flags...)
			lines := strings.Split(strings.TrimSpace(out), "\n")
			if last := lines[len(lines)-1]; code != c.code || last != c.last {
				t.Errorf("exit code %d and %q, want %d and %q in:\n%s", code, last, c.code, c.last, out)
			}
			for _, want := range c.shown {
				if !strings.Contains(out, want) {
					t.Errorf("%q is not shown in:\n%s", want, out)
				}
			}
			if strings.Contains(out, "quiet") {
				t.Errorf("the output of a test that passed is shown:\n%s", out)
			}
		})
	}
}

func TestOtherLinesAreShown(t *testing.T) {
	var out strings.Builder
	if err := newTally(&out).read(strings.NewReader("plain text\n{\"Action\":\"start\",\"Package\":\"p\"}\n{\"no\":\"event\"}\nlast")); err != nil {
		t.Fatal(err)
	}
	if out.String() != "plain text\n{\"no\":\"event\"}\nlast" {
		t.Errorf("got %q", out.String())
	}
}

func TestNoSuchCommand(t *testing.T) {
	if err := read(exec.CommandContext(t.Context(), "/nonexistent/go"), newTally(io.Discard)); err == nil {
		t.Error("no error")
	}
}
