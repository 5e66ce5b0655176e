// Probe is the single program in the test images: a static binary that does
// what a test says and reports what it sees.
//
// A command line is one or more steps separated by ";", each a verb with its
// arguments; the first failing step ends the program with code 1:
//
//	probe echo hello ; sleep 1s ; exit 3
//
// SIGTERM, SIGINT and SIGHUP end it with 128 plus the signal's number, also as
// PID 1, unless a step says otherwise.
package main

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"sort"
	"strings"
	"syscall"
)

// A verb is one thing the probe can do.
type verb struct {
	usage string
	run   func(args []string) error
}

func verbs() map[string]verb {
	return map[string]verb{
		"echo":  {"[-err] WORD...: print the words", echo},
		"lines": {"N [PAUSE]: print \"line 1\" to \"line N\"", numberedLines},
		"noise": {"[-err] N: print N bytes of noise, always the same", noise},
		"flood": {"[-err] [PAUSE]: print 60 kB at once and for ever, as fast as it is taken or with a pause each time", flood},
		"bytes": {"[-err] N [WIDTH]: print N numbered bytes, a newline after each WIDTH", numberedBytes},
		"facts": {": print package facts' view of this process as JSON", printFacts},

		"exit":      {"CODE: end with this code", exit},
		"sleep":     {"[DURATION]: wait, for ever when none is given", sleep},
		"trap":      {"SIGNAL...: print ready, wait for one of the signals and print it", trap},
		"ignore":    {"SIGNAL...: do nothing on these signals from now on but print them", ignore},
		"alloc":     {"MIB: take and touch that much memory", alloc},
		"burn":      {"[DURATION]: keep one CPU busy, for ever when none is given", burn},
		"fork":      {"N STEP: start N children that run one step each", fork},
		"orphan":    {"STEP: start one grandchild whose parent is gone", orphan},
		"outlive":   {"STEP: run a child with one step and wait for its end, however it ends", outlive},
		"suicide":   {"SIGNAL: kill this process", suicide},
		"run":       {"PROGRAM [ARG...]: run a program and wait for it", runProgram},
		"overwrite": {": keep the programs of other processes open, write to them once they have ended, and print sees, and then kept or written, for each", overwrite},
		"pose":      {"NAME [ARG...]: print ready and sleep as a process of this name with these arguments, in which {upper} is the host's path of /", pose},

		"write":   {"FILE TEXT: create or overwrite", write},
		"sparse":  {"FILE BYTES: make a file of this size without a block", sparse},
		"fill":    {"FILE MIB: write so much into it, or what there is room for, and print the MiB that it has then", fill},
		"fifo":    {"FILE: make a named pipe", fifo},
		"diary":   {"FILE: add a line with the time", diary},
		"cat":     {"[FILE]: copy the file, or standard input, to standard output", cat},
		"ls":      {"DIR: names, one a line", list},
		"sum":     {"DIR: print the SHA-256 of all files below, by name, size and content", sum},
		"stat":    {"PATH: octal mode, uid, gid, size", stat},
		"inode":   {"PATH: device and inode of the file, links followed", inode},
		"open":    {"PATH r|w|rw: open it, print ok", open},
		"copy":    {"FROM TO: copy a file", copyFile},
		"chown":   {"PATH UID GID: give it away", chown},
		"note":    {"FILE WORD...: add a line with the words", note},
		"ring":    {"FILE I N: as number I of N who take turns, print the number in the file and write the next one; fail if others had no turn, or two", ring},
		"remove":  {"FILE: remove it", remove},
		"await":   {"FILE: wait until it exists", await},
		"remount": {"PATH [ro|nosuid|nodev|noexec...]: change a mount's flags to these", remount},
		"try":     {"SYSCALL: make a harmless call of this kind, print ok or the error's name", try},

		"serve":  {"ADDR TEXT: answer HTTP with the text; /facts, /get?url=, /exists?file= and gRPC's health checks too", serve},
		"get":    {"[-now] URL: print what an HTTP server answers, waiting for it unless told not to", get},
		"tcp":    {"ADDR echo|digest|noise N|flood|mute|bye|reset|refuse: serve TCP in the background", tcp},
		"ping":   {"ADDR: send an ICMP echo request without privileges, print the size of the answer", ping},
		"line":   {": read a line from standard input and print it quoted", line},
		"until":  {"WORD: print lines of standard input until one is the word", until},
		"digest": {": print length and SHA-256 of standard input once it has ended", digest},
		"sizes":  {": print columns and rows of the terminal now and whenever they change", sizes},
		"tty":    {": print rows and columns of the terminal on standard input", tty},
	}
}

func main() {
	dieOnSignals()
	if name := os.Getenv(poseEnv); name != "" {
		posing(name)
	}
	for _, step := range steps(os.Args[1:]) {
		if err := run(step); err != nil {
			fmt.Fprintln(os.Stderr, "probe:", err)
			os.Exit(1)
		}
	}
}

var errUsage = errors.New("wrong arguments")

func run(step []string) error {
	all := verbs()
	v, ok := all[step[0]]
	if !ok {
		var names []string
		for n, v := range all {
			names = append(names, n+" "+v.usage)
		}
		sort.Strings(names)
		return fmt.Errorf("no verb %q; there are:\n%s", step[0], strings.Join(names, "\n"))
	}
	err := v.run(step[1:])
	if errors.Is(err, errUsage) {
		return fmt.Errorf("%s %s", step[0], v.usage)
	}
	return err
}

// steps splits the command line at each ";".
func steps(args []string) [][]string {
	var out [][]string
	for len(args) > 0 {
		n := slices.Index(args, ";")
		if n < 0 {
			n = len(args)
		}
		if n > 0 {
			out = append(out, args[:n])
		}
		args = args[min(n+1, len(args)):]
	}
	return out
}

// dieOnSignals is needed because the kernel ignores signals without a handler
// for PID 1.
func dieOnSignals() {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	go func() {
		s := <-c
		os.Exit(128 + int(s.(syscall.Signal)))
	}()
}
