package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"

	"github.com/crius-run/crius/internal/trace"
)

// spot is one edge of one step within a verb, the same in each run of it.
type spot struct {
	trace.Point
	n int // counts from 1 if a verb has the same step several times
}

// String returns what the flag -point accepts.
func (s spot) String() string {
	edge := "before"
	if s.After {
		edge = "after"
	}
	return fmt.Sprintf("%s: %s %d %s", s.Operation, s.Step, s.n, edge)
}

// decision returns what happens at a spot, in the work on an object: an error
// for the step to fail with, or nothing.
type decision func(at spot, object string) (failure string)

// gate is where the server asks at every point what to do.
type gate struct {
	listener net.Listener
	dir      string

	mu     sync.Mutex
	seen   map[trace.Point]int
	decide decision
}

func newGate() (*gate, error) {
	dir, err := os.MkdirTemp("", "crius-points-")
	if err != nil {
		return nil, err
	}
	g := &gate{dir: dir}
	if g.listener, err = net.Listen("unix", g.socket()); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	go g.serve()
	return g, nil
}

func (g *gate) socket() string { return filepath.Join(g.dir, "socket") }

func (g *gate) close() error {
	return errors.Join(g.listener.Close(), os.RemoveAll(g.dir))
}

func (g *gate) serve() {
	for {
		conn, err := g.listener.Accept()
		if err != nil {
			return
		}
		go g.answer(conn)
	}
}

func (g *gate) answer(conn net.Conn) {
	defer conn.Close()
	var at trace.Point
	if err := json.NewDecoder(conn).Decode(&at); err != nil {
		return // the server died on the way
	}
	answer := ""
	if decide, s := g.meet(at); decide != nil {
		answer = decide(s, at.Object)
	}
	fmt.Fprintln(conn, answer)
}

// meet counts a point. The object is not part of its identity: ids are new in
// each run.
func (g *gate) meet(at trace.Point) (decision, spot) {
	g.mu.Lock()
	defer g.mu.Unlock()
	at.Object = ""
	if g.decide == nil {
		return nil, spot{}
	}
	g.seen[at]++
	return g.decide, spot{at, g.seen[at]}
}

// watch has decide called at every point from now on; nil ends that.
func (g *gate) watch(decide decision) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.seen, g.decide = map[trace.Point]int{}, decide
}
