package tuning

import (
	"context"
	"log/slog"
	"slices"

	"google.golang.org/protobuf/proto"
)

// This file makes what is done for a container follow an update of its CPUs.

// Follow returns the plan of a container that was created with p, for the limits that it has now. If
// the CPUs are no longer exclusive, nothing is done for them.
func (t *Tuner) Follow(p Plan, c Container) (Plan, error) {
	cpus, err := ParseSet(c.Limits.GetCpusetCpus())
	if err != nil {
		return Plan{}, err
	}
	cpus = cpus.minus(p.Shared)
	if slices.Equal(cpus, p.CPUs) {
		return p, nil
	}
	c.Limits = proto.CloneOf(c.Limits)
	c.Limits.CpusetCpus = cpus.String()
	quiet, housekeeping := len(p.Quiet) > 0, len(p.Housekeeping) > 0
	p.CPUs, p.Quiet, p.Housekeeping = own(c), nil, nil
	if len(p.CPUs) == 0 {
		p.NoBalancing = false
		return p, nil
	}
	if housekeeping {
		siblings, err := t.siblings(p.CPUs[0])
		if err != nil {
			return Plan{}, err
		}
		p.Housekeeping = p.CPUs.and(siblings)
	}
	if quiet {
		p.Quiet = p.CPUs.minus(p.Housekeeping)
	}
	return p, nil
}

// MayMove refuses a plan that Move could not carry out. A container for which nothing is done yet
// may have any.
func (t *Tuner) MayMove(id string, p *Plan) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	now, found := t.now.Containers[id]
	if !found || now.sameCPUs(p) {
		return t.known()
	}
	_, err := t.with(id, claim{Plan: *p, Cgroup: now.Cgroup})
	return err
}

// Move carries out another plan for a container: it gives the CPUs back that the container had, and
// does for its new ones what was done for those. What cannot be done now is retried, and once it is
// on record by the next server as well. A container for which nothing is done yet, or no longer, is
// left alone.
func (t *Tuner) Move(ctx context.Context, id string, p *Plan) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.known(); err != nil {
		return err
	}
	delete(t.pending, id)
	err := t.move(ctx, id, p)
	if err == nil {
		return nil
	}
	slog.WarnContext(ctx, "CPU settings cannot follow the container to other CPUs, retrying", "container", id, "err", err)
	t.pending[id] = p
	t.Later("CPU settings of "+id, func(ctx context.Context) error {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.pending[id] != p { // moved elsewhere meanwhile, or ended
			return nil
		}
		err := t.move(ctx, id, p)
		if err == nil {
			delete(t.pending, id)
		}
		return err
	})
	return nil
}

// move requires mu.
func (t *Tuner) move(ctx context.Context, id string, p *Plan) error {
	now, found := t.now.Containers[id]
	if !found || now.sameCPUs(p) {
		return nil
	}
	next, err := t.with(id, claim{Plan: *p, Cgroup: now.Cgroup, Moving: true})
	if err != nil {
		return err
	}
	if err := t.put(ctx, next); err != nil {
		return err
	}
	t.finishMove(ctx, id)
	return nil
}

// finishMove finishes a Move that is on record, and retries it if that fails. It requires mu.
func (t *Tuner) finishMove(ctx context.Context, id string) {
	if err := t.tryMove(ctx, id); err != nil {
		slog.WarnContext(ctx, "CPU settings have not followed the container to other CPUs, retrying", "container", id, "err", err)
		t.Later("CPU settings of "+id, func(ctx context.Context) error {
			t.mu.Lock()
			defer t.mu.Unlock()
			return t.tryMove(ctx, id)
		})
	}
}

// tryMove gives back first what the container does not need any more: the mask of interrupts must
// never be empty.
func (t *Tuner) tryMove(ctx context.Context, id string) error {
	c, found := t.now.Containers[id]
	if !found || !c.Moving {
		return nil
	}
	if err := t.settle(ctx, t.now.clone()); err != nil {
		return err
	}
	if err := t.carryOut(c); err != nil {
		return err
	}
	next := t.now.clone()
	c.Moving = false
	next.Containers[id] = c
	return t.put(ctx, next)
}

// sameCPUs reports whether a plan that Follow has returned does the same as p.
func (p *Plan) sameCPUs(other *Plan) bool {
	return slices.Equal(p.CPUs, other.CPUs) && slices.Equal(p.Quiet, other.Quiet) && p.NoBalancing == other.NoBalancing
}
