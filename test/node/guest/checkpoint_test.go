package main

import (
	"strings"
	"testing"
)

func TestTestsAreReported(t *testing.T) {
	const said = `=== RUN   TestA
=== RUN   TestA/part
    --- PASS: TestA/part (0.10s)
--- PASS: TestA (79.03s)
    a_test.go:3: --- FAIL: TestB (1.00s)
--- FAIL: TestB_CVE_2026_1 (1.50s)
--- SKIP: TestC (0.00s)
FAIL
`
	var r report
	if n := r.tests(said); n != 3 {
		t.Errorf("%d tests", n)
	}
	var got []string
	for _, s := range r.specs {
		got = append(got, s.LeafNodeText+" "+s.State)
	}
	if want := "TestA (79.03s) passed, TestB_CVE_2026_1 (1.50s) failed, TestC (0.00s) failed"; strings.Join(got, ", ") != want {
		t.Errorf("reported are %q", got)
	}
}

// A gap in the log of a counter is an error, wherever the counter starts.
func TestCountsAreConsecutive(t *testing.T) {
	for numbers, fits := range map[string]bool{"5 6 7 8": true, "5 6 8 9": false, "5 6 6 7": false, "5 6 7 1": false, "x 1": false} {
		first, err := consecutive(strings.Fields(numbers))
		if (err == nil) != fits || fits && first != 5 {
			t.Errorf("%s: first %d, %v", numbers, first, err)
		}
	}
}
