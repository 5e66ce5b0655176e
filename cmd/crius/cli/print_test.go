package cli

import (
	"strings"
	"testing"
)

// A screen shows the same text however it is split into writes.
func TestScreenOfTextInParts(t *testing.T) {
	t.Parallel()
	const text, want = "a\r\nü\r€😀\xf0\x9f\xe2\x82x\r\r\n\x1b", "a\nü" + `\r€😀\xf0\x9f\xe2\x82x\r` + "\n" + `\x1b`
	for i := range len(text) {
		for j := i; j <= len(text); j++ {
			var b strings.Builder
			s := &screen{terminal: &b}
			for _, part := range []string{text[:i], text[i:j], text[j:]} {
				if n, err := s.Write([]byte(part)); n != len(part) || err != nil {
					t.Fatalf("%d of %d bytes, %v", n, len(part), err)
				}
			}
			if b.String() != want {
				t.Errorf("%q, %q, %q is shown as %q, want %q", text[:i], text[i:j], text[j:], b.String(), want)
			}
		}
	}
}
