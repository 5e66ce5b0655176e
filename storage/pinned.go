package storage

import (
	"slices"
	"strings"
)

// pinPatterns returns the test for Image.Pinned. Patterns are name, prefix* or *keyword*, and are
// compared with the full names of an image's tags and digests.
func pinPatterns(patterns []string) func(*Image) bool {
	return func(image *Image) bool {
		for _, name := range slices.Concat(image.RepoTags, image.RepoDigests) {
			if slices.ContainsFunc(patterns, func(p string) bool { return matches(p, name) }) {
				return true
			}
		}
		return false
	}
}

func matches(pattern, name string) bool {
	prefix, isPrefix := strings.CutSuffix(pattern, "*")
	keyword, isKeyword := strings.CutPrefix(prefix, "*")
	switch {
	case pattern == "" || keyword == "":
		return pattern != "" // "*" and "**" pin everything
	case isPrefix && isKeyword:
		return strings.Contains(name, keyword)
	case isPrefix:
		return strings.HasPrefix(name, prefix)
	}
	return pattern == name
}
