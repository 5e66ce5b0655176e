// Command count runs a `go test -json` command and tells what became of it: a
// line for each package as it ends, the whole output of what failed, and at the
// end one plain line to be read by people and programs:
//
//	12 passed, 0 failed, 1 skipped
//
// A test with subtests is not counted, its subtests are, unless it fails for a
// reason of its own. A package that does not build, or that fails outside of
// its tests, counts as one failure. The exit code is 1 if anything failed.
//
//	count go test -json ./...
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "count: usage: count go test -json PACKAGE...")
		os.Exit(2)
	}
	os.Exit(run(os.Args[1:], os.Stdout))
}

// run runs the command and returns the exit code.
func run(argv []string, out io.Writer) int {
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stderr = os.Stderr
	events, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "count: %v\n", err)
		return 2
	}
	t := newTally(out)
	readErr := read(events, t)
	if err := cmd.Wait(); (err != nil || readErr != nil) && t.failed == 0 {
		t.failed++
		fmt.Fprintf(out, "FAIL  %v: %v %v\n", argv, err, readErr)
	}
	fmt.Fprintf(out, "%d passed, %d failed, %d skipped\n", t.passed, t.failed, t.skipped)
	if t.failed > 0 {
		return 1
	}
	return 0
}

// read feeds the tally with events, which stand on a line each. Other lines are
// shown as they are.
func read(r io.Reader, t *tally) error {
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if json.Unmarshal(line, &e) == nil && e.Action != "" {
				t.add(e)
			} else {
				fmt.Fprint(t.out, string(line))
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
