package main_test

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/crius-run/crius/test/images/facts"
	"github.com/crius-run/crius/test/scene"
)

// statusLine is a line of /proc/PID/status.
func statusLine(text, key string) string {
	for _, line := range strings.Split(text, "\n") {
		if value, ok := strings.CutPrefix(line, key+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// hasGroups compares the supplementary groups in a /proc/PID/status.
func hasGroups(status string, want []int64) bool {
	got := strings.Fields(statusLine(status, "Groups"))
	slices.SortFunc(got, func(a, b string) int { x, _ := strconv.Atoi(a); y, _ := strconv.Atoi(b); return x - y })
	return strings.Join(got, " ") == strings.Trim(fmt.Sprint(want), "[]")
}

// procCaps are the capability sets of a container's first process.
func procCaps(t *testing.T, c *scene.Container) facts.Caps {
	t.Helper()
	text := c.Procfs(t, "status")
	set := func(key string) uint64 {
		n, err := strconv.ParseUint(statusLine(text, key), 16, 64)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	return facts.Caps{
		Inheritable: set("CapInh"), Permitted: set("CapPrm"), Effective: set("CapEff"),
		Bounding: set("CapBnd"), Ambient: set("CapAmb"),
	}
}
