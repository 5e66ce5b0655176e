package main

import (
	"bytes"
	"context"
	_ "embed" // of the kernel's words
	"io"
	"os"
	"regexp"
	"strings"
	"sync"
	"unicode/utf8"
)

// What containers write gets into logs and lists in more ways than by their output: a
// process names itself (prctl, /proc/self/comm), and kernel and server quote the name. The
// name has 15 bytes, which may be escaped.

const redacted = "<redacted>"

// rewrite is a pattern and what takes its place.
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

// quotedProcess is how the server, systemd and the kernel name a process.
var quotedProcess = rewrite{regexp.MustCompile(`(process \d+) \([^\n]{0,60}\)`), "$1 (" + redacted + ")"}

// serverQuotes are the attributes of the server's log that hold what runtimes and processes
// of containers have said, as text and as JSON.
var serverQuotes = []rewrite{
	{regexp.MustCompile(`( (?:text|why)=)(?:"(?:\\.|[^"\\\n])*"|[^\s"]+)`), "${1}" + redacted},
	{regexp.MustCompile(`("(?:text|why)":)"(?:\\.|[^"\\\n])*"`), `${1}"` + redacted + `"`},
}

//go:embed debug_words.txt
var kernelVocabulary string

// kernelWords are the words that the kernel's messages are made of.
var kernelWords = sync.OnceValue(func() map[string]bool {
	words := make(map[string]bool)
	for word := range strings.FieldsSeq(kernelVocabulary) {
		words[word] = true
	}
	return words
})

var (
	// kernelStamp is what dmesg --ctime begins a line with.
	kernelStamp = regexp.MustCompile(`^\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\] `)
	// kernelCall is a line of a stack trace.
	kernelCall = regexp.MustCompile(`^ +(?:\? +)?[\w.]+\+0x[0-9a-f]+/0x[0-9a-f]+(?: \[\w+\])?$`)
	// kernelQuoted is a text in quotes, which no apostrophe begins, or a path.
	kernelQuoted = regexp.MustCompile("\"[^\"]*\"|\\B['`][^']*'|\\B/[^\\s,()]+")
	// kernelWord is a word or a number; no name of another script or with escapes is two.
	kernelWord = regexp.MustCompile(`[\w\\\x{80}-\x{10ffff}]+(?:'[a-z]{1,2}\b)?`)
	// kernelNumber is one that a process's name of 15 bytes cannot be if it is long.
	kernelNumber = regexp.MustCompile(`^(?:\d{1,10}(?:[kKMGT]?i?[bB]|[kKMGT]|[mun]?s|[kMG]?Hz|th)?|0x[0-9a-f]{1,16}|[0-9a-f]{16})$`)
	// kernelDisk is a disk or partition that has letters between its numbers.
	kernelDisk = regexp.MustCompile(`^(?:nvme\d{1,3}n\d{1,3}|mmcblk\d{1,3})(?:p\d{1,3})?$`)
	// kernelPart is a part of an identifier.
	kernelPart  = regexp.MustCompile(`[A-Za-z]+`)
	kernelDigit = regexp.MustCompile(`\d`)
	// kernelMany are several words that are left out.
	kernelMany = regexp.MustCompile(redacted + `(?:[^\w<>]+` + redacted + `)+`)
	// auditValue is a field of a record of the audit system. Values that processes choose
	// may be hexadecimal, which of many letters has only digits.
	auditValue = regexp.MustCompile(`\b(\w+(?:\[\d+\])?)=\S*`)
	// auditNumber is the name of a field whose value is the kernel's.
	auditNumber = regexp.MustCompile(`^(?:type|[aefs]?uid|[efs]?gid|s[ug]id|ses|p?pid|sig|syscall|compat|ip|code|exit|items|success|res|op|capability|permissive|tclass|table|family|entries)$`)
)

// kernelLine is a line of the kernel's log, of which only the time, known words and
// numbers are left: too many messages quote names that processes, file systems, cgroups
// and interfaces of containers have, and each version of the kernel adds others.
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

// isKernels reports whether a word is a number, or made of words of the kernel and digits.
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

// kernelLog is all lines of text as kernelLine leaves them.
func kernelLog(text []byte) []byte {
	var out bytes.Buffer
	for line := range strings.Lines(string(text)) {
		end := line[len(strings.TrimRight(line, "\n")):]
		out.WriteString(kernelLine(strings.TrimSuffix(line, end)) + end)
	}
	return out.Bytes()
}

// serverLog is the server's log without what runtimes and processes have said.
func serverLog(text []byte) []byte { return rewriteAll(text, serverQuotes) }

// cleaned is what write writes, as clean leaves it.
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

// writeProcesses lists the processes of the node. Those in another mount namespace, as
// containers are, have no name: it is what they say it is.
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
