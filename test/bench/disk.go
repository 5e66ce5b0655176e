package main

import (
	"context"

	"github.com/crius-run/crius/test/kit/node"
)

// diskRow does on the machine's disk what other rows do on a tmpfs: there is no
// floor, which writes nothing that must outlive a power cut.
func diskRow(ctx context.Context) (tables []table, err error) {
	const handler = "runc"
	c, us, them, err := newServersOn(ctx, handler, node.Options{Disk: true})
	if err != nil {
		return nil, err
	}
	defer func() { err = c.end(ctx, err) }()
	if err := c.settle(ctx); err != nil {
		return nil, err
	}
	if tables, err = c.lives(ctx, handler); err != nil {
		return nil, err
	}
	p := pulls{c.names(), []*server{us, them}}
	for _, part := range []func(context.Context) (table, error){p.large, p.deep, p.small} {
		t, err := part(ctx)
		if err != nil {
			return nil, err
		}
		tables = append(tables, t)
	}
	for i := range tables {
		tables[i].title = "On a disk: " + tables[i].title
	}
	return tables, nil
}
