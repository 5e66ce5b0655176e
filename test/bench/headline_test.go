package main

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// recorded is a run that has what the headlines need, and no more.
func recorded() *report {
	r := &report{Date: "2026-01-02", Command: "make bench", Machine: [][2]string{{"kernel", "Linux 6.18"}}}
	for _, h := range headlines {
		row := &result{Name: h.picks[0].row}
		for i, p := range h.picks {
			c := compare(p.table+" and so on", 95, "floor", "crius", "containerd")
			c.line("another", []float64{900}, []float64{900}, []float64{900})
			c.line(p.line, []float64{10}, []float64{20 + float64(i)}, []float64{40})
			row.Tables = append(row.Tables, &c.table)
		}
		r.Rows = append(r.Rows, row)
	}
	return r
}

func TestShortPage(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	page, raw := filepath.Join(dir, "performance.md"), filepath.Join(dir, "performance", "run.md")
	if err := os.Mkdir(filepath.Dir(raw), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := recorded().write(page, raw, ""); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"(performance/run.md)", "![A pod is up](performance/pods.svg)", "| ms | floor | crius | containerd | crius/containerd |",
		"| crun, 8 at once | 10.0 | 23.0 | 40.0 | 0.57 |", "| kernel | Linux 6.18 |", "2026-01-02",
	} {
		if !strings.Contains(string(text), want) {
			t.Errorf("%q is not in\n%s", want, text)
		}
	}
	if lines := strings.Count(string(text), "\n"); lines > 125 {
		t.Errorf("the page has %d lines", lines)
	}
	for _, h := range headlines {
		drawn, err := os.ReadFile(filepath.Join(dir, "performance", h.name+".svg"))
		if err != nil {
			t.Fatal(err)
		}
		wellFormed(t, string(drawn))
		for _, p := range h.picks {
			if !strings.Contains(string(drawn), ">"+p.label+"<") {
				t.Errorf("%s is not in %s", p.label, drawn)
			}
		}
	}
	if text, err := os.ReadFile(raw); err != nil || !strings.Contains(string(text), "| another |") {
		t.Errorf("%v\n%s", err, text)
	}
}

// A run that lacks a headline keeps its tables, and reports what is missing.
func TestPageLacksAHeadline(t *testing.T) {
	t.Parallel()
	r, dir := recorded(), t.TempDir()
	r.Rows = slices.DeleteFunc(r.Rows, func(row *result) bool { return row.Name == "pull" })
	err := r.write(filepath.Join(dir, "page.md"), filepath.Join(dir, "run.md"), filepath.Join(dir, "run.json"))
	if err == nil || !strings.Contains(err.Error(), `row pull has no line "nothing of it there"`) {
		t.Error(err)
	}
	for _, name := range []string{"run.md", "run.json"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "page.md")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("there is half a page: %v", err)
	}
}

// The run in the documents has the lines that the headlines show.
func TestHeadlinesAreInTheRun(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/performance/run.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range headlines {
		for _, p := range h.picks {
			_, after, found := strings.Cut(string(text), "\n**"+p.table)
			if line := strings.Index(after, "\n| "+p.line+" | "); !found || line < 0 || strings.Contains(after[:line], "\n**") {
				t.Errorf("no line %q in a table %q", p.line, p.table)
			}
		}
	}
}

func TestRunsForThePage(t *testing.T) {
	if err := canShow(rows); err != nil {
		t.Error(err)
	}
	some := slices.DeleteFunc(slices.Clone(rows), func(r row) bool { return r.name == "lists" })
	if err := canShow(some); err == nil || !strings.Contains(err.Error(), "lists") {
		t.Error(err)
	}
	t.Setenv("PODS", "5")
	if err := canShow(rows); err == nil || !strings.Contains(err.Error(), "PODS") {
		t.Error(err)
	}
}

func TestPlotAsSVG(t *testing.T) {
	t.Parallel()
	p := plot{"a < b", "ms", []group{
		{"one & two", []figure{{"floor", ""}, {"crius", "50.0"}, {"containerd", "100"}}, "0.50"},
		{"none", []figure{{"crius", "0.00"}}, ""},
	}}
	drawn := p.svg()
	wellFormed(t, drawn)
	for _, want := range []string{"a &lt; b: ms", "one &amp; two", `class="crius" x="170" y="82" width="230.0"`, `class="containerd" x="170" y="102" width="460.0"`, ">0.00<", "prefers-color-scheme: dark"} {
		if !strings.Contains(drawn, want) {
			t.Errorf("%q is not in\n%s", want, drawn)
		}
	}
	if bars := strings.Count(drawn, `height="16"`); bars != 3 {
		t.Errorf("%d bars of 3:\n%s", bars, drawn)
	}
}

func wellFormed(t *testing.T, text string) {
	t.Helper()
	for d := xml.NewDecoder(strings.NewReader(text)); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			t.Fatalf("%v in\n%s", err, text)
		}
	}
}
