package main

import (
	"cmp"
	"encoding/xml"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
)

// A result is the outcome of the specs of one run.
type result struct {
	passed []spec
	failed []spec
	notRun []spec // selected by the focus
}

// spec is a spec with the reason why it did not pass, in one line and in full.
type spec struct{ name, reason, output string }

// testCase is the used part of a spec in ginkgo's JUnit report.
type testCase struct {
	Name    string `xml:"name,attr"`
	Status  string `xml:"status,attr"`
	Failure *cause `xml:"failure"`
	Error   *cause `xml:"error"`
	Skipped *cause `xml:"skipped"`
	Output  string `xml:"system-err"`
}

type cause struct {
	Message string `xml:"message,attr"`
	Text    string `xml:",chardata"`
}

// readReport counts the results in a JUnit report. A spec that failed because
// of an image that cannot be made here counts as not run.
func readReport(report io.Reader, missing []string) (*result, error) {
	var suites struct {
		Cases []testCase `xml:"testsuite>testcase"`
	}
	if err := xml.NewDecoder(report).Decode(&suites); err != nil {
		return nil, fmt.Errorf("the report of the tests: %w", err)
	}
	r := new(result)
	for _, c := range suites.Cases {
		r.add(c, missing)
	}
	byName := func(a, b spec) int { return cmp.Compare(a.name, b.name) }
	slices.SortFunc(r.passed, byName)
	slices.SortFunc(r.failed, byName)
	slices.SortFunc(r.notRun, byName)
	return r, nil
}

// notSelected is ginkgo's status of a spec that the focus does not select.
const notSelected = "skipped"

func (r *result) add(c testCase, missing []string) {
	name, isSpec := strings.CutPrefix(c.Name, "[It] ")
	failure := cmp.Or(c.Failure, c.Error)
	switch {
	case failure != nil:
		s := spec{name, brief(cmp.Or(failure.Message, failure.Text)), failure.Message + failure.Text}
		if image := unpulled(failure.Text+c.Output, missing); image != "" {
			s.reason = "there is no image " + image
			r.notRun = append(r.notRun, s)
			return
		}
		r.failed = append(r.failed, s)
	case !isSpec:
	case c.Skipped != nil:
		if c.Skipped.Message != notSelected {
			r.notRun = append(r.notRun, spec{name, brief(strings.TrimPrefix(c.Skipped.Message, "skipped - ")), ""})
		}
	case c.Status == "passed":
		r.passed = append(r.passed, spec{name: name})
	}
}

// fail adds a failure outside of the specs.
func (r *result) fail(what string, err error) {
	r.failed = append(r.failed, spec{what, err.Error(), err.Error()})
}

var pullFailed = regexp.MustCompile(`(?:Failed to pull image|Back-off pulling image) "([^"]+)"`)

// unpulled returns the first of the missing images that could not be pulled
// according to an output.
func unpulled(output string, missing []string) string {
	for _, match := range pullFailed.FindAllStringSubmatch(output, -1) {
		if slices.Contains(missing, match[1]) {
			return match[1]
		}
	}
	return ""
}

// brief returns the first informative line of a reason, truncated to a line's
// length.
func brief(reason string) string {
	for line := range strings.Lines(reason) {
		if line = strings.TrimSpace(line); line != "" {
			return line[:min(len(line), 300)]
		}
	}
	return ""
}

// print prints the counts, what has not run and why, and what has failed. It
// reports whether something failed that is not known to fail.
func (r *result) print(out io.Writer, runtime string) (unknown bool) {
	fmt.Fprintf(out, "\n%s: %d passed, %d failed, %d not run\n", runtime, len(r.passed), len(r.failed), len(r.notRun))
	for _, s := range r.notRun {
		fmt.Fprintf(out, "  not run: %s (%s)\n", s.name, s.reason)
	}
	for _, s := range r.failed {
		why := whyKnown(s, runtime)
		if why == "" {
			unknown = true
			fmt.Fprintf(out, "  FAILED:  %s\n           %s\n", s.name, s.reason)
			continue
		}
		fmt.Fprintf(out, "  failed:  %s\n           %s\n           known: %s\n", s.name, s.reason, why)
	}
	for _, s := range r.passed {
		if why := whyKnown(s, runtime); why != "" {
			fmt.Fprintf(out, "  passed:  %s, which is known to fail: %s\n", s.name, why)
		}
	}
	return unknown
}
