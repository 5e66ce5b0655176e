// Package version parses the answers of runtimes to --version, and knows the
// vulnerabilities of their versions.
package version

import (
	"cmp"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

var programName = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9_-]*`)

// Program returns the first word of an answer: the runtime's name.
func Program(answer string) string { return programName.FindString(answer) }

// Line returns the first line of an answer: at most 200 bytes of valid UTF-8.
func Line(answer []byte) string {
	line, _, _ := strings.Cut(string(answer), "\n")
	if len(line) > 200 {
		line = line[:200]
	}
	return strings.ToValidUTF8(line, "?")
}

// Number is the major, minor and patch version and the number of a release
// candidate.
type Number [4]int

// released stands in place of the release candidate's number in a release.
const released = 1 << 30

var numberText = regexp.MustCompile(`^(\d+)\.(\d+)(?:\.(\d+))?(?:[-~]rc\.?(\d+))?`)

func parsed(text string) (v Number, ok bool) {
	m := numberText.FindStringSubmatch(text)
	if m == nil {
		return v, false
	}
	for i, digits := range m[1:] {
		v[i], _ = strconv.Atoi(digits)
	}
	if m[4] == "" {
		v[3] = released
	}
	return v, true
}

var word = regexp.MustCompile(`(?i)\bversion:?\s+v?(\d\S*)`)

// Parse returns the name of a runtime, in lower case, and its version; an empty
// name if there is no version.
func Parse(answer string) (name string, v Number) {
	m := word.FindStringSubmatch(answer)
	if m == nil {
		return "", v
	}
	v, ok := parsed(m[1])
	if !ok {
		return "", v
	}
	return strings.ToLower(Program(answer)), v
}

// Has reports whether v belongs to the branch major.minor or a later one.
func (v Number) Has(major, minor int) bool { return slices.Compare(v[:2], []int{major, minor}) >= 0 }

func (v Number) compare(other Number) int { return slices.Compare(v[:], other[:]) }

// before reports whether v lacks a fix that came with the versions fixed: it is
// older than the one of its own branch, or its branch has none and is older
// than all of them.
func (v Number) before(fixed []string) bool {
	for _, text := range fixed {
		good, _ := parsed(text)
		switch cmp.Or(cmp.Compare(v[0], good[0]), cmp.Compare(v[1], good[1])) {
		case -1:
			return true
		case 0:
			return v.compare(good) < 0
		}
	}
	return false
}
