package source

import (
	"fmt"
	"maps"
	"strings"
	"testing"
)

func TestAnnotationsOf(t *testing.T) {
	t.Parallel()
	for manifest, want := range map[string]map[string]string{
		`{"annotations": {"a": "b", "c": ""}}`: {"a": "b", "c": ""},
		"{\"annotations\": {\"a\": \"\xff\"}}": {"a": "\ufffd"},
		`{}`:                                   nil,
		`{"annotations": ["a"]}`:               nil,
		"{":                                    nil,
		fmt.Sprintf(`{"annotations": {"a": %q}}`, strings.Repeat("a", maxAnnotations)): nil,
	} {
		if got := AnnotationsOf([]byte(manifest)); !maps.Equal(got, want) {
			t.Errorf("%.60s: %q, want %q", manifest, got, want)
		}
	}
}
