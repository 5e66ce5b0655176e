// Package audit compares a node with its records: it reports differences, repairs them on
// request, and searches for orphans, which are objects of crius without a record.
//
// The engine says which objects there are, and how far their verbs have come; see [Node].
package audit

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"

	"github.com/crius-run/crius/internal/fault"
)

// Finding is a difference between the node and its records, or an object without one.
type Finding struct {
	Object   string `json:"object"`           // "pod ID", "container ID", or what it is
	Name     string `json:"name,omitempty"`   // of the pod or container: namespace/pod or namespace/pod/container
	Wrong    string `json:"wrong"`            // what is wrong
	Remedy   string `json:"remedy,omitempty"` // what a repair does, or has done; empty: none is possible
	Advice   string `json:"advice,omitempty"` // what a person can do
	Minor    bool   `json:"minor,omitempty"`  // the node works all the same
	Repaired bool   `json:"repaired"`
	Err      string `json:"error,omitempty"` // why the repair failed
}

// Problem is a difference that is not reported yet.
type Problem struct {
	Wrong  string
	Remedy Remedy
	Advice string
	Minor  bool
}

// Remedy is a way to repair a problem. Remedies of one object with the same text are the same
// remedy.
type Remedy struct {
	Text string
	Do   func(context.Context) error // nil: only the start of a server can do it
}

// Repair carries out a remedy for an object, within a time limit.
type Repair func(ctx context.Context, object string, do func(context.Context) error) error

// Report collects findings. It is safe for concurrent use.
type Report struct {
	repair Repair

	mu       sync.Mutex
	findings []Finding
}

// NewReport makes an empty report. With a Repair, problems are repaired as they are added.
func NewReport(repair Repair) *Report { return &Report{repair: repair} }

// Add turns the problems of an object into findings. Once ctx has ended nothing is repaired any
// more: an observation made when the time was up may be wrong.
func (r *Report) Add(ctx context.Context, object string, problems []Problem) {
	done := map[string]error{}
	for _, p := range problems {
		f := Finding{Object: object, Wrong: p.Wrong, Remedy: p.Remedy.Text, Advice: p.Advice, Minor: p.Minor}
		if r.repair != nil && p.Remedy.Do != nil && ctx.Err() == nil {
			err, tried := done[f.Remedy]
			if !tried {
				err = r.try(ctx, object, p)
				done[f.Remedy] = err
			}
			f.Repaired = err == nil
			if err != nil {
				f.Err = fault.Text(err)
			}
		}
		r.mu.Lock()
		r.findings = append(r.findings, f)
		r.mu.Unlock()
	}
}

func (r *Report) try(ctx context.Context, object string, p Problem) error {
	err := r.repair(ctx, object, p.Remedy.Do)
	if err != nil {
		slog.WarnContext(ctx, "repair failed", "object", object, "wrong", p.Wrong, "err", err)
		return err
	}
	slog.WarnContext(ctx, "repaired", "object", object, "wrong", p.Wrong, "remedy", p.Remedy.Text)
	return nil
}

// Findings returns the findings so far, ordered by object.
func (r *Report) Findings() []Finding {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.SortedStableFunc(slices.Values(r.findings), func(a, b Finding) int { return cmp.Compare(a.Object, b.Object) })
}

// String returns the object with its name.
func (f Finding) String() string {
	if f.Name == "" {
		return f.Object
	}
	return f.Object + " (" + f.Name + ")"
}

// Mended merges the findings from before a server's start with those after it: a finding that
// is gone, and could be repaired, was repaired by the start.
func Mended(before, after []Finding) []Finding {
	all := slices.Clone(after)
	for _, f := range before {
		about := func(v Finding) bool { return v.id() == f.id() && !v.Repaired }
		same := func(v Finding) bool { return v.Object == f.Object && v.Wrong == f.Wrong }
		if slices.ContainsFunc(after, same) {
			continue
		}
		// It is repaired if nothing else is reported of the object.
		f.Repaired = f.Remedy != "" && !slices.ContainsFunc(after, about)
		all = append(all, f)
	}
	return all
}

// id returns the last word of Object.
func (f Finding) id() string { return f.Object[strings.LastIndexByte(f.Object, ' ')+1:] }
