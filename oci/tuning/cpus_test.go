package tuning

import (
	"encoding/json"
	"errors"
	"slices"
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
