package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/crius-run/crius/conmon/shim"
	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/fault"
)

// create starts the shim, or finds the running one, and creates the container through it.
// If it fails or is killed, the server cleans up: it knows the directory.
func (a arguments) create(ctx context.Context) error {
	p := a.program
	if a.guest { // otherwise the kernel reports OOM kills
		p.Events = filepath.Join(p.Dir, eventSocket)
	}
	// Shims write their log to this file in their working directory. They do not create it.
	words, err := os.OpenFile(filepath.Join(p.Dir, shim.LogFile), os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer words.Close()
	endpoint, err := p.Begin(ctx)
	if err != nil {
		return err
	}
	r := shim.Record{Endpoint: endpoint, Program: p.Path, Leader: leads(p.Dir), Sandboxed: a.guest}
	if err := r.Write(p.Dir); err != nil {
		return err
	}
	client, err := endpoint.Meet(ctx)
	if err != nil {
		return said(p.Dir, err)
	}
	defer client.Close()
	io, endInput, err := a.stdio()
	if err != nil {
		return err
	}
	pid, err := client.Create(ctx, p, io)
	if err != nil {
		return said(p.Dir, err)
	}
	endInput(ctx, client)
	if r.Process, err = client.Shim(ctx, p.ID); err != nil {
		return fmt.Errorf("find the shim's process: %w", err)
	}
	if err := r.Write(p.Dir); err != nil {
		return err
	}
	if pid == 0 && r.Sandboxed {
		pid = r.Process.PID
	}
	if !r.Sandboxed {
		if err := shim.CheckPID(pid); err != nil {
			return fmt.Errorf("find the container's process: %w", err)
		}
	}
	return os.WriteFile(a.pidFile, []byte(strconv.Itoa(pid)), 0o600)
}

// leads reports whether the shim was just started in this directory, and not for another
// container before.
func leads(dir string) bool {
	return slices.ContainsFunc(shim.Workers(dir), func(w wire.Process) bool { return w.PID != os.Getpid() })
}

// inputTime is how long a shim may take to open the container's standard input once it has
// created the container.
const inputTime = time.Minute

// stdio returns the streams of the container. The caller calls endInput once the container
// has them.
//
// With runc, a container without an input gets one that ends at once: runc's shim would
// pass the node's /dev/null, and root in the container could change the owner and mode of
// that if runc does not set up /dev.
func (a arguments) stdio() (io shim.Stdio, endInput func(context.Context, *shim.Client), err error) {
	path := func(name string) string { return filepath.Join(a.program.Dir, name) }
	io = shim.Stdio{Stdout: path(wire.StdoutFifo), Terminal: a.terminal}
	if !a.terminal {
		io.Stderr = path(wire.StderrFifo)
	}
	switch {
	case a.stdin:
		io.Stdin = path(wire.StdinFifo)
	case a.runc && !a.terminal:
		fifo, err := shim.NewFifo(path(wire.StdinFifo))
		if err != nil {
			return io, nil, err
		}
		io.Stdin = fifo.Path
		return io, func(ctx context.Context, client *shim.Client) {
			reading, cancel := context.WithTimeout(ctx, inputTime)
			defer cancel()
			err := fifo.AwaitReader(reading)
			fifo.Close()
			if err := errors.Join(err, client.CloseStdin(ctx, shim.Process{ID: a.program.ID})); err != nil {
				fmt.Fprintln(os.Stderr, "cannot end the container's standard input:", err)
			}
		}, nil
	}
	return io, func(context.Context, *shim.Client) {}, nil
}

const eventSocket = "events.sock"

// said adds the end of the shim's log to err if the shim has died.
func said(dir string, err error) error {
	if !errors.Is(err, shim.ErrGone) && !errors.Is(err, fault.NotFound) {
		return err
	}
	const end = 2048
	text, _ := os.ReadFile(filepath.Join(dir, shim.LogFile))
	if text = text[max(0, len(text)-end):]; len(text) > 0 {
		return fmt.Errorf("%w; last lines of the shim's log: %s", err, text)
	}
	return err
}
