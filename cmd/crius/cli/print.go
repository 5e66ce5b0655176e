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

// Printable makes any text safe to show on one line of a terminal: it escapes control
// characters, bidirectional marks and broken UTF-8 (CVE-2021-25743), and separates lines,
// such as those of joined errors, by semicolons.
func Printable(text string) string {
	return escape(strings.ReplaceAll(text, "\n", "; "), "")
}

// escape is Printable for texts that may contain the control characters in kept.
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

// Shown returns a writer for the output of containers: it escapes control characters if w
// is a terminal, and changes nothing otherwise.
func Shown(w io.Writer) io.Writer {
	if IsTerminal(w) {
		return &screen{terminal: w}
	}
	return w
}

// screen escapes text for a terminal, except tabs and ends of lines.
type screen struct {
	terminal io.Writer
	rest     []byte // of the last Write, incomplete until more follows
}

func (s *screen) Write(p []byte) (int, error) {
	text := append(s.rest, p...)
	whole := len(text) - incomplete(text)
	s.rest = slices.Clone(text[whole:])
	lines := strings.ReplaceAll(string(text[:whole]), "\r\n", "\n") // a container's own terminal ends lines with \r\n
	if _, err := io.WriteString(s.terminal, escape(lines, "\t\n")); err != nil {
		return 0, err
	}
	return len(p), nil
}

// incomplete returns how many bytes at the end of text begin a character, or an end of
// line, that is not complete. Long lines are logged in records that may end anywhere.
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

// Format is the flag -o: output for people or for programs.
type Format string

// FormatFlag adds the flag to a command.
func FormatFlag(cmd *cobra.Command) *Format {
	f := Format("text")
	cmd.Flags().VarP(&f, "output", "o", "output format: text or json")
	Complete(cmd, "output", f.values())
	return &f
}

func (Format) values() []string { return []string{"text", "json"} }

// String implements pflag.Value, as do Type and Set.
func (f Format) String() string { return string(f) }

// Type describes the values in help texts.
func (f Format) Type() string { return "string" }

// Set refuses unknown formats.
func (f *Format) Set(s string) error {
	if !slices.Contains(f.values(), s) {
		return fmt.Errorf("must be %s", strings.Join(f.values(), " or "))
	}
	*f = Format(s)
	return nil
}

// Print writes the document as JSON, or calls text to write it for people.
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

// Table aligns the tab-separated text of write in columns. It ignores errors of out, which
// is a buffer, such as that of Print.
func Table(out io.Writer, write func(io.Writer)) {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	write(w)
	_ = w.Flush()
}

// Brief formats a duration for people.
func Brief(d time.Duration) string {
	if d < 10*time.Second {
		return d.Round(time.Millisecond).String()
	}
	return d.Round(time.Second).String()
}

// MiB formats a number of bytes for people.
func MiB(bytes uint64) string { return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20)) }

// Count is a number with its noun, whose plural is regular.
func Count[N int | uint64](n N, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
