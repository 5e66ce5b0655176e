package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"

	"github.com/crius-run/crius/test/kit/node"
)

// loadRole makes this program send requests to one existing server.
const loadRole = "load"

// load runs pods on any CRI server.
func load(ctx context.Context, args []string) (err error) {
	flags := flag.NewFlagSet(loadRole, flag.ContinueOnError)
	endpoint := flags.String("endpoint", "unix:///run/crius/crius.sock", "socket of the server")
	handler := flags.String("handler", "", "RuntimeClass handler")
	image := flags.String("image", "", "image, which is pulled first; needed")
	run := flags.String("args", "sleep 1000000", "arguments of its entry point with which it does nothing for ever")
	probe := flags.String("exec", "true", "command that is executed in each container, and succeeds")
	logs := flags.String("logs", "", "directory of container logs (default: a temporary one)")
	cgroup := flags.String("cgroup", "", "parent of the pods' cgroups")
	count := flags.Int("n", 30, "how many pods")
	atOnce := flags.Int("parallel", 1, "how many of them at once")
	file := flags.String("json", "", "write the result there, too")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *image == "" || *count < 1 || *atOnce < 1 || flags.NArg() > 0 {
		return errors.New("load needs -image, at least one pod (-n) and one at once (-parallel), and no further arguments")
	}
	c := &client{
		handler: *handler, image: *image, args: strings.Fields(*run), probe: strings.Fields(*probe),
		logs: *logs, cgroup: func(string) string { return *cgroup },
	}
	if c.logs == "" {
		if c.logs, err = os.MkdirTemp("", "crius-load"); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(c.logs)) }()
	}
	if c.conn, err = node.Connect(strings.TrimPrefix(*endpoint, "unix://")); err != nil {
		return err
	}
	defer c.conn.Close()
	t, err := c.load(ctx, *count, *atOnce)
	if err != nil {
		return fmt.Errorf("%s: %w", *endpoint, err)
	}
	t.print(os.Stdout)
	if *file == "" {
		return nil
	}
	return writeJSON(*file, t)
}

func (c *client) load(ctx context.Context, count, atOnce int) (*table, error) {
	if err := c.pull(ctx, c.image, nil); err != nil {
		return nil, err
	}
	one := func(ctx context.Context, i int) (life, error) {
		return live(ctx, c, fmt.Sprintf("load-%d-%d", os.Getpid(), i))
	}
	_, err := together(ctx, 1, 1, one) // the first use of something is not measured
	var o outcome
	if err == nil {
		o, err = together(ctx, count, atOnce, one)
	}
	if err != nil {
		return nil, errors.Join(err, c.retreat(ctx))
	}
	version, err := c.version(ctx)
	if err != nil {
		return nil, err
	}
	t := livesTable(fmt.Sprintf("%d pods on %s, %d at once: ms", count, version, atOnce), []string{"server"}, []outcome{o})
	return &t, nil
}
