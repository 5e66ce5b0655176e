package tuning

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
)

func TestParseSet(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		list, want string
		size       int
	}{
		{"", "", 0}, {"0", "0", 1}, {"0-3,7\n", "0-3,7", 5}, {"7,2,1,2-4", "1-4,7", 5}, {"16383", "16383", 1}, {"5,7,9", "5,7,9", 3},
	} {
		s, err := ParseSet(c.list)
		if err != nil || s.String() != c.want || len(s) != c.size {
			t.Errorf("%q: %v (%d CPUs), %v; want %s", c.list, s, len(s), err, c.want)
		}
	}
	for _, list := range []string{"x", "-1", "1-", "3-1", "1,,2", "0-4294967295", "16384", "0 1", "1-2-3"} {
		if s, err := ParseSet(list); !errors.Is(err, fault.Invalid) {
			t.Errorf("%q: %v, %v", list, s, err)
		}
	}
}

func TestMask(t *testing.T) {
	t.Parallel()
	for mask, list := range map[string]string{
		"0": "", "1": "0", "f": "0-3", "80": "7", "80000000": "31", "1,00000000": "32", "f,ffffffff": "0-35", "1,00000000,00000003": "0-1,64",
	} {
		s, err := parseMask(mask + "\n")
		if err != nil || s.String() != list || s.mask() != mask {
			t.Errorf("%s: %s, %s, %v; want %s", mask, s, s.mask(), err, list)
		}
	}
	if s, err := parseMask("00000000,0000000f"); err != nil || s.String() != "0-3" {
		t.Errorf("%v, %v", s, err)
	}
	for _, mask := range []string{"", "x", "-1", "0x1", strings.Repeat("f", 5000)} {
		if s, err := parseMask(mask); err == nil {
			t.Errorf("%q: %v", mask, s)
		}
	}
}

func TestSetInRecords(t *testing.T) {
	t.Parallel()
	text, err := json.Marshal(Plan{CPUs: Set{1, 2, 3}})
	if err != nil || string(text) != `{"CPUs":"1-3"}` {
		t.Errorf("%s, %v", text, err)
	}
	var p Plan
	if err := json.Unmarshal(text, &p); err != nil || !slices.Equal(p.CPUs, Set{1, 2, 3}) {
		t.Errorf("%v, %v", p, err)
	}
}
