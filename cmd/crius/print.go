package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// printable is text that is safe to show on one line of a terminal, whoever wrote
// it: control characters, bidirectional marks and broken UTF-8 appear escaped
// (CVE-2021-25743). Lines, as those of joined errors, are separated by semicolons.
func printable(text string) string {
	return escape(strings.ReplaceAll(text, "\n", "; "), "")
}

// escape is printable for texts in which some control characters, those in kept, have
// their place.
func escape(text, kept string) string {
	var b strings.Builder
	for i, r := range text {
		_, size := utf8.DecodeRuneInString(text[i:])
		if r == utf8.RuneError && size == 1 || !unicode.IsPrint(r) && !strings.ContainsRune(kept, r) {
			quoted := strconv.QuoteToASCII(text[i : i+size])
			b.WriteString(quoted[1 : len(quoted)-1])
			continue
		}
		b.WriteRune(r)
	}
	return b.String()
}

// shown is a writer for what containers write: to a terminal only as text, elsewhere as
// it is.
func shown(w io.Writer) io.Writer {
	if isTerminal(w) {
		return &screen{terminal: w}
	}
	return w
}

// screen escapes what is written to a terminal, except tabs and ends of lines.
type screen struct {
	terminal io.Writer
	rest     []byte // of the last Write: what follows says what it is
}

func (s *screen) Write(p []byte) (int, error) {
	text := append(s.rest, p...)
	whole := len(text) - incomplete(text)
	s.rest = slices.Clone(text[whole:])
	lines := strings.ReplaceAll(string(text[:whole]), "\r\n", "\n") // as a container's own terminal ends them
	if _, err := io.WriteString(s.terminal, escape(lines, "\t\n")); err != nil {
		return 0, err
	}
	return len(p), nil
}

// incomplete is how many bytes at the end of text are the beginning of a character, or
// of the end of a line. Long lines are logged in records that may end anywhere.
func incomplete(text []byte) int {
	if bytes.HasSuffix(text, []byte("\r")) {
		return 1
	}
	for n := 1; n < utf8.UTFMax && n <= len(text); n++ {
		if last := text[len(text)-n:]; utf8.RuneStart(last[0]) {
			if utf8.FullRune(last) {
				return 0
			}
			return n
		}
	}
	return 0
}

func isTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// outputFormat is the flag -o of commands that people and programs read.
type outputFormat string

func outputFlag(cmd *cobra.Command) *outputFormat {
	f := outputFormat("text")
	cmd.Flags().VarP(&f, "output", "o", "output format: text or json")
	complete(cmd, "output", f.values())
	return &f
}

func (outputFormat) values() []string { return []string{"text", "json"} }
func (f outputFormat) String() string { return string(f) }
func (f outputFormat) Type() string   { return "string" }
func (f *outputFormat) Set(s string) error {
	if !slices.Contains(f.values(), s) {
		return fmt.Errorf("must be %s", strings.Join(f.values(), " or "))
	}
	*f = outputFormat(s)
	return nil
}

// print writes a document: as JSON, or the way that text does it.
func (f outputFormat) print(w io.Writer, document any, text func(io.Writer)) error {
	if f == "text" {
		var page bytes.Buffer
		text(&page)
		_, err := page.WriteTo(w)
		return err
	}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(document)
}
