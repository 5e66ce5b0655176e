package config

import (
	"fmt"
	"strings"
)

// removed has advice for keys of earlier versions.
var removed = map[string]string{
	"image.default_transport": "it was removed and never had an effect: delete the line",
}

// hint suggests the key that name in the table at path probably means: a key of that table
// or, failing that, a similar one elsewhere.
func hint(path, name string, siblings []string) string {
	if advice := removed[join(path, name)]; advice != "" {
		return "; " + advice
	}
	best, bestDistance := "", len(name)
	consider := func(candidate, last string, detour int) {
		d := distance(name, last)
		if strings.HasPrefix(name, last+"_") {
			d = 1 // listen_address instead of listen
		}
		if d <= max(1, len(name)/3) && d+detour < bestDistance {
			best, bestDistance = candidate, d+detour
		}
	}
	for _, sibling := range siblings {
		consider(join(path, sibling), sibling, 0)
	}
	for _, section := range Schema() {
		for _, key := range section.Keys {
			consider(key.Path, key.Name(), 1)
		}
	}
	if best == "" {
		return "; `crius config --default` lists all keys"
	}
	return fmt.Sprintf("; did you mean %s?", best)
}

// distance returns the Levenshtein distance: the number of letters to add, drop or change.
// It ignores dashes and capitals.
func distance(a, b string) int {
	a = strings.ToLower(strings.ReplaceAll(a, "-", "_"))
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := diagonal
			if a[i] != b[j] {
				change++
			}
			diagonal = row[j+1]
			row[j+1] = min(change, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
