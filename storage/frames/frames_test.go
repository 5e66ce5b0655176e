package frames

import (
	"bufio"
	"errors"
	"io"
	"strings"
	"testing"
)

const skip = "\x50\x2a\x4d\x18\x02\x00\x00\x00ab"

func TestBegin(t *testing.T) {
	t.Parallel()
	for head, want := range map[string]struct{ may, is bool }{
		"": {true, false}, "\x28": {true, false}, "\x28\xb5\x2f": {true, false}, "\x28\xb5\x2f\xfd": {true, true},
		"\x5f": {true, false}, "\x5f\x2a\x4d": {true, false}, "\x5f\x2a\x4d\x18": {true, true},
		"\x60": {false, false}, "Z*": {true, false}, "Z+": {false, false}, "Z*M\x17": {false, false}, "\x1f\x8b": {false, false},
	} {
		if may, is := MayBegin([]byte(head)), Begin([]byte(head)); may != want.may || is != want.is {
			t.Errorf("%q: may begin %t, begins %t", head, may, is)
		}
	}
}

func TestSkip(t *testing.T) {
	t.Parallel()
	for stream, want := range map[string]struct {
		rest string
		err  error
	}{
		skip + skip + "rest": {"rest", nil}, "rest": {"rest", nil}, skip: {"", nil}, "": {"", nil}, skip[:9]: {"", io.ErrUnexpectedEOF}, skip[:6]: {skip[:6], nil},
	} {
		r := bufio.NewReader(strings.NewReader(stream))
		err := Skip(r)
		if rest, _ := io.ReadAll(r); !errors.Is(err, want.err) || string(rest) != want.rest {
			t.Errorf("%q: %q, %v", stream, rest, err)
		}
	}
}
