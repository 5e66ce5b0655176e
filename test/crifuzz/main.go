// Crifuzz makes random calls of every RPC of CRI, and knows the permitted
// results.
//
//	go run ./test/crifuzz [-count N] [-seed N] [-turns N]
//
// A sequence is some turns; a turn is one call, or several concurrent calls on
// the same objects, from several clients. Most requests are those of a kubelet;
// some have a few malformed fields, or are completely random (fields.go), under
// the name of v1 or v1alpha2. A model (model.go) knows which pods, containers
// and images exist and how far each may have come. After each turn every answer
// must have a code that the model allows, which is never Unknown or Internal,
// and lists and statuses must agree with the model. After each sequence
// everything is removed, and the node must have what it had before.
//
// A failed sequence is run again to find its shortest prefix that still fails,
// and the command that runs only that is printed.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sort"
	"strings"
	"syscall"
	"time"

	"github.com/crius-run/crius/test/kit/claim"
	"github.com/crius-run/crius/test/kit/wait"
)

func main() {
	c := campaign{out: os.Stdout}
	flag.IntVar(&c.count, "count", 100, "sequences")
	flag.IntVar(&c.turns, "turns", 40, "turns of each")
	flag.Uint64Var(&c.seed, "seed", uint64(time.Now().UnixNano()), "of the first sequence; each further one has the next")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := c.run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "crifuzz:", err)
		os.Exit(1)
	}
}

// campaign is a run of sequences.
type campaign struct {
	count, turns int
	seed         uint64
	out          io.Writer

	world *world
	tally tally
}

func (c *campaign) run(ctx context.Context) (err error) {
	fmt.Fprintf(c.out, "seed %d\n", c.seed)
	if _, err := claim.Sweep(); err != nil { // left by a run that was killed
		return err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	failed, done := 0, 0
	for ; done < c.count && ctx.Err() == nil; done++ {
		seed := c.seed + uint64(done)
		trace, err := c.try(ctx, seed, c.turns, wait.Limit)
		var f *failure
		switch {
		case ctx.Err() != nil:
		case errors.As(err, &f):
			failed++
			fmt.Fprintf(c.out, "FAIL seed %d: %v\n     %s\n", seed, f, strings.ReplaceAll(trace, "\n", "\n     "))
			c.shorten(ctx, seed, f.turns)
		case err != nil:
			return err
		}
	}
	fmt.Fprintf(c.out, "%scri fuzz: %d sequences, %d failed (seed %d)\n", &c.tally, done, failed, c.seed)
	if failed > 0 {
		return fmt.Errorf("%d sequences failed", failed)
	}
	return ctx.Err()
}

func (c *campaign) close() error {
	if c.world == nil {
		return nil
	}
	defer func() { c.world = nil }()
	return c.world.close()
}

// try runs one sequence, on a new node after a failure. It returns the last
// calls.
func (c *campaign) try(ctx context.Context, seed uint64, turns int, rest time.Duration) (trace string, err error) {
	if c.world == nil {
		if c.world, err = newWorld(ctx); err != nil {
			return "", err
		}
	}
	s := &sequence{w: c.world, seed: seed, turns: turns, tally: &c.tally, rest: rest}
	if err := s.run(ctx); err != nil {
		return s.lastCalls(12), errors.Join(err, c.close())
	}
	return "", nil
}

// attempts is how often a prefix is tried before it counts as one that does not
// fail: concurrency differs from run to run.
const attempts = 3

// restAgain is the extra time for a node on which something has failed before.
const restAgain = 20 * time.Second

// shorten looks for the shortest prefix that fails, and prints the command.
func (c *campaign) shorten(ctx context.Context, seed uint64, turns int) {
	fails := func(turns int) bool {
		for range attempts {
			if _, err := c.try(ctx, seed, turns, restAgain); err != nil {
				return ctx.Err() == nil
			}
		}
		return false
	}
	again := fails(turns)
	if again {
		turns = sort.Search(turns, func(n int) bool { return fails(n) })
	}
	command := fmt.Sprintf("make fuzz-cri COUNT=1 SEED=%d TURNS=%d", seed, turns)
	if !again {
		command += fmt.Sprintf(" (which did not fail again in %d runs)", attempts)
	}
	fmt.Fprintf(c.out, "failed: %s\n", command)
}
