package critest

import (
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"
)

// Result is the outcome of the specs of one run.
type Result struct {
	passed                 []string
	failed, skipped, known []outcome
}

// outcome is a spec with the reason why it did not pass.
type outcome struct{ spec, reason string }

// add counts a spec. Another node, such as the set-up of the whole suite,
// counts only if it failed.
func (r *Result) add(spec specReport) {
	name := strings.Join(append(spec.ContainerHierarchyTexts, spec.LeafNodeText), " ")
	name = strings.TrimPrefix(strings.TrimSpace(name), "[k8s.io] ")
	if name == "" {
		name = spec.LeafNodeType
	}
	isSpec := spec.LeafNodeType == "It"
	switch spec.State {
	case "passed":
		if isSpec {
			r.passed = append(r.passed, name)
		}
	case "skipped", "pending":
		if isSpec {
			r.skipped = append(r.skipped, outcome{name, spec.Failure.Message})
		}
	default:
		at := spec.Failure.Location
		r.Fail(name, fmt.Sprintf("%s:%d: %s", filepath.Base(at.FileName), at.LineNumber, spec.Failure.Message))
	}
}

// Fail adds a failure outside of the specs, such as something left behind.
func (r *Result) Fail(spec, reason string) {
	r.failed = append(r.failed, outcome{spec, reason})
}

// Excuse takes the specs of reasons, by their names, for known to fail. A reason
// that does not hold is a failure itself: its spec has passed, or there is none of
// that name. One that has not run is left alone.
func (r *Result) Excuse(reasons map[string]string) {
	left := maps.Clone(reasons)
	r.failed = slices.DeleteFunc(r.failed, func(o outcome) bool {
		reason, known := left[o.spec]
		if known {
			r.known = append(r.known, outcome{o.spec, reason})
			delete(left, o.spec)
		}
		return known
	})
	for _, o := range r.skipped {
		delete(left, o.spec)
	}
	for spec, reason := range left {
		said := "there is no such spec, which is said to fail: "
		if slices.Contains(r.passed, spec) {
			said = "it has passed, and is said to fail: "
		}
		r.Fail(spec, said+reason)
	}
}

// Failed reports whether anything failed that is not known to fail.
func (r *Result) Failed() bool { return len(r.failed) > 0 }

// Skipped returns the names of the specs that did not run.
func (r *Result) Skipped() []string {
	var names []string
	for _, o := range sorted(r.skipped) {
		names = append(names, o.spec)
	}
	return names
}

// Print prints the counts, the reasons of the skipped specs, and all about the
// failed ones. The first line begins with the run's name.
func (r *Result) Print(out io.Writer, name string) {
	fmt.Fprintf(out, "\n%s: %d passed, %d failed, %d skipped", name, len(r.passed), len(r.failed), len(r.skipped))
	if len(r.known) > 0 {
		fmt.Fprintf(out, ", %d known to fail", len(r.known))
	}
	fmt.Fprintln(out)
	for _, o := range sorted(r.skipped) {
		reason := o.reason
		if reason == "" {
			reason = "not selected"
		}
		fmt.Fprintf(out, "  skipped: %s (%s)\n", o.spec, reason)
	}
	for _, o := range sorted(r.known) {
		fmt.Fprintf(out, "  failed:  %s\n           known: %s\n", o.spec, o.reason)
	}
	for _, o := range sorted(r.failed) {
		fmt.Fprintf(out, "  FAILED:  %s\n", o.spec)
		for line := range strings.Lines(brief(o.reason)) {
			fmt.Fprintf(out, "           %s\n", strings.TrimRight(line, "\n"))
		}
	}
}

// brief drops the Go value that gomega prints after the text of an error; the
// suite's log has it.
func brief(reason string) string {
	reason, _, _ = strings.Cut(reason, "\nUnexpected error:\n")
	return strings.TrimSpace(reason)
}

func sorted(all []outcome) []outcome {
	return slices.SortedFunc(slices.Values(all), func(a, b outcome) int { return strings.Compare(a.spec, b.spec) })
}
