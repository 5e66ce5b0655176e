package config

import (
	"math"
	"reflect"
	"strings"
	"testing"
)

// A number that does not fit an option is refused, not truncated: int has 32 bits on some
// architectures, int64 has 64 bits on all.
func TestNumbersThatDoNotFit(t *testing.T) {
	t.Parallel()
	for _, large := range []int64{math.MaxInt64, math.MinInt64, 1<<40 + 1} {
		wide, short := int64(7), 7
		if err := assign(reflect.ValueOf(&wide).Elem(), large); err != nil || wide != large {
			t.Errorf("int64 %d: %v, %v", large, wide, err)
		}
		err := assign(reflect.ValueOf(&short).Elem(), large)
		if fits := int64(int(large)) == large; fits && (err != nil || int64(short) != large) {
			t.Errorf("int %d: %v, %v", large, short, err)
		} else if !fits && (err == nil || !strings.Contains(err.Error(), "must be from") || short != 7) {
			t.Errorf("int %d: %v, %v", large, short, err)
		}
	}
	rate := int64(7)
	if err := assignText(reflect.ValueOf(&rate).Elem(), "1099511627775", true); err != nil || rate != 1<<40-1 {
		t.Errorf("int64 from the command line: %v, %v", rate, err)
	}
}
