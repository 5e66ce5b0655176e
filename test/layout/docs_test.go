package layout

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

var (
	decisionFile = regexp.MustCompile(`^(\d{4})-[a-z0-9-]+\.md$`)
	decisionRow  = regexp.MustCompile(`(?m)^\| \[(\d{4})\]\(([^)]+)\) \| [^|]+ \| ([^|]+) \|$`)
	status       = regexp.MustCompile(`^(?:stands|(?:amended|superseded) by (\d+(?:, \d+)*))$`)
)

// TestDecisionsAreListed compares docs/decisions/README.md with the pages beside it.
func TestDecisionsAreListed(t *testing.T) {
	dir := filepath.Join(root, "docs", "decisions")
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var pages []string
	for _, entry := range entries {
		if decisionFile.MatchString(entry.Name()) {
			pages = append(pages, entry.Name())
		} else if entry.Name() != "README.md" {
			t.Errorf("docs/decisions/%s: name it NNNN-topic.md", entry.Name())
		}
	}
	var listed []string
	for _, row := range decisionRow.FindAllStringSubmatch(read(t, "docs/decisions/README.md"), -1) {
		number, file := row[1], row[2]
		listed = append(listed, file)
		if !strings.HasPrefix(file, number+"-") {
			t.Errorf("%s is listed as %s", file, number)
		}
		later := status.FindStringSubmatch(row[3])
		if later == nil {
			t.Errorf("%s: its status is %q, want stands, amended by N or superseded by N", file, row[3])
			continue
		}
		for _, by := range strings.FieldsFunc(later[1], func(r rune) bool { return r == ',' || r == ' ' }) {
			n, _ := strconv.Atoi(by)
			if !slices.ContainsFunc(pages, func(page string) bool { return strings.HasPrefix(page, fmt.Sprintf("%04d-", n)) }) {
				t.Errorf("%s: there is no decision %s", file, by)
			}
		}
	}
	if !slices.Equal(listed, pages) {
		t.Errorf("docs/decisions/README.md lists\n%q, want one row per page, in order:\n%q", listed, pages)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestTablesAreWhole: an empty line ends a table, and the rows after it are shown as text.
func TestTablesAreWhole(t *testing.T) {
	t.Parallel()
	heading := regexp.MustCompile(`^\|[ :|-]+\|$`)
	sources(t, func(path, text string) {
		if !strings.HasSuffix(path, ".md") {
			return
		}
		lines := strings.Split(text, "\n")
		code, before := false, ""
		for i, line := range lines {
			code = code != strings.HasPrefix(line, "```")
			if !code && strings.HasPrefix(line, "|") && !strings.HasPrefix(before, "|") && (i+1 == len(lines) || !heading.MatchString(lines[i+1])) {
				t.Errorf("%s:%d: a row without a table: %.60s", path, i+1, line)
			}
			before = line
		}
	})
}
