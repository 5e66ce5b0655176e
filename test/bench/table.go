package main

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// table is the result of a row: a title, column heads and lines of cells; the
// first cell is a name and the others are numbers.
type table struct {
	title string
	head  []string
	lines [][]string
	bars  []int // columns that a plot shows side by side
}

func (t *table) add(cells ...string) { t.lines = append(t.lines, cells) }

func (t *table) print(w io.Writer) {
	width := make([]int, len(t.head))
	all := append([][]string{t.head}, t.lines...)
	for _, cells := range all {
		for i, cell := range cells {
			width[i] = max(width[i], utf8.RuneCountInString(cell))
		}
	}
	fmt.Fprintf(w, "\n%s\n\n", t.title)
	for _, cells := range all {
		var line strings.Builder
		for i, cell := range cells {
			pad := strings.Repeat(" ", width[i]-utf8.RuneCountInString(cell))
			if i == 0 {
				line.WriteString(cell + pad)
			} else {
				line.WriteString("   " + pad + cell)
			}
		}
		fmt.Fprintln(w, strings.TrimRight(line.String(), " "))
	}
}

// markdown writes the table for a page.
func (t *table) markdown(w io.Writer) {
	fmt.Fprintf(w, "\n**%s**\n\n", t.title)
	for i, cells := range slices.Insert(slices.Clone(t.lines), 0, t.head) {
		cells = append(slices.Clone(cells), make([]string, len(t.head)-len(cells))...)
		fmt.Fprintf(w, "| %s |\n", strings.Join(cells, " | "))
		if i == 0 {
			fmt.Fprintf(w, "|---|%s\n", strings.Repeat("--:|", len(t.head)-1))
		}
	}
}

// MarshalJSON encodes cells as numbers, and empty ones as null.
func (t *table) MarshalJSON() ([]byte, error) {
	rows := make([][]any, len(t.lines))
	for i, cells := range t.lines {
		for j, cell := range cells {
			_, err := strconv.ParseFloat(cell, 64)
			switch {
			case j > 0 && cell == "":
				rows[i] = append(rows[i], nil)
			case j > 0 && err == nil:
				rows[i] = append(rows[i], json.Number(cell))
			default:
				rows[i] = append(rows[i], cell)
			}
		}
	}
	return json.Marshal(map[string]any{"title": t.title, "columns": t.head, "rows": rows})
}

// comparison is a table of the cost of the same work for crius and others.
type comparison struct {
	table
	names []string
	tail  int // the percentile shown besides the median
}

// crius is the name that is compared with every other one.
const crius = "crius"

// compare begins a comparison; without a tail there are only medians.
func compare(title string, tail int, names ...string) *comparison {
	c := &comparison{table: table{title: title, head: []string{""}}, names: names, tail: tail}
	for _, name := range names {
		c.bars = append(c.bars, len(c.head))
		c.head = append(c.head, name)
		if tail > 0 {
			c.head = append(c.head, fmt.Sprintf("p%d", tail))
		}
	}
	for _, name := range names {
		if name != crius && slices.Contains(names, crius) {
			c.head = append(c.head, crius+"/"+name)
		}
	}
	return c
}

// line adds the median and the tail of each sample; a single number is printed
// as it is, and a missing sample leaves its cells empty.
func (c *comparison) line(name string, samples ...[]float64) {
	cells := []string{name}
	for _, sample := range samples {
		value, tail := "", ""
		if len(sample) > 0 {
			value = number(median(sample))
		}
		if len(sample) > 1 {
			tail = number(percentile(sample, c.tail))
		}
		cells = append(cells, value)
		if c.tail > 0 {
			cells = append(cells, tail)
		}
	}
	if us := slices.Index(c.names, crius); us >= 0 {
		for i, sample := range samples {
			if i == us {
				continue
			}
			ratio := ""
			if median(sample) > 0 && len(samples[us]) > 0 {
				ratio = fmt.Sprintf("%.2f", median(samples[us])/median(sample))
			}
			cells = append(cells, ratio)
		}
	}
	c.add(cells...)
}

// number formats three digits, or all digits before the point.
func number(v float64) string {
	switch {
	case v < 9.995:
		return fmt.Sprintf("%.2f", v)
	case v < 99.95:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.0f", v)
}

// percentile returns the smallest value that p percent of the values do not
// exceed.
func percentile(values []float64, p int) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	return sorted[max(0, (len(sorted)*p+99)/100-1)]
}

// median returns, for an even number, the mean of the two in the middle.
func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	half := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[half]
	}
	return (sorted[half-1] + sorted[half]) / 2
}
