package main

import "strings"

// page is a page of the documentation: the commands of each of its shell blocks, by the
// heading above them.
type page map[string][][]string

// parse parses a page in Markdown.
func parse(text string) page {
	p := page{}
	heading, block := "", []string(nil)
	inside, until := false, "" // inside a block; the end of a here-document
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		switch {
		case inside && until != "":
			block[len(block)-1] += "\n" + line
			if line == until {
				until = ""
			}
		case inside && line == "```":
			p[heading] = append(p[heading], block)
			inside, block = false, nil
		case inside:
			block = append(block, line)
			if _, word, found := strings.Cut(line, "<<'"); found {
				until, _, _ = strings.Cut(word, "'")
			}
		case line == "```sh":
			inside = true
		case strings.HasPrefix(line, "## "):
			heading = strings.TrimPrefix(line, "## ")
		}
	}
	return p
}
