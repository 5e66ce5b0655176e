package main

import (
	"encoding/json"
	"slices"
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

func TestPercentile(t *testing.T) {
	t.Parallel()
	hundred := make([]float64, 100)
	for i := range hundred {
		hundred[i] = float64(100 - i)
	}
	for _, test := range []struct {
		values []float64
		p      int
		want   float64
	}{
		{nil, 95, 0},
		{[]float64{7}, 95, 7},
		{[]float64{2, 1}, 50, 1},
		{[]float64{2, 1}, 51, 2},
		{hundred, 95, 95},
		{hundred, 99, 99},
		{hundred, 100, 100},
		{hundred, 0, 1},
	} {
		if got := percentile(test.values, test.p); got != test.want {
			t.Errorf("p%d of %d values: %v, want %v", test.p, len(test.values), got, test.want)
		}
	}
}

func TestNumber(t *testing.T) {
	t.Parallel()
	for v, want := range map[float64]string{
		0: "0.00", 0.004: "0.00", 9.994: "9.99", 9.996: "10.0", 99.94: "99.9", 99.96: "100", 12345.6: "12346",
	} {
		if got := number(v); got != want {
			t.Errorf("%v is %s, want %s", v, got, want)
		}
	}
}

// example has samples, single numbers, and a target without any.
func example() *comparison {
	c := compare("A title", 95, "floor", "crius", "peer")
	c.line("up", []float64{2, 1, 3}, []float64{4}, []float64{5, 16, 8})
	c.line("down", nil, []float64{3}, []float64{2})
	return c
}

func TestComparison(t *testing.T) {
	t.Parallel()
	c := example()
	if want := []string{"", "floor", "p95", "crius", "p95", "peer", "p95", "crius/floor", "crius/peer"}; !slices.Equal(c.head, want) {
		t.Errorf("head %q, want %q", c.head, want)
	}
	for i, want := range [][]string{
		{"up", "2.00", "3.00", "4.00", "", "8.00", "16.0", "2.00", "0.50"},
		{"down", "", "", "3.00", "", "2.00", "", "", "1.50"},
	} {
		if !slices.Equal(c.lines[i], want) {
			t.Errorf("%q, want %q", c.lines[i], want)
		}
	}
	short := compare("", 0, "one")
	short.line("x", []float64{1, 2})
	if !slices.Equal(short.head, []string{"", "one"}) || !slices.Equal(short.lines[0], []string{"x", "1.50"}) {
		t.Errorf("%q %q", short.head, short.lines)
	}
}

func TestTableAsJSON(t *testing.T) {
	t.Parallel()
	tab := table{title: "T", head: []string{"", "a", "b", "c"}}
	tab.add("1", "2.50", "", "none")
	got, err := json.Marshal(&tab)
	const want = `{"columns":["","a","b","c"],"rows":[["1",2.50,null,"none"]],"title":"T"}`
	if err != nil || string(got) != want {
		t.Errorf("%s, %v\nwant\n%s", got, err, want)
	}
}

func TestTableInMarkdown(t *testing.T) {
	t.Parallel()
	tab := table{title: "T", head: []string{"", "a", "b"}}
	tab.add("x", "1", "2")
	tab.add("y", "3")
	var out strings.Builder
	tab.markdown(&out)
	const want = "\n**T**\n\n|  | a | b |\n|---|--:|--:|\n| x | 1 | 2 |\n| y | 3 |  |\n"
	if out.String() != want {
		t.Errorf("%s\nwant\n%s", out.String(), want)
	}
}
