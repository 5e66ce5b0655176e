package main

import (
	"bytes"
	"context"
	_ "embed"
	"fmt"
	"io"
	"regexp"
	"strings"
)

// times is how often a failed test runs again.
const times = 3

// again runs failed tests again, alone. A test that then passes every time
// failed because of concurrent tests, or by chance: it is flaky. It
// nevertheless counts as failed, unless flaky.txt names it.
func (s *suite) again(ctx context.Context, t *tally) error {
	if err := s.afterCrashes(ctx, t); err != nil {
		return err
	}
	for _, f := range t.failures {
		if f.test == "" || ctx.Err() != nil {
			continue
		}
		var output bytes.Buffer
		second := newTally(io.MultiWriter(&output))
		for range times {
			if err := s.goTest(ctx, second, s.raced(f.pkg), 1, exactly(f.test), []string{f.pkg}); err != nil {
				return err
			}
		}
		if second.failed > 0 || second.passed == 0 {
			fmt.Fprintf(t.out, "failed again, alone: %s %s (%d of %d)\n%s", f.pkg, f.test, second.failed, times, output.String())
			continue
		}
		fmt.Fprintf(t.out, "flaky: %s %s passes %d times of %d, alone; it failed with\n%s", f.pkg, f.test, times, times, f.output)
		if reason, known := s.forgives(f); known {
			fmt.Fprintf(t.out, "which test/runner/flaky.txt forgives: %s\n", reason)
			t.failed--
			t.passed++
		}
	}
	return nil
}

// afterCrashes reruns packages that a crash of the race detector has ended,
// once: most of their tests have not been run, and those that were running are
// not at fault.
func (s *suite) afterCrashes(ctx context.Context, t *tally) error {
	for _, c := range t.crashes { // not of later ones
		fmt.Fprintf(t.out, "again: %s, in which the race detector itself crashed (https://go.dev/issue/78156)\n", c.pkg)
		t.passed, t.failed, t.skipped = t.passed-c.passed, t.failed-c.failed, t.skipped-c.skipped
		if err := s.goTest(ctx, t, s.raced(c.pkg), 1, s.run, []string{c.pkg}); err != nil {
			return err
		}
	}
	return nil
}

// exactly returns a -run pattern for one test or subtest.
func exactly(test string) string {
	parts := strings.Split(test, "/")
	for i, part := range parts {
		parts[i] = "^" + regexp.QuoteMeta(part) + "$"
	}
	return strings.Join(parts, "/")
}

//go:embed flaky.txt
var flakyTests string

// forgives looks up a test in flaky.txt, whose lines are PACKAGE TEST REASON.
func (s *suite) forgives(f failure) (reason string, known bool) {
	for line := range strings.Lines(s.forgiven) {
		words := strings.SplitN(strings.TrimSpace(line), " ", 3)
		if len(words) == 3 && words[0] == strings.TrimPrefix(f.pkg, module) && words[1] == f.test {
			return words[2], true
		}
	}
	return "", false
}
