// Soak runs nodes for a long time, and checks what grows.
//
//	go run ./test/soak [-hours N] [-seed N] [-workers N]
//
// On two nodes pods are created, crash, are restarted, probed, attached to,
// forwarded to, read, resized, measured and removed at random, while images are
// pulled and removed (life.go). On one node the server lives as long as the
// soak; on the other it is stopped or killed at random and restarted. A few
// pods stay from the beginning to the end and are queried all the time.
//
// After each round of lives a node must come to rest and is measured: what its
// server holds, what the monitors of the permanent pods hold, and everything on
// the node (count.go). At the end each counter is printed with its slope. A
// counter that grows by more than its noise and more steadily than by chance
// (trend.go) fails the soak, as does any call that the kubelet of a healthy
// node would not have to repeat.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/crius-run/crius/test/kit/claim"
	"github.com/crius-run/crius/test/scene"
)

func main() {
	s := soak{out: os.Stdout}
	hours := flag.Float64("hours", 1, "how long")
	flag.Uint64Var(&s.seed, "seed", uint64(time.Now().UnixNano()), "of what is random")
	flag.IntVar(&s.workers, "workers", 3, "pods that come and go at the same time, on each node")
	handlers := flag.String("handlers", strings.Join(scene.Handlers, ","), "runtime handlers of the pods, separated by commas; also those of test/kit/tools, such as shim-kata1")
	flag.Parse()
	s.handlers = strings.Split(*handlers, ",")
	s.length = time.Duration(*hours * float64(time.Hour))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := s.run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1)
	}
}

// soak is two nodes.
type soak struct {
	length   time.Duration
	seed     uint64
	workers  int
	handlers []string
	out      io.Writer

	mu sync.Mutex // of out
}

func (s *soak) run(ctx context.Context) error {
	fmt.Fprintf(s.out, "soak of %v, seed %d\n", s.length, s.seed)
	if _, err := claim.Sweep(); err != nil { // left by a run that was killed
		return err
	}
	kinds := []struct {
		name   string
		shaken bool
	}{{"steady", false}, {"shaken", true}}
	errs := make([]error, len(kinds))
	nodes := make([]*soakNode, len(kinds))
	var both sync.WaitGroup
	for i, kind := range kinds {
		both.Go(func() {
			nodes[i], errs[i] = s.live(ctx, kind.name, kind.shaken)
			if errs[i] != nil {
				errs[i] = fmt.Errorf("%s: %w", kind.name, errs[i])
			}
		})
	}
	both.Wait()
	for _, h := range nodes {
		if h != nil {
			errs = append(errs, h.report(s.out))
		}
	}
	return errors.Join(errs...)
}

// live runs one node to the end of the soak.
func (s *soak) live(ctx context.Context, name string, shaken bool) (_ *soakNode, err error) {
	h, err := newSoakNode(ctx, name, shaken, s.seed, s.handlers)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, h.Close()) }()
	began := time.Now()
	for round := 0; time.Since(began) < s.length || round < 2; round++ {
		if err := h.round(ctx, s.workers); err != nil {
			return h, fmt.Errorf("round %d: %w\nend of the server's log:\n%s", round, err, h.LogTail(20))
		}
		if err := h.measure(ctx, time.Since(began)); err != nil {
			return h, err
		}
		s.mu.Lock()
		fmt.Fprintf(s.out, "%s: %v, round %d: %v\n", name, time.Since(began).Round(time.Second), round, &h.tally)
		s.mu.Unlock()
	}
	return h, h.end(ctx)
}
