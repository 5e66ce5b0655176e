package layout

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestCommitMessages(t *testing.T) {
	const why = "\n\nBecause it did not.\n"
	long := strings.Repeat("x", 72-len("oci: "))
	for _, c := range []struct{ message, complaint string }{
		{"oci: keep stderr apart" + why, ""},
		{"conmon/monitor, README.md: tell TTYs apart" + why, ""},
		{"Makefile: CRI first\n\n# a comment\nBecause.\n\nFixes: 1\n", ""},
		{"oci: " + long + why, ""},
		{"oci: " + long + "y" + why, "at most 72"},
		{"keep stderr apart" + why, "area: what changes"},
		{"oci: Keep stderr apart" + why, "area: what changes"},
		{"oci: keep stderr apart." + why, "full stop"},
		{"oci: keep stderr apart\nBecause.\n", "second line"},
		{"oci: keep stderr apart\n", "no body"},
		{"oci: keep stderr apart\n\nFixes: 1\n# because\n", "no body"},
		{"", "area: what changes"},
	} {
		file := filepath.Join(t.TempDir(), "message")
		if err := os.WriteFile(file, []byte(c.message), 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command("../../contrib/git/commit-msg", file).CombinedOutput()
		if (err == nil) != (c.complaint == "") || !strings.Contains(string(out), c.complaint) {
			t.Errorf("%q: %v, %q; want %q", c.message, err, out, c.complaint)
		}
	}
}
