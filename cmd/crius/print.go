package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"
)

// printable is text that is safe to show on one line of a terminal, whoever wrote
// it: control characters, bidirectional marks and broken UTF-8 appear escaped
// (CVE-2021-25743). Lines, as those of joined errors, are separated by semicolons.
func printable(text string) string {
	var b strings.Builder
	for i, r := range text {
		_, size := utf8.DecodeRuneInString(text[i:])
		if r == '\n' {
			b.WriteString("; ")
			continue
		}
		if r == utf8.RuneError && size == 1 || !unicode.IsPrint(r) {
			quoted := strconv.QuoteToASCII(text[i : i+size])
			b.WriteString(quoted[1 : len(quoted)-1])
			continue
		}
		b.WriteRune(r)
	}
	return b.String()
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
