package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/crius-run/crius/test/kit/critest"
	"github.com/crius-run/crius/test/kit/tools"
)

// selectsNRI reports whether the contracts of NRI are wanted with a handler, and tried with it.
func selectsNRI(focus, handler string) (bool, error) {
	matches, err := regexp.MatchString(focus, "NRI")
	return matches && slices.Contains(allHandlers(), handler), err
}

// runNRI runs TestNRI with a handler, and adds each of its contracts to the result.
func runNRI(ctx context.Context, handler string, log io.Writer, r *critest.Result) error {
	repo, err := tools.Repository()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "test", "-json", "-count=1", "-vet=off", "-tags", tools.BuildTags,
		"-run", "^TestNRI$/./^"+regexp.QuoteMeta(handler)+"$", "./test/conformance")
	cmd.Dir = repo
	cmd.Stderr = log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // the test with it
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	cmd.WaitDelay = 30 * time.Second
	events, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return err
	}
	ran, failed, output := count(events, log, r)
	if err := cmd.Wait(); ran == 0 || err != nil && failed == 0 { // but what they have in common, or the build
		r.Fail("NRI", fmt.Sprintf("%d contracts were held (%v)\n%s", ran, err, output))
	}
	return nil
}

// count reads what go test -json says of the contracts, copies their output to the log, and
// adds them to the result. It returns how many have ended and failed, and what was said of
// none of them.
func count(events io.Reader, log io.Writer, r *critest.Result) (ran, failed int, output string) {
	said := map[string]string{} // by contract
	lines := bufio.NewScanner(events)
	for lines.Scan() {
		var e struct{ Action, Test, Output string }
		if json.Unmarshal(lines.Bytes(), &e) != nil {
			continue
		}
		fmt.Fprint(log, e.Output)
		name := ""
		if part := strings.Split(e.Test, "/"); len(part) == 3 { // the test, the contract, the handler
			name = "NRI " + strings.ReplaceAll(part[1], "_", " ")
		}
		said[name] += e.Output
		switch {
		case name == "":
		case e.Action == "fail":
			ran++
			failed++
			r.Fail(name, said[name])
		case e.Action == "pass":
			ran++
			r.Pass()
		}
	}
	if err := lines.Err(); err != nil {
		failed++
		r.Fail("NRI", err.Error())
	}
	return ran, failed, said[""]
}
