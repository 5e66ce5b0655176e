package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/crius-run/crius/cmd/crius/config/foreign"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/regular"
)

// Sources says where a configuration comes from. The zero value means only the defaults.
type Sources struct {
	File string // configuration file; empty: none
	Dir  string // directory of drop-ins (*.toml); empty: none

	// A file or directory that was named explicitly must exist; a default one need not.
	FileNamed, DirNamed bool

	Flags *Flags // nil: none
}

// Loaded is a configuration in force.
type Loaded struct {
	Config  Config
	Files   []string          // that were read, later ones override earlier ones
	Ignored []string          // parts of runtime.crio_handlers_dir without effect, with the reason
	origin  map[string]origin // by key; absent: the default
}

// origin is the source of a value.
type origin struct {
	kind  string // file, drop-in or flag
	place string // FILE:LINE or --flag
}

// Origin names the source of a key's value: "default", a file with its line, or a flag.
func (l *Loaded) Origin(path string) string {
	if from, ok := l.origin[path]; ok {
		return from.kind + " " + from.place
	}
	return "default"
}

// Problem is an error in a configuration. It is a fault.Invalid.
type Problem struct {
	Where string // file and line, or flag; may be empty
	Key   string // empty for a syntax error
	Text  string // what is wrong and what to do

	line int
}

func (p *Problem) Error() string {
	parts := slices.DeleteFunc([]string{p.Where, p.Key, p.Text}, func(s string) bool { return s == "" })
	return strings.Join(parts, ": ")
}

// Unwrap returns fault.Invalid.
func (*Problem) Unwrap() error { return fault.Invalid }

// Load reads and validates a configuration. The error joins all problems found.
func Load(s Sources) (*Loaded, error) {
	l, err := LoadPart(s)
	if err != nil {
		return nil, err
	}
	return l, nil
}

// LoadPart is Load for clients of a running server. With an error that joins problems it
// also returns the valid part of the configuration, without unknown keys, values of a wrong
// type and files that are not TOML. No server may be started with that.
func LoadPart(s Sources) (*Loaded, error) {
	files, err := s.files()
	if err != nil {
		return nil, err
	}
	l, problems := s.layered(files, new(foreign.Import))
	dir := l.Config.Runtime.CRIOHandlersDir
	if dir == "" {
		return l, errors.Join(problems...)
	}
	imp, ignored := crioHandlers(dir)
	l, problems = s.layered(files, imp)
	l.Ignored = ignored
	return l, errors.Join(problems...)
}

// layered applies the import, then the files, then the flags to the defaults.
func (s Sources) layered(files []file, imp *foreign.Import) (l *Loaded, problems []error) {
	l = &Loaded{Config: Default(), Files: slices.Clone(imp.Files), origin: map[string]origin{}}
	problems = l.lay(imp.Settings, imp.Of)
	for _, file := range files {
		l.Files = append(l.Files, file.path)
		problems = append(problems, l.merge(file)...)
	}
	if s.Flags != nil {
		s.Flags.apply(l)
	}
	return l, append(problems, l.validate()...)
}

// file is a TOML document with its name in messages.
type file struct {
	kind, path string
	data       string
}

// maxFile bounds the bytes of a configuration file.
const maxFile = 4 << 20

// files reads the configuration file and its drop-ins, in the order in which
// they apply. A running server reads them again at a reload, which must not wait
// for the other end of a pipe.
func (s Sources) files() ([]file, error) {
	var all []file
	if s.File != "" {
		data, err := regular.Read(s.File, maxFile)
		switch {
		case err == nil:
			all = append(all, file{"file", s.File, string(data)})
		case s.FileNamed || !errors.Is(err, fs.ErrNotExist):
			return nil, fmt.Errorf("read configuration: %w", err)
		}
	}
	if s.Dir == "" {
		return all, nil
	}
	entries, err := os.ReadDir(s.Dir)
	if err != nil && (s.DirNamed || !errors.Is(err, fs.ErrNotExist)) {
		return nil, fmt.Errorf("read drop-ins: %w", err)
	}
	for _, entry := range entries { // sorted by ReadDir
		name := entry.Name()
		if entry.IsDir() || strings.HasPrefix(name, ".") || filepath.Ext(name) != ".toml" {
			continue
		}
		path := filepath.Join(s.Dir, name)
		data, err := regular.Read(path, maxFile)
		if err != nil {
			return nil, fmt.Errorf("read drop-in: %w", err)
		}
		all = append(all, file{"drop-in", path, string(data)})
	}
	return all, nil
}
