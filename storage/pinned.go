package storage

import (
	"maps"
	"slices"
	"strings"
)

// repin asks again which images are pinned.
func (c *catalog) repin() {
	c.mu.Lock()
	defer c.mu.Unlock()
	entries := maps.Clone(c.entries) // readers have the former map, and its images
	for id, e := range entries {
		if e.image == nil {
			continue
		}
		image := *e.image
		image.Pinned = c.pinned(&image) || image.ReadOnly
		e.image = &image
		entries[id] = e
	}
	c.entries = entries
}

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
