package main

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	idInText   = regexp.MustCompile(`\b(?:CVE-\d{4}-\d+|GO-\d{4}-\d+|GHSA(?:-[0-9a-z]{4}){3})\b`)
	testInText = regexp.MustCompile("`([a-z/-]+)` `(Test\\w+)`")
)

// documented reads the table of docs/security.md: the tests of each id. A row
// without a test, but with a reason, yields none.
func documented(t *testing.T) map[string][]string {
	t.Helper()
	text, err := os.ReadFile("../../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, found := strings.Cut(string(text), "\n## Known vulnerabilities\n")
	if !found {
		t.Fatal("docs/security.md has no table of vulnerabilities")
	}
	section, _, _ = strings.Cut(section, "\n## ")
	table := map[string][]string{}
	for line := range strings.Lines(section) {
		cells := strings.Split(line, "|")
		if len(cells) != 6 || !idInText.MatchString(cells[1]) {
			continue
		}
		tests := []string{}
		for _, match := range testInText.FindAllStringSubmatch(cells[4], -1) {
			tests = append(tests, match[1]+" "+match[2])
		}
		if len(tests) == 0 && !strings.HasPrefix(cells[4], " none: ") {
			t.Errorf("neither a test nor a reason why there is none: %s", line)
		}
		for _, id := range idInText.FindAllString(cells[1], -1) {
			if table[id] != nil {
				t.Errorf("%s has two rows", id)
			}
			table[id] = tests
		}
	}
	return table
}

// The table and the names of the tests agree in both directions: a row has the
// tests of its ids, and each of its ids has a test.
func TestTableHasTheTests(t *testing.T) {
	t.Parallel()
	tests, err := find("../..", nil)
	if err != nil {
		t.Fatal(err)
	}
	named := map[string][]string{}
	for _, test := range tests {
		for _, id := range test.ids {
			named[id] = append(named[id], test.dir+" "+test.name)
		}
	}
	table := documented(t)
	for id, tests := range table {
		for _, test := range tests {
			if !slices.Contains(slices.Concat(slices.Collect(maps.Values(named))...), test) {
				t.Errorf("%s: docs/security.md names %s, which there is not", id, test)
			}
		}
		if len(tests) > 0 && len(named[id]) == 0 {
			t.Errorf("%s: no test has its name", id)
		}
	}
	for id, tests := range named {
		if table[id] == nil {
			t.Errorf("%s: docs/security.md has no row, but there is %s", id, strings.Join(tests, ", "))
			continue
		}
		for _, test := range tests {
			if !slices.Contains(table[id], test) {
				t.Errorf("%s: docs/security.md does not name %s", id, test)
			}
		}
	}
	for _, test := range tests {
		if !slices.ContainsFunc(test.ids, func(id string) bool { return slices.Contains(table[id], test.dir+" "+test.name) }) {
			t.Errorf("no row names %s %s", test.dir, test.name)
		}
	}
}

func TestFindReadsNames(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"a/b/x_test.go": "package x\nfunc TestOne_CVE_2020_1_GO_2026_6597(t *testing.T) {}\nfunc TestTwo(t *testing.T) {}\nfunc FuzzX_CVE_2020_2(f *testing.F) {}\n",
		"a/y_test.go":   "//go:build special\n\npackage x\nfunc TestThree_GHSA_7ww5_4wqc_m92c(t *testing.T) {}\n",
		".z/z_test.go":  "package x\nfunc TestFour_CVE_2020_3(t *testing.T) {}\n",
	} {
		if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for tags, want := range map[string]string{
		"":        "a/b TestOne_CVE_2020_1_GO_2026_6597 CVE-2020-1 GO-2026-6597",
		"special": "a/b TestOne_CVE_2020_1_GO_2026_6597 CVE-2020-1 GO-2026-6597; a TestThree_GHSA_7ww5_4wqc_m92c GHSA-7ww5-4wqc-m92c",
	} {
		tests, err := find(dir, []string{tags})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, test := range tests {
			got = append(got, test.dir+" "+test.name+" "+strings.Join(test.ids, " "))
		}
		if text := strings.Join(got, "; "); text != want {
			t.Errorf("tags %q: %q, want %q", tags, text, want)
		}
	}
}

// The runner's output becomes rows; only passed and skipped tests are good.
func TestReport(t *testing.T) {
	t.Parallel()
	tests := []test{{"a/b", "TestOne_CVE_2020_1", []string{"CVE-2020-1"}}, {"a", "TestTwo_CVE_2020_2_CVE_2020_1", []string{"CVE-2020-2", "CVE-2020-1"}}}
	for what, c := range map[string]struct {
		printed string
		ok      bool
		first   string
	}{
		"all pass":  {"pass  " + module + "a/b TestOne_CVE_2020_1\npass  " + module + "a TestTwo_CVE_2020_2_CVE_2020_1\n", true, "pass"},
		"one skips": {"skip  " + module + "a/b TestOne_CVE_2020_1\npass  " + module + "a TestTwo_CVE_2020_2_CVE_2020_1\n", true, "pass"},
		"a subtest fails": {"FAIL  " + module + "a TestTwo_CVE_2020_2_CVE_2020_1/x\npass  " + module + "a TestTwo_CVE_2020_2_CVE_2020_1/y\n" +
			"pass  " + module + "a/b TestOne_CVE_2020_1\n", false, "FAIL"},
		"nothing ran": {"FAIL  " + module + "a build failed\n", false, "not run"},
	} {
		var copied, out strings.Builder
		results, err := collect(strings.NewReader(c.printed), &copied)
		if err != nil || copied.String() != c.printed {
			t.Errorf("%s: copied %q, %v", what, copied.String(), err)
		}
		if ok := report(&out, tests, results); ok != c.ok {
			t.Errorf("%s: %v\n%s", what, ok, out.String())
		}
		line, _, _ := strings.Cut(out.String(), "\n")
		if words := strings.Fields(line); words[0] != "CVE-2020-1" || !strings.HasPrefix(strings.Join(words[1:], " "), c.first+" a TestTwo") {
			t.Errorf("%s: the first row is %q", what, line)
		}
	}
}
