package main

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/testkit/critest"
)

// TestCritest runs the whole suite with every handler. What it skips must be out
// of reach: its benchmarks, AppArmor where the kernel has none, and user
// namespaces with Debian's runtimes, which lack id-mapped mounts.
func TestCritest(t *testing.T) {
	parts, err := critest.Build(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	suite, err := critest.New(parts)
	if err != nil {
		t.Fatal(err)
	}
	for _, handler := range allHandlers() {
		t.Run(handler, func(t *testing.T) {
			r, err := run(t.Context(), suite, handler)
			if err != nil {
				t.Fatal(err)
			}
			var text strings.Builder
			r.Print(&text, handler)
			t.Log(text.String())
			if r.Failed() {
				t.Fail()
			}
			for _, spec := range r.Skipped() {
				if !outOfReach(spec, handler) {
					t.Errorf("skipped: %s", spec)
				}
			}
		})
	}
}

func outOfReach(spec, handler string) bool {
	appArmor, _ := os.ReadFile("/sys/module/apparmor/parameters/enabled")
	return strings.Contains(spec, " benchmark ") ||
		strings.HasPrefix(spec, "AppArmor ") && !strings.HasPrefix(string(appArmor), "Y") ||
		strings.Contains(spec, " UserNamespaces ") && slices.Contains([]string{"runc", "crun"}, handler)
}
