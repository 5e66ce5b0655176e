package main

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestPage(t *testing.T) {
	t.Parallel()
	c := example()
	r := report{
		Date: "2026-01-02", Command: "make bench ROW='pods'", Machine: [][2]string{{"kernel", "Linux 6.18"}},
		Rows: []*result{{Name: "pods", About: "What it is.", Tables: []*table{&c.table}}},
	}
	var page strings.Builder
	r.markdown(&page)
	for _, want := range []string{
		"2026-01-02", "```\nmake bench ROW='pods'\n```", "| kernel | Linux 6.18 |", "\n## pods\n\nWhat it is.",
		"| up | 2.00 | 3.00 | 4.00 |", "up    floor  █",
	} {
		if !strings.Contains(page.String(), want) {
			t.Errorf("%q is not in\n%s", want, page.String())
		}
	}
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var back struct {
		Machine [][]string
		Rows    []struct {
			Name   string
			Tables []struct{ Rows [][]any }
		}
	}
	if err := json.Unmarshal(text, &back); err != nil || back.Machine[0][1] != "Linux 6.18" || back.Rows[0].Tables[0].Rows[0][1] != 2.0 {
		t.Errorf("%v\n%s", err, text)
	}
}

func TestField(t *testing.T) {
	t.Parallel()
	const text = "processor\t: 0\nmodel name\t: Some CPU: fast\nmodel name\t: Another\n"
	if got := field(text, "model name"); got != "Some CPU: fast" {
		t.Errorf("%q", got)
	}
	if got := field(text, "model"); got != "unknown" {
		t.Errorf("%q", got)
	}
}

func TestPick(t *testing.T) {
	t.Parallel()
	all, err := pick(nil)
	if err != nil || len(all) != len(rows) {
		t.Errorf("%d rows, %v", len(all), err)
	}
	two, err := pick([]string{"log", "pods"})
	if err != nil || len(two) != 2 || two[0].name != "log" || two[1].name != "pods" {
		t.Errorf("%v, %v", two, err)
	}
	if _, err := pick([]string{"pods", "cats"}); err == nil || !strings.Contains(err.Error(), "cats") || !strings.Contains(err.Error(), "restart") {
		t.Errorf("%v", err)
	}
}

func TestAmount(t *testing.T) {
	const variable = "CRIUS_BENCH_TEST"
	for text, want := range map[string]int{"": 7, "12": 12, "0": 0, "-1": 0, "x": 0} {
		t.Setenv(variable, text)
		got, err := amount(variable, 7)
		if got != want || (err != nil) != (want == 0) {
			t.Errorf("%q: %d, %v", text, got, err)
		}
	}
}
