package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// event is an event of `go test -json`; see `go doc test2json`.
type event struct {
	Action  string
	Package string
	Test    string // empty: the package itself
	Elapsed float64
	Output  string
}

// tally counts tests. Several commands may feed it at once.
type tally struct {
	mu                      sync.Mutex
	out                     io.Writer
	verbose                 bool // a line for each test that passed
	passed, failed, skipped int
	packages                map[string]*packageTally
	failures                []failure
	crashes                 []crash
	took                    map[string]float64 // seconds by package, or package and test
	cpu                     map[string]string  // seconds of CPU by package
	interrupted             bool               // later failures come from the interrupt
}

// failure is a failed test, or a package that failed outside of its tests.
type failure struct{ pkg, test, output string }

// crash is a package that a crash of the race detector has ended, with what was
// counted for it.
type crash struct {
	pkg                     string
	passed, failed, skipped int
}

// packageTally is a package whose tests are running.
type packageTally struct {
	passed, failed, skipped int
	tests                   map[string]*test // those under way; "" is the package
	races                   strings.Builder  // output of the race detector
	inRace                  bool             // it is not done yet
}

// test is a test under way.
type test struct {
	output      strings.Builder
	hasSubtests bool
	failedBelow bool // in a subtest, which has been counted
}

func newTally(out io.Writer) *tally {
	return &tally{out: out, packages: map[string]*packageTally{}, took: map[string]float64{}, cpu: map[string]string{}}
}

// interrupt makes tests that end from now on not count.
func (t *tally) interrupt() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.interrupted = true
}

// show prints a line that is not an event.
func (t *tally) show(text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	fmt.Fprint(t.out, text)
}

// failedCount returns how many tests have failed so far.
func (t *tally) failedCount() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.failed
}

// add takes one more event.
func (t *tally) add(e event) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.interrupted {
		return
	}
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
		if used, ok := strings.CutPrefix(e.Output, cpuLine); ok && e.Test == "" {
			t.cpu[e.Package] = strings.TrimSpace(used)
			return
		}
		current.output.WriteString(e.Output)
		p.keepRace(e.Output)
	case "pass", "fail", "skip":
		t.took[strings.TrimSpace(e.Package+" "+e.Test)] = e.Elapsed
		if e.Test == "" {
			t.endPackage(p, e)
			delete(t.packages, e.Package)
			return
		}
		t.endTest(p, e, current)
		delete(p.tests, e.Test)
	}
}

// keepRace keeps a line if it is the race detector's. The test in whose output
// it stands may have passed: any test that was running then may be at fault,
// and others fail.
func (p *packageTally) keepRace(line string) {
	p.inRace = p.inRace || line == "WARNING: DATA RACE\n"
	if p.inRace {
		p.races.WriteString(line)
		p.inRace = line != "==================\n"
	}
}

// test returns the entry of a test, new if necessary.
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
	if e.Action == "pass" && t.verbose {
		fmt.Fprintf(t.out, "pass  %s %s\n", e.Package, e.Test)
	}
	switch {
	case e.Action == "fail":
		fmt.Fprintf(t.out, "FAIL  %s %s\n%s", e.Package, e.Test, ended.output.String())
		if parent, ok := parentOf(e.Test); ok {
			p.test(parent).failedBelow = true
		}
		if !ended.failedBelow {
			p.failed++
			t.failures = append(t.failures, failure{e.Package, e.Test, ended.output.String()})
		}
	case ended.hasSubtests:
	case e.Action == "skip":
		fmt.Fprintf(t.out, "skip  %s %s\n%s", e.Package, e.Test, ended.output.String())
		p.skipped++
	default:
		p.passed++
	}
}

// endPackage evaluates a package. If a crash or a time limit has ended it,
// tests under way count as failed.
func (t *tally) endPackage(p *packageTally, e event) {
	known := len(t.failures)
	crashed := e.Action == "fail" && p.failed == 0 && p.crashed()
	if e.Action == "fail" {
		for _, name := range slices.Sorted(maps.Keys(p.tests)) {
			if name != "" && !p.tests[name].hasSubtests {
				output := p.tests[name].output.String()
				fmt.Fprintf(t.out, "FAIL  %s %s did not end\n%s", e.Package, name, output)
				p.failed++
				t.failures = append(t.failures, failure{e.Package, name, output})
			}
		}
		output := p.tests[""].output.String()
		fmt.Fprint(t.out, output, p.races.String())
		if p.failed == 0 {
			p.failed = 1
			t.failures = append(t.failures, failure{pkg: e.Package, output: output})
		}
	}
	if crashed {
		t.failures = t.failures[:known]
		t.crashes = append(t.crashes, crash{e.Package, p.passed, p.failed, p.skipped})
	}
	t.passed += p.passed
	t.failed += p.failed
	t.skipped += p.skipped
	word := map[string]string{"pass": "ok", "fail": "FAIL", "skip": "-"}[e.Action]
	fmt.Fprintf(t.out, "%-5s %7.1fs %4d passed %s (CPU %ss)\n", word, e.Elapsed, p.passed, e.Package, cmp.Or(t.cpu[e.Package], "?"))
}

// detectorCrash matches Go's output when its race detector, whose code is not
// Go, crashes while a timer of testing/synctest runs:
// https://go.dev/issue/78156.
var detectorCrash = regexp.MustCompile(`(?m)^SIGSEGV: segmentation violation\n(?:.*\n)+?goroutine 0 .*\[idle, synctest bubble \d+\]:\nruntime: g 0 .*: unknown pc`)

// crashed reports whether the race detector has ended the package.
func (p *packageTally) crashed() bool {
	for _, test := range p.tests {
		if detectorCrash.MatchString(test.output.String()) {
			return true
		}
	}
	return false
}

// conclude prints the closing lines and returns the exit code. An error is one
// more failure.
func (t *tally) conclude(err error) int {
	if err != nil {
		t.failed++
		fmt.Fprintln(t.out, "FAIL ", err)
	}
	t.slowest(10)
	fmt.Fprintf(t.out, "%d passed, %d failed, %d skipped\n", t.passed, t.failed, t.skipped)
	if t.failed > 0 {
		return 1
	}
	return 0
}

// slowest prints the packages and the tests that took longest, with subtests
// separate from their parents.
func (t *tally) slowest(most int) {
	names := slices.SortedFunc(maps.Keys(t.took), func(a, b string) int { return cmp.Compare(t.took[b], t.took[a]) })
	isTest := func(name string) bool { return strings.Contains(name, " ") }
	for _, kind := range []struct {
		title string
		tests bool
	}{{"packages", false}, {"tests", true}} {
		these := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return isTest(name) != kind.tests })
		if len(these) == 0 {
			continue
		}
		fmt.Fprintf(t.out, "slowest %s:\n", kind.title)
		for _, name := range these[:min(most, len(these))] {
			fmt.Fprintf(t.out, "%7.1fs %s\n", t.took[name], strings.TrimPrefix(name, module))
		}
	}
}
