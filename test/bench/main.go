// Bench measures crius beside its peers, in one run and with the same work for
// both:
//
//	go run ./test/bench [ROW...]
//
// A row is one thing that is measured; without an argument all of them are. It
// takes root and the peer's Debian package, which `make bench` installs. What
// is printed are medians of rounds in which crius and the peer take turns, so
// that a machine that is busy for a while is so for both.
package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"slices"
	"syscall"
)

// A row measures and returns its tables.
type row func(ctx context.Context) ([]table, error)

var rows = map[string]row{
	"log":     logRow,
	"node":    nodeRow,
	"pods":    podsRow,
	"restart": restartRow,
	"stats":   statsRow,
	"steps":   stepsRow,
}

func main() {
	if len(os.Args) > 1 && os.Args[1] == floodRole {
		flood(os.Args[2:])
		return
	}
	if len(os.Args) == 3 && os.Args[1] == floorRole {
		if err := serveFloor(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, "floor:", err)
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	names := os.Args[1:]
	if len(names) == 0 {
		names = slices.Sorted(maps.Keys(rows))
	}
	for _, name := range names {
		if err := measure(ctx, name); err != nil {
			fmt.Fprintf(os.Stderr, "bench: %s: %v\n", name, err)
			os.Exit(1)
		}
	}
}

func measure(ctx context.Context, name string) error {
	r, ok := rows[name]
	if !ok {
		return fmt.Errorf("no such row; there are %v", slices.Sorted(maps.Keys(rows)))
	}
	tables, err := r(ctx)
	if err != nil {
		return err
	}
	for _, t := range tables {
		t.print(os.Stdout)
	}
	return nil
}
