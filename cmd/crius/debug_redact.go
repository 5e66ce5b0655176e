package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"regexp"
	"strings"
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

// stamp is what dmesg --ctime begins a line with.
const stamp = `(?m)^(\[[^\]\n]*\] `

// kernelQuotes are the names and paths of processes in the kernel's log.
var kernelQuotes = []rewrite{
	quotedProcess,
	{regexp.MustCompile(`task=[^\n]*,pid=`), "task=" + redacted + ",pid="},
	{regexp.MustCompile(stamp + `)[^\n]* invoked oom-killer:`), "${1}" + redacted + " invoked oom-killer:"},
	{regexp.MustCompile(`Comm: [^\n]*`), "Comm: " + redacted},
	{regexp.MustCompile(`task [^\n]{1,60}:(\d+) blocked`), "task " + redacted + ":${1} blocked"},
	{regexp.MustCompile(`task:[^\n]{1,60}( +state:)`), "task:" + redacted + "${1}"},
	{regexp.MustCompile(`process '[^\n]*'`), "process '" + redacted + "'"},
	{regexp.MustCompile("`[^\n]*'"), "`" + redacted + "'"},
	{regexp.MustCompile(`\b(comm|exe|name|path|cwd|dev|proctitle)=(?:"[^"\n]*"|\S+)`), "${1}=" + redacted},
	{regexp.MustCompile(stamp + `\[ *\d+\](?: +-?\d+){6,}) [^\n]*`), "${1} " + redacted}, // of the list of tasks
	{regexp.MustCompile(` in [^\n]*(\[[0-9a-f]+\+[0-9a-f]+\])`), " in " + redacted + "${1}"},
	{regexp.MustCompile(stamp + `(?:traps: )?)[^\n]{1,60}(\[\d+\]:? )`), "${1}" + redacted + "${2}"},
	{regexp.MustCompile(stamp + `)[^\n]{1,60} (\(\d+\)(?:: | used ))`), "${1}" + redacted + " ${2}"},
}

// cleaned is what write writes, rewritten.
func cleaned(write func(context.Context, io.Writer) error, all []rewrite) func(context.Context, io.Writer) error {
	return func(ctx context.Context, w io.Writer) error {
		whole := &limited{left: partSize}
		err := write(ctx, whole)
		if _, writeErr := w.Write(rewriteAll(whole.Bytes(), all)); err == nil {
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
