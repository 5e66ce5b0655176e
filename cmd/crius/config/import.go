package config

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"

	"github.com/crius-run/crius/cmd/crius/config/foreign"
)

// WriteImport writes imp as a configuration file, with a comment for each foreign key that
// has no counterpart. Values that crius refuses become such comments too, so that crius
// always accepts the file.
//
// It writes nothing and fails if a key that restricts pods or clients has no counterpart, unless
// its name is in lost, which an operator accepts to lose.
func WriteImport(w io.Writer, imp *foreign.Import, lost []string) error {
	accepted, err := accept(imp)
	if err != nil {
		return err
	}
	if err := accepted.checkLost(lost); err != nil {
		return err
	}
	_, err = io.WriteString(w, accepted.file())
	return err
}

func (a *accepted) checkLost(lost []string) error {
	for _, key := range lost {
		if !slices.ContainsFunc(a.Remarks, func(r foreign.Remark) bool { return r.Key == key }) {
			return fmt.Errorf("--accept %s: nothing of the configuration of %s is lost under this name", visible(key), a.Of)
		}
	}
	var errs []error
	for _, r := range a.Lost(lost) {
		errs = append(errs, fmt.Errorf("%s = %s (%s) restricts this node and has no equivalent: %s; if that is acceptable, repeat the command with --accept %s",
			visible(r.Key), visible(Short(r.Value)), visible(r.Place), r.Text, quoteWord(r.Key)))
	}
	return errors.Join(errs...)
}

