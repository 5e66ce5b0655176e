package main

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode/utf8"
)

// plotWidth is the length of the longest bar of a line in characters.
const plotWidth = 40

// plot draws the lines of a comparison as bars. Each line has its own scale,
// because one may be milliseconds and the next pods per second.
func (t *table) plot(w io.Writer) {
	if len(t.bars) < 2 {
		return
	}
	names, labels := 0, 0
	for _, cells := range t.lines {
		names = max(names, utf8.RuneCountInString(cells[0]))
	}
	for _, column := range t.bars {
		labels = max(labels, utf8.RuneCountInString(t.head[column]))
	}
	fmt.Fprintln(w)
	for _, cells := range t.lines {
		longest := 0.0
		for _, column := range t.bars {
			longest = max(longest, value(cells, column))
		}
		name := cells[0]
		for _, column := range t.bars {
			if cells[column] == "" {
				continue
			}
			length := 0.0
			if longest > 0 {
				length = value(cells, column) / longest
			}
			fmt.Fprintf(w, "%-*s  %-*s  %-*s %s\n", names, name, labels, t.head[column], plotWidth, bar(length), cells[column])
			name = ""
		}
	}
}

func value(cells []string, column int) float64 { return parse(cells[column]) }

// parse returns the number in a cell; 0: there is none.
func parse(cell string) float64 {
	v, err := strconv.ParseFloat(cell, 64)
	if err != nil {
		return 0
	}
	return v
}

// bar returns a bar of that part of plotWidth, to an eighth of a character.
func bar(part float64) string {
	eighths := int(part*plotWidth*8 + 0.5)
	last := ""
	if rest := eighths % 8; rest > 0 {
		last = string([]rune("▏▎▍▌▋▊▉")[rest-1])
	}
	return strings.Repeat("█", eighths/8) + last
}
