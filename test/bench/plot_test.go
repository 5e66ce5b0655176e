package main

import (
	"strings"
	"testing"
)

func TestPlot(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	c := example()
	c.line("none", nil, []float64{0}, []float64{0})
	c.plot(&out)
	full := strings.Repeat("█", plotWidth)
	want := "\n" +
		"up    floor  " + strings.Repeat("█", plotWidth/4) + strings.Repeat(" ", plotWidth*3/4) + " 2.00\n" +
		"      crius  " + strings.Repeat("█", plotWidth/2) + strings.Repeat(" ", plotWidth/2) + " 4.00\n" +
		"      peer   " + full + " 8.00\n" +
		"down  crius  " + full + " 3.00\n" +
		"      peer   " + strings.Repeat("█", 26) + "▋" + strings.Repeat(" ", plotWidth-27) + " 2.00\n" +
		"none  crius  " + strings.Repeat(" ", plotWidth) + " 0.00\n" +
		"      peer   " + strings.Repeat(" ", plotWidth) + " 0.00\n"
	if out.String() != want {
		t.Errorf("%s\nwant\n%s", out.String(), want)
	}
}

func TestATableOfOneIsNotPlotted(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	c := compare("", 95, "server")
	c.line("x", []float64{1})
	c.plot(&out)
	if out.Len() > 0 {
		t.Errorf("%q", out.String())
	}
}

func TestBar(t *testing.T) {
	t.Parallel()
	for part, want := range map[float64]string{0: "", 1: strings.Repeat("█", plotWidth), 1.0 / 8 / plotWidth: "▏", 15.0 / 8 / plotWidth: "█▉"} {
		if got := bar(part); got != want {
			t.Errorf("%v: %q, want %q", part, got, want)
		}
	}
}
