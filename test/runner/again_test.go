package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// suiteOf is a suite on a module of one package.
func suiteOf(t *testing.T, body string) *suite {
	t.Helper()
	dir := t.TempDir()
	for path, text := range map[string]string{
		"go.mod":      "module sample\n\ngo 1.21\n",
		"p/p_test.go": "package p\nimport (\"os\"; \"testing\")\n" + body,
	} {
		path = filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return &suite{dir: dir, tmp: t.TempDir(), patterns: []string{"./..."}}
}

// onceBroken fails the first time that it runs.
const onceBroken = "func TestOnce(t *testing.T) { t.Run(`a b`, func(t *testing.T) {" +
	" if os.Mkdir(`seen`, 0o755) == nil { t.Error(`the first time`) } }) }\n"

// detectorCrashes prints Go's output when the race detector crashes, the first
// time.
const detectorCrashes = "func TestA(t *testing.T) {}\nfunc TestCrash(t *testing.T) { if os.Mkdir(`seen`, 0o755) == nil { crash() } }\n" +
	"func crash() { println(`SIGSEGV: segmentation violation\nPC=0x1bf8610 m=0 sigcode=1 addr=0x7f262cb00000\n\n" +
	"goroutine 0 gp=0x2d28e60 m=0 mp=0x2d2aa00 [idle, synctest bubble 8]:\nruntime: g 0 gp=0x2d28e60: unknown pc 0x1bf8610`); os.Exit(2) }\n"

func TestFailuresRunAgain(t *testing.T) {
	t.Parallel()
	for what, c := range map[string]struct {
		body, forgiven string
		code           int
		last, says     string
	}{
		"a flaky test fails": {
			onceBroken, "",
			1, "0 passed, 1 failed, 0 skipped", "flaky: sample/p TestOnce/a_b passes 3 times of 3, alone",
		},
		"a flaky test that is known": {
			onceBroken, "# comment\nsample/p TestOnce/a_b issue 7\n",
			0, "1 passed, 0 failed, 0 skipped", "forgives: issue 7",
		},
		"a broken test": {
			"func TestA(t *testing.T) { _ = os.Args; t.Error(`always`) }", "sample/p TestA nonsense",
			1, "0 passed, 1 failed, 0 skipped", "failed again, alone: sample/p TestA (3 of 3)",
		},
		"the race detector crashes": {
			detectorCrashes, "",
			0, "2 passed, 0 failed, 0 skipped", "again: sample/p, in which the race detector itself crashed",
		},
		"the race detector crashes twice": {
			detectorCrashes + "func init() { os.Remove(`seen`) }\n", "",
			1, "1 passed, 1 failed, 0 skipped", "again: sample/p, in which the race detector itself crashed",
		},
		"a test fails before the race detector crashes": {
			"func TestA0(t *testing.T) { t.Error(`broken`) }\n" + detectorCrashes, "",
			1, "1 passed, 2 failed, 0 skipped", "failed again, alone: sample/p TestA0 (3 of 3)",
		},
		"nothing failed": {
			"func TestA(t *testing.T) { _ = os.Args }", "",
			0, "1 passed, 0 failed, 0 skipped", "slowest tests:",
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := suiteOf(t, c.body)
			s.forgiven = c.forgiven
			var out strings.Builder
			tally := newTally(&out)
			code := tally.conclude(s.test(t.Context(), tally))
			lines := strings.Split(strings.TrimSpace(out.String()), "\n")
			if last := lines[len(lines)-1]; code != c.code || last != c.last || !strings.Contains(out.String(), c.says) {
				t.Errorf("exit code %d, want %d, %q at the end and %q in:\n%s", code, c.code, c.last, c.says, out.String())
			}
		})
	}
}

func TestExactly(t *testing.T) {
	if got := exactly("TestA/b.c/d"); got != `^TestA$/^b\.c$/^d$` {
		t.Error(got)
	}
}
