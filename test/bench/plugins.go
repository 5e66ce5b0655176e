package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/crius-run/crius/test/kit/nriplugin"
)

const (
	pluginPods   = 30
	pluginRounds = 6
)

// pluginCounts are the numbers of NRI plugins on the nodes.
var pluginCounts = []int{0, 1, 10}

// pluginsRow runs pods on nodes with NRI plugins that receive all events and
// change nothing, in turn.
func pluginsRow(ctx context.Context) (_ []table, err error) {
	const handler = "runc"
	pods, err := amount("PODS", pluginPods)
	if err != nil {
		return nil, err
	}
	c := &contest{}
	defer func() { err = c.end(ctx, err) }()
	for _, count := range pluginCounts {
		s, err := newCrius(ctx, handler)
		if err != nil {
			return nil, err
		}
		s.label = fmt.Sprintf("%d plugins", count)
		c.targets = append(c.targets, s)
		if err := s.connect(ctx, count); err != nil {
			return nil, err
		}
	}
	if err := c.settle(ctx); err != nil {
		return nil, err
	}
	rounds := min(pluginRounds, pods)
	results := make([]outcome, len(c.targets))
	for round := range rounds {
		for i, t := range c.targets {
			o, err := accounted(ctx, t, pods/rounds, 1, func(ctx context.Context, n int) (life, error) {
				return live(ctx, t, fmt.Sprintf("%d-%d", round, n))
			})
			if err != nil {
				return nil, err
			}
			results[i].add(o)
		}
	}
	title := fmt.Sprintf("Pods with %s and idle NRI plugins, one at a time, %d each: ms", handler, pods/rounds*rounds)
	return []table{livesTable(title, c.names(), results)}, nil
}

// connect connects idle NRI plugins to crius, which disconnect when the server ends.
func (s *server) connect(ctx context.Context, plugins int) error {
	for i := range plugins {
		p := &nriplugin.Plugin{}
		if err := p.Connect(ctx, s.on.Path("nri.sock"), fmt.Sprintf("%02d", i), "idle"); err != nil {
			return fmt.Errorf("NRI plugin: %w", err)
		}
		select {
		case <-p.Synced():
		case <-p.Closed():
			return errors.New("crius has dropped an NRI plugin")
		}
	}
	return nil
}
