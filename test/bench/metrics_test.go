package main

import "testing"

func TestSeries(t *testing.T) {
	t.Parallel()
	const text = "# HELP go_x_total y\n# TYPE go_x_total counter\ngo_x_total_more 1\ngo_x_total 1.5e+06\ngo_y{a=\"b\"} 3\n"
	if got, err := series(text, "go_x_total"); got != 1.5e6 || err != nil {
		t.Errorf("%v, %v", got, err)
	}
	for _, name := range []string{"go_x", "go_y", "y"} {
		if got, err := series(text, name); err == nil {
			t.Errorf("%s is %v", name, got)
		}
	}
}
