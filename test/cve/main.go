// Command cve runs the tests that are named after vulnerabilities, and prints a
// row for each vulnerability. `make cve` calls it:
//
//	cve [-tags TAGS]
//
// A test names its vulnerabilities at the end of its name:
// TestRotationFollowsNoLink_CVE_2025_0750. Those without a CVE have the id of
// another list, such as GO-2026-6597. docs/security.md says how crius is
// protected from each of them. The exit code is 1 if any test fails.
package main

import (
	"bufio"
	"cmp"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
)

func main() {
	tags := flag.String("tags", "", "build tags")
	flag.Parse()
	ok, err := run(*tags)
	if err != nil {
		fmt.Fprintln(os.Stderr, "cve:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

// run runs the tests and reports whether every one of them passes or is
// skipped.
func run(tags string) (bool, error) {
	tests, err := find(".", strings.Split(tags, ","))
	if err != nil {
		return false, err
	}
	var packages []string
	for _, t := range tests {
		packages = append(packages, module+t.dir)
	}
	slices.Sort(packages)
	argv := append([]string{"run", "./test/runner", "-v", "-tags", tags, "-run", pattern}, slices.Compact(packages)...)
	cmd := exec.Command("go", argv...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return false, err
	}
	results, readErr := collect(out, os.Stdout)
	waitErr := cmd.Wait()
	return report(os.Stdout, tests, results), cmp.Or(readErr, waitErr)
}

// Results of tests, from the best to the worst. A test without a result did not
// run.
const (
	passed = "pass"
	skip   = "skip"
	failed = "FAIL"
	notRun = "not run"
)

var resultLine = regexp.MustCompile(`^(pass|skip|FAIL) +` + regexp.QuoteMeta(module) + `(\S+) (Test[^/\s]+)`)

// collect copies the runner's output and returns the results by test. That of a
// test with subtests is the worst of them.
func collect(from io.Reader, to io.Writer) (map[string]string, error) {
	results := map[string]string{}
	lines := bufio.NewReader(from)
	for {
		line, err := lines.ReadString('\n')
		fmt.Fprint(to, line)
		if match := resultLine.FindStringSubmatch(line); match != nil {
			key := match[2] + " " + match[3]
			results[key] = worse(cmp.Or(results[key], passed), match[1])
		}
		if err == io.EOF {
			return results, nil
		}
		if err != nil {
			return results, err
		}
	}
}

func worse(a, b string) string {
	order := []string{passed, skip, failed, notRun}
	return order[max(slices.Index(order, a), slices.Index(order, b))]
}

// report prints a row for each vulnerability and test, and reports whether all
// have passed or were skipped.
func report(to io.Writer, tests []test, results map[string]string) bool {
	type row struct{ id, result, test string }
	var rows []row
	counts := map[string]int{}
	for _, t := range tests {
		result := cmp.Or(results[t.dir+" "+t.name], notRun)
		counts[result]++
		for _, id := range t.ids {
			rows = append(rows, row{id, result, t.dir + " " + t.name})
		}
	}
	slices.SortFunc(rows, func(a, b row) int { return cmp.Or(cmp.Compare(a.id, b.id), cmp.Compare(a.test, b.test)) })
	ids := 0
	for i, r := range rows {
		if i == 0 || rows[i-1].id != r.id {
			ids++
		}
		fmt.Fprintf(to, "%-20s %-8s %s\n", r.id, r.result, r.test)
	}
	fmt.Fprintf(to, "%d vulnerabilities, %d tests: %d passed, %d failed, %d skipped, %d not run\n",
		ids, len(tests), counts[passed], counts[failed], counts[skip], counts[notRun])
	return counts[failed]+counts[notRun] == 0
}
