package main

import (
	"bytes"
	"context"
	_ "embed" // for kernelVocabulary
	"io"
	"os"
	"regexp"
	"strings"
	"sync"
	"unicode/utf8"
)

// Containers can write to logs and lists not only by their output: a process chooses its
// name (prctl, /proc/self/comm), and kernel and server quote the name. It has up to 15
// bytes, which may be escaped.

const redacted = "<redacted>"

// rewrite is a pattern with its replacement.
type rewrite struct {
	pattern *regexp.Regexp
	by      string
}

func rewriteAll(text []byte, all []rewrite) []byte {
	for _, r := range all {
		text = r.pattern.ReplaceAll(text, []byte(r.by))
	}
	return text
}

// quotedProcess matches the form in which the server, systemd and the kernel name a
// process.
var quotedProcess = rewrite{regexp.MustCompile(`(process \d+) \([^\n]{0,60}\)`), "$1 (" + redacted + ")"}

// serverQuotes match attributes of the server's log that quote runtimes and processes of
// containers, as text and as JSON.
var serverQuotes = []rewrite{
	{regexp.MustCompile(`( (?:text|why)=)(?:"(?:\\.|[^"\\\n])*"|[^\s"]+)`), "${1}" + redacted},
	{regexp.MustCompile(`("(?:text|why)":)"(?:\\.|[^"\\\n])*"`), `${1}"` + redacted + `"`},
}

//go:embed debug_words.txt
var kernelVocabulary string

// kernelWords returns the words of the kernel's messages.
var kernelWords = sync.OnceValue(func() map[string]bool {
	words := make(map[string]bool)
	for word := range strings.FieldsSeq(kernelVocabulary) {
		words[word] = true
	}
	return words
})

var (
	// kernelStamp matches the time at the beginning of a line of dmesg --ctime.
	kernelStamp = regexp.MustCompile(`^\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\] `)
	// kernelCall matches a line of a stack trace.
	kernelCall = regexp.MustCompile(`^ +(?:\? +)?[\w.]+\+0x[0-9a-f]+/0x[0-9a-f]+(?: \[\w+\])?$`)
	// kernelQuoted matches a text in quotes, but not after an apostrophe, or a path.
	kernelQuoted = regexp.MustCompile("\"[^\"]*\"|\\B['`][^']*'|\\B/[^\\s,()]+")
	// kernelWord matches a word or a number. A name in another script or with escapes is
	// one word.
	kernelWord = regexp.MustCompile(`[\w\\\x{80}-\x{10ffff}]+(?:'[a-z]{1,2}\b)?`)
	// kernelNumber matches numbers. Long ones have a form that does not fit into the 15
	// bytes of a process's name.
	kernelNumber = regexp.MustCompile(`^(?:\d{1,10}(?:[kKMGT]?i?[bB]|[kKMGT]|[mun]?s|[kMG]?Hz|th)?|0x[0-9a-f]{1,16}|[0-9a-f]{16})$`)
	// kernelDisk matches a disk or partition with letters between its numbers.
	kernelDisk = regexp.MustCompile(`^(?:nvme\d{1,3}n\d{1,3}|mmcblk\d{1,3})(?:p\d{1,3})?$`)
	// kernelPart matches a part of an identifier.
	kernelPart  = regexp.MustCompile(`[A-Za-z]+`)
	kernelDigit = regexp.MustCompile(`\d`)
	// kernelMany matches several redacted words in a row.
	kernelMany = regexp.MustCompile(redacted + `(?:[^\w<>]+` + redacted + `)+`)
	// auditValue matches a field of an audit record. Values that processes choose may be in
	// hexadecimal, in which many letters have only digits.
	auditValue = regexp.MustCompile(`\b(\w+(?:\[\d+\])?)=\S*`)
	// auditNumber matches the names of fields whose values come from the kernel.
	auditNumber = regexp.MustCompile(`^(?:type|[aefs]?uid|[efs]?gid|s[ug]id|ses|p?pid|sig|syscall|compat|ip|code|exit|items|success|res|op|capability|permissive|tclass|table|family|entries)$`)
)

// kernelLine redacts a line of the kernel's log: only the time, known words and numbers
// remain. Too many messages quote names of processes, file systems, cgroups and interfaces
// of containers, and each version of the kernel adds others.
func kernelLine(line string) string {
	stamp := kernelStamp.FindString(line)
	text := line[len(stamp):]
	if stamp != "" && kernelCall.MatchString(text) {
		return line
	}
	text = kernelQuoted.ReplaceAllString(text, redacted)
	if strings.Contains(text, "audit(") {
		text = auditValue.ReplaceAllStringFunc(text, func(field string) string {
			name, _, _ := strings.Cut(field, "=")
			if auditNumber.MatchString(name) {
				return field
			}
			return name + "=" + redacted
		})
	}
	text = kernelWord.ReplaceAllStringFunc(text, func(word string) string {
		if isKernels(word) {
			return word
		}
		return redacted
	})
	return stamp + kernelMany.ReplaceAllString(text, redacted)
}

// isKernels reports whether a word is a number, or consists of known words and digits.
func isKernels(word string) bool {
	const mostDigits = 4
	word, _, _ = strings.Cut(word, "'")
	if kernelNumber.MatchString(word) || kernelDisk.MatchString(word) || word == strings.Trim(redacted, "<>") {
		return true
	}
	parts := kernelPart.FindAllString(word, -1)
	for _, part := range parts {
		if !kernelWords()[strings.ToLower(part)] {
			return false
		}
	}
	digits := kernelDigit.FindAllString(word, -1)
	return len(parts) > 0 && len(digits) <= mostDigits && !strings.ContainsFunc(word, func(r rune) bool { return r == '\\' || r >= utf8.RuneSelf })
}

// kernelLog redacts all lines of the kernel's log.
func kernelLog(text []byte) []byte {
	var out bytes.Buffer
	for line := range strings.Lines(string(text)) {
		end := line[len(strings.TrimRight(line, "\n")):]
		out.WriteString(kernelLine(strings.TrimSuffix(line, end)) + end)
	}
	return out.Bytes()
}

// serverLog redacts texts of runtimes and processes in the server's log.
func serverLog(text []byte) []byte { return rewriteAll(text, serverQuotes) }

// cleaned passes the output of write through clean.
func cleaned(write func(context.Context, io.Writer) error, clean func([]byte) []byte) func(context.Context, io.Writer) error {
	return func(ctx context.Context, w io.Writer) error {
		whole := &limited{left: partSize}
		err := write(ctx, whole)
		if _, writeErr := w.Write(clean(whole.Bytes())); err == nil {
			err = writeErr
		}
		return err
	}
}

// writeProcesses lists the processes of the node. It leaves out the names of those in
// another mount namespace, such as containers, which choose their names.
func writeProcesses(ctx context.Context, w io.Writer) error {
	const columns = 8 // before the name
	var out bytes.Buffer
	err := output("ps", "-eo", "pid,ppid,stat,wchan:32,etimes,rss,nlwp,mntns,comm")(ctx, &out)
	own, _ := os.Readlink("/proc/self/ns/mnt")
	own = strings.TrimSuffix(strings.TrimPrefix(own, "mnt:["), "]")
	for line := range strings.Lines(out.String()) {
		words := strings.Fields(line)
		if len(words) > columns && (words[columns-1] == own || words[columns-1] == "MNTNS") {
			_, _ = io.WriteString(w, line)
		} else {
			_, _ = io.WriteString(w, strings.Join(append(words[:min(len(words), columns)], "-"), " ")+"\n")
		}
	}
	return err
}
