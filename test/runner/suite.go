package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"time"
)

// atOnce is how many packages are built or run at once. Tests mostly wait, and
// several of a package run at once, but with more packages two CPUs only make
// everything later.
const atOnce = 3

// limit is how long a package may take: it is for hanging tests. A test that is
// merely slow, on a slow machine, must not reach it.
const limit = time.Hour

// suite is the command line.
type suite struct {
	tags, run string
	race      bool // run packages that test Go code with the race detector
	patterns  []string
	forgiven  string // see flaky.txt
	dir       string // of the module; empty: the current one
	tmp       string // an empty directory, over which each test program has a tmpfs
}

// test runs everything, and failed tests again.
func (s *suite) test(ctx context.Context, t *tally) error {
	packages, err := s.plan(ctx)
	if err != nil {
		return err
	}
	var kinds sync.WaitGroup
	errs := make([]error, 2)
	for i, race := range []bool{true, false} {
		kind := slices.DeleteFunc(slices.Clone(packages), func(p string) bool { return s.raced(p) != race })
		if len(kind) == 0 {
			continue
		}
		share := atOnce
		if len(kind) < len(packages) { // the other kind runs concurrently
			share = map[bool]int{true: atOnce - 1, false: 1}[race]
		}
		kinds.Go(func() { errs[i] = s.goTest(ctx, t, race, share, s.run, kind) })
	}
	kinds.Wait()
	if err := errors.Join(errs...); err != nil || ctx.Err() != nil {
		return err
	}
	return s.again(ctx, t)
}

// goTest runs `go test`, with the race detector or without, on that many
// packages at once, and feeds the tally. An error means that it failed although
// no test did.
func (s *suite) goTest(ctx context.Context, t *tally, race bool, atOnce int, run string, packages []string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cgo := "CGO_ENABLED=0"
	// Go's cache of results does not consider the programs that tests build and
	// run.
	argv := []string{"go", "test", "-json", "-count=1", "-vet=off", "-tags", s.tags, "-timeout", limit.String(), "-run", run,
		"-p", fmt.Sprint(atOnce), "-exec", self + " " + isolateRole}
	if race {
		cgo = "CGO_ENABLED=1"
		argv = append(argv, "-race")
	}
	cmd := exec.CommandContext(ctx, argv[0], append(argv[1:], packages...)...)
	cmd.Dir = s.dir
	// The race detector would delay the exit of every program by a second.
	cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0", cgo, tmpVariable+"="+s.tmp)
	return read(cmd, t)
}

// read runs a command that prints events, one per line, and feeds the tally
// with them. It prints other lines unchanged. The command is a process group,
// which is interrupted when the context ends.
func read(cmd *exec.Cmd, t *tally) error {
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	cmd.WaitDelay = 30 * time.Second
	events, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return err
	}
	failed := t.failedCount()
	readErr := t.read(events)
	if err := errors.Join(cmd.Wait(), readErr); err != nil && t.failedCount() == failed {
		return fmt.Errorf("%v: %w", cmd.Args, err)
	}
	return nil
}

// read feeds the tally with events, one per line. It prints other lines
// unchanged.
func (t *tally) read(r io.Reader) error {
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if json.Unmarshal(line, &e) == nil && e.Action != "" {
				t.add(e)
			} else {
				t.show(string(line))
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
