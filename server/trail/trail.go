// Package trail keeps the audit trail: a record of each exec, attach, port-forward and log
// reopening that people ask for.
//
// Records go to the journal, with fields that can be searched for, if the server's log does; to
// the server's log otherwise; and to a file or a socket if one is configured. They do not depend
// on log_level. What a kubelet does by itself, probes and hooks by ExecSync and the rotation of
// logs, is recorded only if asked for.
//
// Nothing waits for the trail: Entry.End hands the record to a queue. If the queue is full, since
// a disk or journald hangs, the record is lost; the log says how many were.
package trail

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"

	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/pod/view"
)

// Levels of the trail.
const (
	None   = "none"
	People = "people" // all but what a kubelet does by itself
	All    = "all"
)

// Nodes has the names of pods and containers.
type Nodes interface {
	Container(id string) (*view.Container, error)
	Sandbox(id string) (*view.Sandbox, error)
}

// Options say where records go.
type Options struct {
	Level   string
	File    string // or unix socket, which gets JSON lines as well; empty: none
	Journal string // socket of journald; empty: records go to the log
}

// Trail is where records go. A nil one records nothing.
type Trail struct {
	nodes Nodes
	level atomic.Pointer[string]
	file  atomic.Pointer[string]
	queue chan Record
	lost  atomic.Uint64
	stop  chan struct{}
	ended chan struct{}
	to    sinks
}

// queueSize is how many records wait for a disk or journald, some MiB at the worst.
const queueSize = 512

// New returns a trail that writes until Close.
func New(ctx context.Context, opt Options, nodes Nodes) *Trail {
	t := &Trail{nodes: nodes, queue: make(chan Record, queueSize), stop: make(chan struct{}), ended: make(chan struct{})}
	t.to.journal = opt.Journal
	t.Set(opt.Level, opt.File)
	go func() {
		defer close(t.ended)
		panics.Run(ctx, "write audit records", func() { t.write(ctx) })
	}()
	return t
}

// Set changes what is recorded from now on, and in which file.
func (t *Trail) Set(level, file string) {
	t.level.Store(&level)
	t.file.Store(&file)
}

// Setting returns what was set last.
func (t *Trail) Setting() (level, file string) { return *t.level.Load(), *t.file.Load() }

// Close writes what is queued, but does not wait beyond ctx. Records that come later are lost.
func (t *Trail) Close(ctx context.Context) error {
	close(t.stop)
	select {
	case <-t.ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("write the last audit records: %w", context.Cause(ctx))
	}
}

func (t *Trail) take(r Record) {
	select {
	case t.queue <- r:
	default:
		t.lost.Add(1)
	}
}

func (t *Trail) write(ctx context.Context) {
	defer t.to.close()
	for {
		select {
		case r := <-t.queue:
			t.put(ctx, r)
		case <-t.stop:
			for {
				select {
				case r := <-t.queue:
					t.put(ctx, r)
				default:
					return
				}
			}
		}
	}
}

func (t *Trail) put(ctx context.Context, r Record) {
	t.to.put(ctx, r, *t.file.Load())
	if lost := t.lost.Swap(0); lost > 0 {
		slog.WarnContext(ctx, "audit records lost: the journal, or the file of api.audit_file, takes them too slowly", "count", lost)
	}
}

// name fills in the names of the pod and the container of a request.
func (r *Record) name(nodes Nodes, of Request) {
	pod := of.ID
	if of.Verb != PortForward {
		r.ContainerID, pod = cut(of.ID), ""
		if c, err := nodes.Container(of.ID); err == nil {
			r.ContainerID, r.Container, pod = c.ID, c.Config.GetMetadata().GetName(), c.SandboxID
		}
	}
	if r.PodID = cut(pod); pod == "" {
		return
	}
	if p, err := nodes.Sandbox(pod); err == nil {
		m := p.Config.GetMetadata()
		r.PodID, r.Pod, r.Namespace, r.PodUID = p.ID, m.GetName(), m.GetNamespace(), m.GetUid()
	}
}

// cut bounds a text.
func cut(text string) string {
	return strings.ToValidUTF8(text[:min(len(text), maxText)], "?")
}
