package frames

import "testing"

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
