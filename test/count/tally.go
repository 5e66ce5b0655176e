package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// event is what `go test -json` says; see `go doc test2json`.
type event struct {
	Action  string
	Package string
	Test    string // empty: the package itself
	Elapsed float64
	Output  string
}

// tally counts tests.
type tally struct {
	out                     io.Writer
	passed, failed, skipped int
	packages                map[string]*packageTally
}

// packageTally is a package whose tests run.
type packageTally struct {
	passed, failed, skipped int
	tests                   map[string]*test // those under way; "" is the package
}

// test is a test under way.
type test struct {
	output      strings.Builder
	hasSubtests bool
	failedBelow bool // in a subtest, which has been counted
}

func newTally(out io.Writer) *tally {
	return &tally{out: out, packages: map[string]*packageTally{}}
}

// add takes one more event.
func (t *tally) add(e event) {
	if e.Package == "" { // of the build
		fmt.Fprint(t.out, e.Output)
		return
	}
	p := t.packages[e.Package]
	if p == nil {
		p = &packageTally{tests: map[string]*test{}}
		t.packages[e.Package] = p
	}
	current := p.test(e.Test)
	switch e.Action {
	case "output":
		current.output.WriteString(e.Output)
	case "pass", "fail", "skip":
		if e.Test == "" {
			t.endPackage(p, e)
			delete(t.packages, e.Package)
			return
		}
		t.endTest(p, e, current)
		delete(p.tests, e.Test)
	}
}

// test finds a test, or sees one for the first time.
func (p *packageTally) test(name string) *test {
	current := p.tests[name]
	if current == nil {
		current = &test{}
		p.tests[name] = current
		if parent, ok := parentOf(name); ok {
			p.test(parent).hasSubtests = true
		}
	}
	return current
}

func parentOf(name string) (string, bool) {
	slash := strings.LastIndexByte(name, '/')
	if slash < 0 {
		return "", false
	}
	return name[:slash], true
}

func (t *tally) endTest(p *packageTally, e event, ended *test) {
	switch {
	case e.Action == "fail":
		fmt.Fprintf(t.out, "FAIL  %s %s\n%s", e.Package, e.Test, ended.output.String())
		if parent, ok := parentOf(e.Test); ok {
			p.test(parent).failedBelow = true
		}
		if !ended.failedBelow {
			p.failed++
		}
	case ended.hasSubtests:
	case e.Action == "skip":
		fmt.Fprintf(t.out, "skip  %s %s\n%s", e.Package, e.Test, ended.output.String())
		p.skipped++
	default:
		p.passed++
	}
}

// endPackage adds a package up. A crash or a time limit ends it with tests
// under way: those have failed.
func (t *tally) endPackage(p *packageTally, e event) {
	if e.Action == "fail" {
		for _, name := range slices.Sorted(maps.Keys(p.tests)) {
			if name != "" && !p.tests[name].hasSubtests {
				fmt.Fprintf(t.out, "FAIL  %s %s did not end\n%s", e.Package, name, p.tests[name].output.String())
				p.failed++
			}
		}
		fmt.Fprint(t.out, p.tests[""].output.String())
		p.failed = max(p.failed, 1)
	}
	t.passed += p.passed
	t.failed += p.failed
	t.skipped += p.skipped
	word := map[string]string{"pass": "ok", "fail": "FAIL", "skip": "-"}[e.Action]
	fmt.Fprintf(t.out, "%-5s %7.1fs %4d passed %s\n", word, e.Elapsed, p.passed, e.Package)
}
