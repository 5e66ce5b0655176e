package main

import (
	"context"
	"fmt"
)

const (
	allocPods  = 10
	allocCalls = 1000
	allocWorks = 50 // of calls that start programs
)

// allocsRow counts what servers allocate for calls, by the metrics that every
// Go program has.
func allocsRow(ctx context.Context) (_ []table, err error) {
	c, us, them, err := newServers(ctx, "runc")
	if err != nil {
		return nil, err
	}
	defer func() { err = c.end(ctx, err) }()
	if err := c.settle(ctx); err != nil {
		return nil, err
	}
	title := fmt.Sprintf("by the server for a call, with %d pods", allocPods)
	objects := compare("Objects allocated "+title, 0, c.names()...)
	bytes := compare("KiB allocated "+title, 0, c.names()...)
	ours, err := us.allocations(ctx)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", us.label, err)
	}
	theirs, err := them.allocations(ctx)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", them.label, err)
	}
	for i, a := range ours {
		objects.line(a.call, []float64{a.objects}, []float64{theirs[i].objects})
		bytes.line(a.call, []float64{a.bytes / 1024}, []float64{theirs[i].bytes / 1024})
	}
	return []table{objects.table, bytes.table}, nil
}

// allocation is what one call costs.
type allocation struct {
	call string
	heap
}

func (s *server) allocations(ctx context.Context) (all []allocation, err error) {
	if _, err := fill(ctx, s, 0, allocPods, nodeAtOnce); err != nil {
		return nil, err
	}
	p := s.pod(podName(0))
	calls := append(s.calls(p, allocPods),
		call{"ExecSync", func(ctx context.Context) error {
			_, err := s.exec(ctx, p, s.probe)
			return err
		}},
		call{"a pod's whole life", func(ctx context.Context) error {
			_, err := live(ctx, s, "short")
			return err
		}})
	for i, call := range calls {
		times := allocCalls
		if i >= len(calls)-2 {
			times = allocWorks
		}
		h, err := s.allocates(ctx, times, call.ask)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", call.name, err)
		}
		all = append(all, allocation{call.name, h})
	}
	_, err = drain(ctx, s, allocPods, nodeAtOnce)
	return all, err
}

// allocates returns the mean cost of one call. It subtracts the cost of the
// measurement itself.
func (s *server) allocates(ctx context.Context, times int, ask func(context.Context) error) (each heap, err error) {
	const looks = 11
	var objects, bytes []float64
	last, err := s.allocated(ctx)
	for range looks {
		if err != nil {
			return each, err
		}
		before := last
		if last, err = s.allocated(ctx); err == nil {
			look := last.minus(before)
			objects, bytes = append(objects, look.objects), append(bytes, look.bytes)
		}
	}
	for range times {
		if err == nil {
			err = ask(ctx)
		}
	}
	if err != nil {
		return each, err
	}
	after, err := s.allocated(ctx)
	cost := after.minus(last).minus(heap{median(objects), median(bytes)})
	return heap{cost.objects / float64(times), cost.bytes / float64(times)}, err
}
