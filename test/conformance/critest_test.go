package main

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/crius-run/crius/test/kit/critest"
	"github.com/crius-run/crius/test/kit/tools"
)

// TestCritest runs the suite with every handler: all of it with Debian's
// runtimes, and with a current runc what they cannot do. Skipped specs must be
// impossible here: its benchmarks, AppArmor if the kernel has none, and user
// namespaces with Debian's runtimes, which lack id-mapped mounts.
func TestCritest(t *testing.T) {
	parts, err := tools.CritestParts(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	suite, err := critest.New(parts)
	if err != nil {
		t.Fatal(err)
	}
	for _, handler := range allHandlers() {
		t.Run(handler, func(t *testing.T) {
			t.Parallel()
			suite := *suite
			if handler == tools.CurrentRunc {
				suite.Focus = "UserNamespaces"
			}
			r, err := run(t.Context(), &suite, handler)
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
				selected := suite.Focus == "" || strings.Contains(spec, " "+suite.Focus+" ")
				if selected && !outOfReach(spec, handler) {
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
