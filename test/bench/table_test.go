package main

import (
	"strings"
	"testing"
)

func TestMedian(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		values []float64
		want   float64
	}{
		{nil, 0},
		{[]float64{3}, 3},
		{[]float64{9, 1, 2}, 2},
		{[]float64{4, 1, 3, 2}, 2.5},
	} {
		if got := median(test.values); got != test.want {
			t.Errorf("%v: %v, want %v", test.values, got, test.want)
		}
	}
}

func TestTable(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	tab := table{title: "A title", head: []string{"what", "one", "two"}}
	tab.add("é", "1", "22.5")
	tab.add("longer", "1000")
	tab.print(&out)
	const want = "\nA title\n\n" +
		"what      one    two\n" +
		"é           1   22.5\n" +
		"longer   1000\n"
	if out.String() != want {
		t.Errorf("%s\nwant\n%s", out.String(), want)
	}
}
