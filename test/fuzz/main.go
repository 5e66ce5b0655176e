// Command fuzz runs the fuzz targets of packages one after the other. `make
// fuzz` calls it:
//
//	fuzz [-tags TAGS] [-time DURATION] [-run REGEXP] PACKAGE...
//
// Each target runs for the given time, or for a number of inputs such as 1000x.
// At the end a table shows how many inputs each target has tried and how many
// of them have reached new code. If a target fails, its output is shown, the
// table says where the failing input is, and the exit status is 1.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
)

// minimize bounds how many runs Go spends on shortening an input. With its
// default, a minute, a slow target would do nothing else.
const minimize = "100x"

// endTime is how long test programs get to end after Ctrl-C.
const endTime = 30 * time.Second

// fuzzer is the command line.
type fuzzer struct {
	tags, time string
	run        *regexp.Regexp
	dir        string // of the module; empty: the current one
	out        io.Writer
}

func main() {
	f := fuzzer{out: os.Stdout}
	flag.StringVar(&f.tags, "tags", "", "build tags")
	flag.StringVar(&f.time, "time", "10s", "how long each target runs, or how many inputs it tries (1000x)")
	run := flag.String("run", "", "run only targets whose names match this regular expression")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	var err error
	if f.run, err = regexp.Compile(*run); err == nil {
		err = f.fuzz(ctx, flag.Args())
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "fuzz:", err)
		os.Exit(1)
	}
}

// fuzz runs the targets of packages and prints the table. The error says how many
// targets have failed.
func (f *fuzzer) fuzz(ctx context.Context, packages []string) error {
	listing, err := f.goTest(ctx, append([]string{"-list", "^Fuzz"}, packages...)...)
	if err != nil {
		return fmt.Errorf("list fuzz targets: %w\n%s", err, listing)
	}
	targets := f.parseList(listing)
	if len(targets) == 0 {
		return errors.New("no fuzz target matches")
	}
	failed := 0
	for i := range targets {
		t := &targets[i]
		fmt.Fprintf(f.out, "%d/%d %s %s\n", i+1, len(targets), t.pkg, t.name)
		output, err := f.goTest(ctx, "-run", "^$", "-fuzz", "^"+t.name+"$", "-fuzztime", f.time, "-fuzzminimizetime", minimize, t.pkg)
		if ctx.Err() != nil {
			return errors.New("interrupted")
		}
		if t.parseRun(output, err); t.result != resultOK {
			failed++
			fmt.Fprint(f.out, output)
		}
	}
	if err := report(f.out, targets); err != nil {
		return err
	}
	if failed > 0 {
		return fmt.Errorf("%d of %d fuzz targets failed", failed, len(targets))
	}
	return nil
}

// goTest runs `go test` and returns what it prints.
func (f *fuzzer) goTest(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", append([]string{"test", "-vet=off", "-tags", f.tags}, args...)...)
	cmd.Dir = f.dir
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = endTime
	output, err := cmd.CombinedOutput()
	return string(output), err
}

// target is a fuzz target and, once it has run, its result.
type target struct {
	pkg, name               string
	executions, interesting string // numbers of inputs: tried, and that reached new code
	result                  string
}

// parseList parses the output of `go test -list`: the targets of a package, one
// per line, before the line of the package.
func (f *fuzzer) parseList(listing string) []target {
	var all []target
	begin := 0 // of the package
	for line := range strings.Lines(listing) {
		switch words := strings.Fields(line); {
		case len(words) == 1 && strings.HasPrefix(words[0], "Fuzz") && f.run.MatchString(words[0]):
			all = append(all, target{name: words[0]})
		case len(words) > 1 && words[0] == "ok":
			for ; begin < len(all); begin++ {
				all[begin].pkg = words[1]
			}
		}
	}
	return all
}

var (
	progress = regexp.MustCompile(`execs: (\d+) .*new interesting: (\d+)`)
	written  = regexp.MustCompile(`Failing input written to (\S+)`)
	seed     = regexp.MustCompile(`failure while testing seed corpus entry: (\S+)`)
)

// ranOut is Go's message, along with exit status 1, for a target whose time is
// over before its workers have ended, as happens on a loaded machine.
const ranOut = "\n    context deadline exceeded\n"

const resultOK = "ok"

// parseRun parses the output of `go test -fuzz`. The last progress counts.
func (t *target) parseRun(output string, err error) {
	t.executions, t.interesting, t.result = "-", "-", resultOK
	if all := progress.FindAllStringSubmatch(output, -1); len(all) > 0 {
		t.executions, t.interesting = all[len(all)-1][1], all[len(all)-1][2]
	}
	if err == nil {
		return
	}
	input, failedSeed := written.FindStringSubmatch(output), seed.FindStringSubmatch(output)
	switch {
	case input != nil:
		t.result = "FAILED: input in " + input[1] + " of the package"
	case failedSeed != nil:
		t.result = "FAILED: seed " + failedSeed[1]
	case !strings.Contains(output, ranOut):
		t.result = "FAILED: " + err.Error()
	}
}

func report(out io.Writer, targets []target) error {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "PACKAGE\tTARGET\tEXECUTIONS\tNEW INTERESTING\tRESULT")
	for _, t := range targets {
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\n", t.pkg, t.name, t.executions, t.interesting, t.result)
	}
	return table.Flush()
}