// quoteWord returns a key as a word of the shell.
func quoteWord(key string) string {
	if strings.Trim(key, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == "" {
		return key
	}
	return "'" + strings.ReplaceAll(visible(key), "'", `'\''`) + "'"
}

// accepted is an import without the values that crius refuses.
type accepted struct {
	*foreign.Import
	loaded *Loaded
}

// accept drops the values that crius refuses.
func accept(imp *foreign.Import) (*accepted, error) {
	left := *imp
	for {
		l := &Loaded{Config: Default(), origin: map[string]origin{}}
		problems := l.lay(left.Settings, imp.Of)
		problems = append(problems, l.validate()...)
		if len(problems) == 0 {
			return &accepted{&left, l}, nil
		}
		if !drop(&left, problems) {
			return nil, fmt.Errorf("the configuration of %s cannot be converted: %w", imp.Of, errors.Join(problems...))
		}
	}
}

// crioHandlers reads the handlers that installers have configured for CRI-O in dir. It
// reports errors there as ignored: files of other programs must not keep the node from
// running pods.
func crioHandlers(dir string) (imp *foreign.Import, ignored []string) {
	imp, err := foreign.CRIOHandlers(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return new(foreign.Import), nil
	}
	var taken *accepted
	if err == nil {
		taken, err = accept(imp)
	}
	if err != nil {
		return new(foreign.Import), []string{fmt.Sprintf("all of %s: %v", dir, err)}
	}
	for _, r := range taken.Remarks {
		ignored = append(ignored, fmt.Sprintf("%s: %s: %s", r.Place, r.Key, r.Text))
	}
	return taken.Import, ignored
}

// lay applies settings of another program to the configuration.
func (l *Loaded) lay(settings []foreign.Setting, kind string) []error {
	var b strings.Builder
	for _, s := range settings { // dotted keys, one per line
		fmt.Fprintf(&b, "%s = %s\n", s.Key, tomlOf(s.Value))
	}
	problems := l.merge(file{kind, kind, b.String()})
	for _, s := range settings {
		l.origin[s.Key] = origin{kind, s.From}
	}
	for i, err := range problems {
		if p := new(Problem); errors.As(err, &p) {
			problems[i] = &Problem{Where: l.origin[p.Key].place, Key: p.Key, Text: p.Text}
		}
	}
	return problems
}

// tomlOf formats a value as TOML.
func tomlOf(value any) string {
	if items, ok := value.([]any); ok {
		list := make([]string, len(items))
		for i, item := range items {
			list[i] = fmt.Sprint(item)
		}
		value = list
	}
	return format(value)
}

// drop turns settings that have problems into remarks. It reports whether there were any.
func drop(imp *foreign.Import, problems []error) bool {
	wrong := map[string]string{}
	for _, err := range problems {
		if p := new(Problem); errors.As(err, &p) {
			wrong[p.Key] = p.Text
		}
	}
	var left []foreign.Setting
	for _, s := range imp.Settings {
		text := problemOf(wrong, s.Key)
		if text == "" {
			left = append(left, s)
			continue
		}
		imp.Remarks = append(imp.Remarks, foreign.Remark{Key: s.Key, Value: tomlOf(s.Value), Place: s.From, Text: "crius refuses this value: " + text, Restricts: foreign.Restrictive(s.Key)})
	}
	dropped := len(left) < len(imp.Settings)
	imp.Settings = left
	return dropped
}

// problemOf returns the problem of a key or of a table above it.
func problemOf(wrong map[string]string, key string) string {
	for at := key; ; {
		if text, found := wrong[at]; found {
			return text
		}
		dot := strings.LastIndexByte(at, '.')
		if dot < 0 {
			return ""
		}
		at = at[:dot]
	}
}

// file returns the text of the file.
func (a *accepted) file() string {
	var b strings.Builder
	fmt.Fprintf(&b, "# Configuration of crius, converted from that of %s:\n", a.Of)
	for _, path := range a.Files {
		fmt.Fprintf(&b, "#   %s\n", visible(path))
	}
	b.WriteString("# Keys that are not here have the defaults of crius: see crius.toml(5).\n")
	a.remarks(&b)
	a.settings(&b)
	return b.String()
}

func (a *accepted) remarks(b *strings.Builder) {
	if len(a.Remarks) > 0 {
		b.WriteString("\n# No equivalent in crius:\n")
	}
	for _, r := range a.Remarks {
		fmt.Fprintf(b, "#\n# %s = %s\n# (%s)\n%s", visible(r.Key), visible(Short(r.Value)), visible(r.Place), indented(r.Text))
	}
	for _, list := range []struct {
		head  string
		items []string
	}{
		{"Keys that were not set and have a different default in crius:", a.Differ},
		{"Set to the default or switched off, so that nothing is lost:", a.Unused},
		{"Not needed: crius always does this, or does not require it:", a.Builtin},
	} {
		if len(list.items) > 0 {
			fmt.Fprintf(b, "\n# %s\n", list.head)
		}
		for _, item := range list.items {
			b.WriteString(indented(item))
		}
	}
}

// Short abbreviates values that are tables of tables.
func Short(value string) string {
	const most = 100
	if len(value) <= most {
		return value
	}
	return strings.ToValidUTF8(value[:most], "") + " ..."
}

// settings writes the values by table, as the template does.
func (a *accepted) settings(b *strings.Builder) {
	last := map[string]foreign.Setting{}
	for _, s := range a.Settings {
		last[s.Key] = s
	}
	for _, section := range a.loaded.Config.sections() {
		head := section.Path
		for _, k := range section.Keys {
			s, set := last[k.Path]
			if !set {
				continue
			}
			if head != "" {
				fmt.Fprintf(b, "\n[%s]\n", head)
				head = ""
			} else if k.Path == k.Name() {
				b.WriteString("\n")
			}
			if s.Note != "" && k.TOML() != `""` {
				b.WriteString(comment(s.Note))
			}
			fmt.Fprintf(b, "%s = %s # %s\n", k.Name(), k.TOML(), visible(s.From))
		}
	}
}

// indented formats a text as a comment below a heading.
func indented(text string) string {
	var b strings.Builder
	for line := range strings.SplitSeq(text, "\n") {
		b.WriteString(strings.ReplaceAll(comment(visible(line)), "# ", "#   "))
	}
	return b.String()
}

// visible removes everything from a text that could end a comment or control a terminal.
func visible(text string) string {
	quoted := quote(text)
	return strings.ReplaceAll(quoted[1:len(quoted)-1], `\"`, `"`)
}
