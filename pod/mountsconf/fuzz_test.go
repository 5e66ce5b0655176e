package mountsconf

import (
	"path"
	"strings"
	"testing"
)

// A line that is taken leads from one clean path to another, and not over the kernel's
// file systems.
func FuzzParseLine(f *testing.F) {
	for _, text := range []string{"/usr/share/rhel/secrets:/run/secrets", "/a", "/a:/b/", "/a:/proc/x", ":", "/a:/b:/c", "/a/../b:/c"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		l, err := parseLine(text)
		if err != nil {
			return
		}
		for _, p := range []string{l.source, l.destination} {
			if !path.IsAbs(p) || path.Clean(p) != p {
				t.Errorf("%q has the path %q", text, p)
			}
		}
		for _, kernel := range []string{"/proc", "/sys", "/dev"} {
			if l.destination == kernel || strings.HasPrefix(l.destination, kernel+"/") {
				t.Errorf("%q covers %s", text, l.destination)
			}
		}
	})
}
