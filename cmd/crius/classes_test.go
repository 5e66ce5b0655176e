package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A file that keeps the server from starting is a failure, a node without RDT is not.
func TestCheckClasses(t *testing.T) {
	file := func(text string) string {
		path := filepath.Join(t.TempDir(), "classes.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	block := func(text string) string { return fmt.Sprintf("[runtime]\nblockio_config_file = %q", file(text)) }
	rdt := fmt.Sprintf("[runtime]\nrdt_config_file = %q", file("partitions: {}"))
	rdtStatus := statusWarn
	if _, err := os.Stat("/sys/fs/resctrl/schemata"); err == nil {
		rdtStatus = statusOK
	}
	for _, c := range []struct {
		toml   string
		status status
		says   string
	}{
		{"", statusOK, "none configured"},
		{block("Classes:\n  slow:\n  - Weight: 20\n"), statusOK, "can be used"},
		{block("Classes: 7"), statusFail, "runtime.blockio_config_file"},
		{"[runtime]\nrdt_config_file = '/nowhere/rdt.yaml'", statusFail, "/nowhere/rdt.yaml"},
		{rdt, rdtStatus, ""},
	} {
		found := testNode(t, c.toml, nil).checkClasses(t.Context())
		if len(found) != 1 || found[0].Status != c.status || !strings.Contains(found[0].Text, c.says) {
			t.Errorf("%q: %+v", c.toml, found)
		}
	}
}
