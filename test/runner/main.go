// Command runner runs tests of this repository and counts them. `make test`
// calls it:
//
//	runner [-v] [-race] [-tags TAGS] [-run REGEXP] [PACKAGE...]
//
// With -race, packages that test Go code run with the race detector, and those
// that mostly wait for programs without it, see plan.go, which also determines
// the order.
//
// Every test program runs as root in its own PID and mount namespaces with its
// temporary files on a tmpfs, and with its own /var/lib/containers, see
// isolate.go. So whatever ends the run, whether Ctrl-C, a panic or SIGKILL, the
// kernel ends every process that the tests have started and removes their
// mounts. Cgroups are left; the runner removes its own at its end and those of
// earlier runs at its start.
//
// It prints a line for each package as it ends (-v: and for each test that has
// passed), the complete output of failed tests, the slowest packages and tests,
// and at the end one plain line:
//
//	12 passed, 0 failed, 1 skipped
//
// A test with subtests is not counted, its subtests are, unless it fails by
// itself. A package that does not build, or that fails outside of its tests,
// counts as one failure. A failed test runs again alone, see again.go. The exit
// code is 1 if anything failed.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/crius-run/crius/test/kit/claim"
)

func main() {
	actIfAsked()
	s := suite{forgiven: flakyTests}
	flag.StringVar(&s.tags, "tags", "", "build tags")
	flag.StringVar(&s.run, "run", "", "run only tests whose names match this regular expression")
	flag.BoolVar(&s.race, "race", false, "use the race detector where Go code is tested")
	verbose := flag.Bool("v", false, "print a line for each test that has passed, too")
	flag.Parse()
	s.patterns = flag.Args()
	if len(s.patterns) == 0 {
		s.patterns = []string{"./..."}
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	code := run(ctx, &s, *verbose)
	stop()
	os.Exit(code)
}

// run runs the suite between two sweeps and returns the exit code.
func run(ctx context.Context, s *suite, verbose bool) int {
	if _, err := claim.Sweep(); err != nil { // of runs that were killed
		fmt.Fprintln(os.Stderr, "runner: cannot remove what an earlier run has left:", err)
	}
	t := newTally(os.Stdout)
	t.verbose = verbose
	context.AfterFunc(ctx, t.interrupt)
	err := s.testInClaim(ctx, t)
	if ctx.Err() != nil {
		err = errors.New("interrupted")
	}
	ids, sweepErr := claim.Sweep()
	if len(ids) > 0 {
		fmt.Printf("removed what tests that were killed have left: %q\n", ids)
	}
	err = errors.Join(err, sweepErr)
	return t.conclude(err)
}

// testInClaim gives the tests a directory.
func (s *suite) testInClaim(ctx context.Context, t *tally) (err error) {
	owned, err := claim.New()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, owned.Release()) }()
	if err := os.Mkdir(owned.Dir, 0o755); err != nil {
		return err
	}
	s.tmp = owned.Dir
	return s.test(ctx, t)
}
