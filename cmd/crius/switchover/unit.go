package switchover

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/crius-run/crius/cmd/crius/kubelet"
)

// unit is a service of systemd, as far as it decides about a container runtime.
type unit struct {
	exec      kubelet.Setting            // the last ExecStart
	variables map[string]kubelet.Setting // those that ExecStart does not expand
	limits    map[string]kubelet.Setting // by their names in ulimits, such as nofile
	arguments []string                   // of ExecStart, expanded
}

// unitDirs are the directories of units; earlier ones win.
var unitDirs = []string{"/etc/systemd/system", "/run/systemd/system", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"}

// readUnit reads a unit with its drop-ins and files of variables, which are below root. Files that cannot
// be read count as empty.
func readUnit(root, name string) unit {
	u := unit{variables: map[string]kubelet.Setting{}, limits: map[string]kubelet.Setting{}}
	var variableFiles []string
	for _, file := range unitFiles(root, name) {
		for key, value := range assignments(root, file) {
			switch limit, isLimit := strings.CutPrefix(key, "Limit"); {
			case key == "ExecStart":
				u.exec = kubelet.Setting{Value: value, File: file}
			case key == "Environment" && value == "":
				clear(u.variables)
			case key == "Environment":
				u.assign(file, words(value)...)
			case key == "EnvironmentFile" && value == "":
				variableFiles = nil
			case key == "EnvironmentFile":
				variableFiles = append(variableFiles, strings.TrimPrefix(value, "-"))
			case isLimit && value == "":
				delete(u.limits, strings.ToLower(limit))
			case isLimit:
				u.limits[strings.ToLower(limit)] = kubelet.Setting{Value: value, File: file}
			}
		}
	}
	for _, file := range variableFiles { // these win over Environment
		for _, line := range lines(root, file) {
			u.assign(file, words(line)...)
		}
	}
	u.expand()
	return u
}

func (u *unit) assign(file string, words ...string) {
	for _, word := range words {
		if name, value, ok := strings.Cut(word, "="); ok {
			u.variables[name] = kubelet.Setting{Value: value, File: file}
		}
	}
}

// expand fills in arguments, and takes the variables that ExecStart names away.
func (u *unit) expand() {
	used := map[string]bool{}
	for i, word := range words(u.exec.Value) {
		name, isVariable := strings.CutPrefix(word, "$")
		whole, inBraces := strings.CutPrefix(name, "{")
		name = strings.TrimSuffix(whole, "}")
		switch value := u.variables[name].Value; {
		case i == 0: // the program
		case !isVariable:
			u.arguments = append(u.arguments, word)
		case inBraces && value != "":
			u.arguments = append(u.arguments, value)
		default:
			u.arguments = append(u.arguments, strings.Fields(value)...)
		}
		used[name] = used[name] || isVariable
	}
	maps.DeleteFunc(u.variables, func(name string, _ kubelet.Setting) bool { return used[name] })
}

// unitFiles returns the file of a unit and its drop-ins, in the order in which systemd reads them. A link by
// which another unit stands for this one does not count.
func unitFiles(root, name string) (files []string) {
	dropIns := map[string]string{} // by name; those in earlier directories hide others
	for _, dir := range slices.Backward(unitDirs) {
		if file := filepath.Join(dir, name); isFile(root, file) {
			files = []string{file}
		}
		found, _ := filepath.Glob(filepath.Join(root, dir, name+".d", "*.conf")) // the pattern is valid
		for _, file := range found {
			dropIns[filepath.Base(file)] = filepath.Join(dir, name+".d", filepath.Base(file))
		}
	}
	for _, base := range slices.Sorted(maps.Keys(dropIns)) {
		files = append(files, dropIns[base])
	}
	return files
}

func isFile(root, path string) bool {
	info, err := os.Stat(filepath.Join(root, path))
	to, _ := os.Readlink(filepath.Join(root, path)) // empty: no link
	return err == nil && info.Mode().IsRegular() && (to == "" || filepath.Base(to) == filepath.Base(path))
}

// assignments visits the keys of the section Service in a file.
func assignments(root, file string) func(yield func(key, value string) bool) {
	return func(yield func(key, value string) bool) {
		section := ""
		for _, line := range lines(root, file) {
			key, value, ok := strings.Cut(line, "=")
			switch {
			case strings.HasPrefix(line, "["):
				section = line
			case ok && section == "[Service]" && !yield(strings.TrimSpace(key), strings.TrimSpace(value)):
				return
			}
		}
	}
}

// lines returns the lines of a file that are not comments. One that ends in a backslash goes on in the next.
func lines(root, file string) (lines []string) {
	text, _ := os.ReadFile(filepath.Join(root, file)) // unreadable: counts as empty
	for line := range strings.Lines(strings.ReplaceAll(string(text), "\\\n", " ")) {
		if line = strings.TrimSpace(line); !strings.HasPrefix(line, "#") && !strings.HasPrefix(line, ";") {
			lines = append(lines, line)
		}
	}
	return lines
}

// words splits a line at spaces outside of quotes, and removes the quotes.
func words(line string) (words []string) {
	var word strings.Builder
	quote, started := rune(0), false
	end := func() {
		if started {
			words = append(words, word.String())
		}
		word.Reset()
		started = false
	}
	for _, r := range line {
		switch {
		case r == quote:
			quote = 0
		case quote == 0 && (r == '"' || r == '\''):
			quote, started = r, true
		case quote == 0 && (r == ' ' || r == '\t'):
			end()
		default:
			word.WriteRune(r)
			started = true
		}
	}
	end()
	return words
}

// names returns the sorted names of settings, and the files in which they are.
func names(of map[string]kubelet.Setting, wanted func(name string) bool) (names, files []string) {
	for _, name := range slices.Sorted(maps.Keys(of)) {
		if wanted(name) {
			names, files = append(names, name), append(files, of[name].File)
		}
	}
	slices.Sort(files)
	return names, slices.Compact(files)
}
