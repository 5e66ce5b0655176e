package main

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// Tests compare the names in documents with the program, so that both change together.

const repository = "../.."

// documents returns the texts of all public pages, by path from the repository's root.
func documents(t *testing.T) map[string]string {
	t.Helper()
	pages := map[string]string{}
	for _, pattern := range []string{"*.md", "docs/*.md"} {
		files, err := filepath.Glob(filepath.Join(repository, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			name, _ := filepath.Rel(repository, file)
			pages[name] = string(text)
		}
	}
	if len(pages) < 10 {
		t.Fatalf("only %d pages", len(pages))
	}
	return pages
}

var (
	codeBlock = regexp.MustCompile("(?ms)^ *```([a-z]*)\n(.*?)^ *```")
	codeSpan  = regexp.MustCompile("`([^`]+)`")
)

// blocks returns the fenced blocks of a page in a language.
func blocks(page, language string) (found []string) {
	for _, m := range codeBlock.FindAllStringSubmatch(page, -1) {
		if m[1] == language {
			found = append(found, m[2])
		}
	}
	return found
}

// commandLines returns the lines of shell blocks and the code spans of a page that begin
// with the program.
func commandLines(page, program string) (found []string) {
	var lines []string
	for _, block := range slices.Concat(blocks(page, "sh"), blocks(page, "")) {
		lines = append(lines, strings.Split(block, "\n")...)
	}
	for _, m := range codeSpan.FindAllStringSubmatch(codeBlock.ReplaceAllString(page, ""), -1) {
		lines = append(lines, m[1])
	}
	for _, line := range lines {
		if line, _, _ = strings.Cut(strings.TrimSpace(line), " #"); strings.HasPrefix(line, program+" ") && !strings.Contains(line, "█") { // charts
			found = append(found, strings.TrimSpace(line))
		}
	}
	return found
}

func TestDocumentsNameCommandsThatExist(t *testing.T) {
	seen := 0
	for name, page := range documents(t) {
		for _, line := range commandLines(page, "crius") {
			seen++
			line, _, _ = strings.Cut(line, " >")
			args := strings.Fields(line)[1:]
			if args[0] == "help" { // takes a command or a topic
				args = args[1:]
			}
			command, rest, err := newRoot().Find(args)
			if err != nil {
				t.Errorf("%s: %q: %v", name, line, err)
				continue
			}
			rest = slices.DeleteFunc(rest, func(arg string) bool { return strings.HasPrefix(arg, "[") })
			if err := command.ParseFlags(rest); err != nil {
				t.Errorf("%s: %q: %v", name, line, err)
			} else if err := command.ValidateArgs(command.Flags().Args()); err != nil {
				t.Errorf("%s: %q: %v", name, line, err)
			}
		}
	}
	if seen < 20 {
		t.Errorf("only %d command lines seen", seen)
	}
}

func TestDocumentsNameTargetsThatExist(t *testing.T) {
	makefile, err := os.ReadFile(filepath.Join(repository, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for name, page := range documents(t) {
		for _, line := range commandLines(page, "make") {
			for _, word := range strings.Fields(line)[1:] {
				if strings.ContainsAny(word, "=[$") || word == "-j" {
					break // values follow
				}
				seen++
				if !bytes.Contains(makefile, []byte("\n"+word+":")) {
					t.Errorf("%s: %q: there is no target %s", name, line, word)
				}
			}
		}
	}
	if seen < 10 {
		t.Errorf("only %d targets seen", seen)
	}
}

func TestConfigurationInDocumentsIsAccepted(t *testing.T) {
	seen := 0
	for name, page := range documents(t) {
		for _, block := range blocks(page, "toml") {
			seen++
			file := filepath.Join(t.TempDir(), "crius.toml")
			if err := os.WriteFile(file, []byte(block), 0o600); err != nil {
				t.Fatal(err)
			}
			if code, _, errs := crius(t, "config", "--config", file); code != 0 {
				t.Errorf("%s: %s\nof\n%s", name, errs, block)
			}
		}
	}
	if seen < 5 {
		t.Errorf("only %d blocks seen", seen)
	}
}

var (
	link     = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading  = regexp.MustCompile(`(?m)^#+ (.*)$`)
	noAnchor = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

func TestLinksInDocumentsLeadSomewhere(t *testing.T) {
	pages := documents(t)
	seen := 0
	for name, page := range pages {
		for _, m := range link.FindAllStringSubmatch(codeBlock.ReplaceAllString(page, ""), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			seen++
			target, anchor, _ := strings.Cut(m[1], "#")
			if target = filepath.Join(filepath.Dir(name), target); strings.HasPrefix(m[1], "#") {
				target = name
			}
			if _, err := os.Stat(filepath.Join(repository, target)); err != nil {
				t.Errorf("%s: %v", name, err)
			} else if !shipped(target) {
				t.Errorf("%s: the packages do not have %s", name, target)
			} else if text, isPage := pages[target]; isPage && anchor != "" && !slices.Contains(anchors(text), anchor) {
				t.Errorf("%s: %s has no heading #%s", name, target, anchor)
			}
		}
	}
	if seen < 20 {
		t.Errorf("only %d links seen", seen)
	}
}

// shipped reports whether packages have a page or directory of pages (contrib/packaging/build.sh).
func shipped(path string) bool {
	return path == "docs" || strings.HasPrefix(path, "docs/") || !strings.Contains(path, "/") && strings.HasSuffix(path, ".md")
}

// anchors returns the anchors of a page's headings on GitHub.
func anchors(page string) (names []string) {
	for _, m := range heading.FindAllStringSubmatch(codeBlock.ReplaceAllString(page, ""), -1) {
		names = append(names, strings.ReplaceAll(noAnchor.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-"))
	}
	return names
}

var symptom = regexp.MustCompile("(?m)^\\| `([^`]+)` \\|")

// Every log message that the page lists exists in the code; … stands for the variable part.
func TestSymptomsAreInTheCode(t *testing.T) {
	symptoms := symptom.FindAllStringSubmatch(documents(t)["docs/troubleshoot.md"], -1)
	if len(symptoms) < 25 {
		t.Errorf("only %d symptoms", len(symptoms))
	}
	code := productCode(t)
	for _, m := range symptoms {
		if !regexp.MustCompile(strings.ReplaceAll(regexp.QuoteMeta(m[1]), "…", "%[sqdv]")).MatchString(code) || strings.Contains(m[1], "%") {
			t.Errorf("nothing says %q any more", m[1])
		}
	}
}

// productCode returns the text of all Go files of the product.
func productCode(t *testing.T) string {
	t.Helper()
	var all strings.Builder
	for _, dir := range []string{"cmd", "server", "pod", "nri", "oci", "conmon", "storage", "network", "internal"} {
		err := filepath.WalkDir(filepath.Join(repository, dir), func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			all.Write(text)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return all.String()
}
