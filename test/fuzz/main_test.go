package main

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func TestParseList(t *testing.T) {
	t.Parallel()
	const listing = "ok  \tm/none\t0.003s\nFuzzA\nFuzzB\nok  \tm/two\t0.004s\n?   \tm/empty\t[no test files]\nFuzzBoth\nok  \tm/last\t(cached)\n"
	for run, want := range map[string][]target{
		"":    {{pkg: "m/two", name: "FuzzA"}, {pkg: "m/two", name: "FuzzB"}, {pkg: "m/last", name: "FuzzBoth"}},
		"B":   {{pkg: "m/two", name: "FuzzB"}, {pkg: "m/last", name: "FuzzBoth"}},
		"A$":  {{pkg: "m/two", name: "FuzzA"}},
		"XYZ": nil,
	} {
		f := fuzzer{run: regexp.MustCompile(run)}
		if got := f.parseList(listing); !slices.Equal(got, want) {
			t.Errorf("%q: %+v", run, got)
		}
	}
}

func TestParseRun(t *testing.T) {
	t.Parallel()
	const running = "fuzz: elapsed: 0s, gathering baseline coverage: 4/4 completed, now fuzzing with 1 workers\n" +
		"fuzz: elapsed: 3s, execs: 911 (304/sec), new interesting: 24 (total: 28)\n" +
		"fuzz: elapsed: 5s, execs: 1677 (378/sec), new interesting: 36 (total: 40)\n"
	failed := errors.New("exit status 1")
	for output, c := range map[string]struct {
		err  error
		want target
	}{
		running + "PASS\n":     {nil, target{executions: "1677", interesting: "36", result: "ok"}},
		"PASS\n":               {nil, target{executions: "-", interesting: "-", result: "ok"}},
		"# m\nx.go:1: oops\n":  {failed, target{executions: "-", interesting: "-", result: "FAILED: exit status 1"}},
		running + "--- FAIL\n": {failed, target{executions: "1677", interesting: "36", result: "FAILED: exit status 1"}},
		running + "--- FAIL: FuzzA (60.11s)\n    context deadline exceeded\n": {failed, target{executions: "1677", interesting: "36", result: "ok"}},
		"failure while testing seed corpus entry: FuzzA/seed#3\n--- FAIL\n":   {failed, target{executions: "-", interesting: "-", result: "FAILED: seed FuzzA/seed#3"}},
		running + "    Failing input written to testdata/fuzz/FuzzA/b6d5\n": {failed,
			target{executions: "1677", interesting: "36", result: "FAILED: input in testdata/fuzz/FuzzA/b6d5 of the package"}},
	} {
		var got target
		if got.parseRun(output, c.err); got != c.want {
			t.Errorf("%q: %+v", output, got)
		}
	}
}

// A failing target does not keep the next one from running, and fails the run.
func TestFuzz(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for path, text := range map[string]string{
		"go.mod": "module sample\n\ngo 1.21\n",
		"p/p_test.go": "package p\nimport \"testing\"\n" +
			"func FuzzBad(f *testing.F) { f.Add(1); f.Fuzz(func(t *testing.T, n int) { t.Error(n) }) }\n" +
			"func FuzzGood(f *testing.F) { f.Add(1); f.Fuzz(func(*testing.T, int) {}) }\n",
	} {
		path = filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for run, want := range map[string]string{"Good": "", "Bad|Good": "1 of 2 fuzz targets failed", "None": "no fuzz target matches"} {
		var out strings.Builder
		f := fuzzer{time: "5x", run: regexp.MustCompile(run), dir: dir, out: &out}
		err := f.fuzz(t.Context(), []string{"./..."})
		if err == nil && want != "" || err != nil && err.Error() != want {
			t.Errorf("%s: %v, want %q", run, err, want)
		}
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		last := strings.Fields(lines[len(lines)-1])
		if run != "None" && (len(last) != 5 || last[1] != "FuzzGood" || last[4] != "ok") || strings.Contains(want, "failed") && !strings.Contains(out.String(), "FAILED: seed FuzzBad/seed#0") {
			t.Errorf("%s:\n%s", run, out.String())
		}
	}
}
