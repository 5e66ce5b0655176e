package oci

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// A guest's process table may contain anything: the search for descendants ends
// and finds each of them once.
func FuzzParents(f *testing.F) {
	f.Add("UID PID PPID C STIME TTY TIME CMD\n0 1 0 0 00:00 ? 0 sh\n0 7 1 0 00:00 ? 0 sleep\n", 1)
	f.Add("PID PPID\n1 2\n2 1\n3 3\n-1 1\n", 1)
	f.Add("PPID PID\n1\n", 0)
	f.Fuzz(func(t *testing.T, table string, root int) {
		parents := parentsIn(table)
		if len(parents) > strings.Count(table, "\n") {
			t.Errorf("%d parents in %q", len(parents), table)
		}
		tree := withDescendants([]int{root}, parents)
		for i, pid := range tree {
			parent, known := parents[pid]
			if i > 0 && (!known || !slices.Contains(tree[:i], parent)) || slices.Contains(tree[:i], pid) {
				t.Errorf("%v has %d at %d, whose parent is %d", tree, pid, i, parent)
			}
		}
	})
}

// The last error in a runtime's log is found among anything else, and can be
// sent.
func FuzzLastError(f *testing.F) {
	f.Add([]byte(`{"msg":"first","level":"error"}`+"\n"), "second", []byte("panic: x\n"))
	f.Add([]byte("{"), "\x00\xff", []byte(`{"level":"warning","msg":"x"}`))
	f.Add([]byte(nil), "", bytes.Repeat([]byte("x\n"), 64<<10))
	f.Fuzz(func(t *testing.T, before []byte, message string, after []byte) {
		file := filepath.Join(t.TempDir(), "log")
		entry, err := json.Marshal(map[string]string{"msg": message, "level": "error"})
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, fmt.Appendf(nil, "%s\n%s\n%s", before, entry, after), 0o600); err != nil {
			t.Fatal(err)
		}
		got := lastError(file)
		if !utf8.ValidString(got) {
			t.Errorf("%q", got)
		}
		if want := strings.ToValidUTF8(message, "\uFFFD"); !bytes.Contains(after, []byte("{")) && len(after) < 1<<10 && len(message) < 1<<10 &&
			utf8.ValidString(message) && got != want {
			t.Errorf("%q, want %q", got, want)
		}
	})
}
