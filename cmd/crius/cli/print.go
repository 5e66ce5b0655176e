package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// Printable is text that is safe to show on one line of a terminal, whoever wrote
// it: control characters, bidirectional marks and broken UTF-8 appear escaped
// (CVE-2021-25743). Lines, as those of joined errors, are separated by semicolons.
func Printable(text string) string {
	return escape(strings.ReplaceAll(text, "\n", "; "), "")
}

// escape is Printable for texts in which some control characters, those in kept, have
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

// Shown is a writer for what containers write: to a terminal only as text, elsewhere as
// it is.
func Shown(w io.Writer) io.Writer {
	if IsTerminal(w) {
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

// IsTerminal reports whether a stream of the process is a terminal.
func IsTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// Format is the flag -o of commands that people and programs read.
type Format string

// FormatFlag adds the flag to a command.
func FormatFlag(cmd *cobra.Command) *Format {
	f := Format("text")
	cmd.Flags().VarP(&f, "output", "o", "output format: text or json")
	Complete(cmd, "output", f.values())
	return &f
}

func (Format) values() []string { return []string{"text", "json"} }

// String is the pflag.Value's, as Type and Set are.
func (f Format) String() string { return string(f) }

// Type names the values.
func (f Format) Type() string { return "string" }

// Set refuses other values.
func (f *Format) Set(s string) error {
	if !slices.Contains(f.values(), s) {
		return fmt.Errorf("must be %s", strings.Join(f.values(), " or "))
	}
	*f = Format(s)
	return nil
}

// Print writes a document: as JSON, or the way that text does it.
func (f Format) Print(w io.Writer, document any, text func(io.Writer)) error {
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

// Table writes what is separated by tabs in columns. Errors of out get lost: it is a
// buffer, as Print has one.
func Table(out io.Writer, write func(io.Writer)) {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	write(w)
	_ = w.Flush()
}

// Brief is a duration as people say it.
func Brief(d time.Duration) string {
	if d < 10*time.Second {
		return d.Round(time.Millisecond).String()
	}
	return d.Round(time.Second).String()
}

// MiB is a number of bytes as people read it.
func MiB(bytes uint64) string { return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20)) }
