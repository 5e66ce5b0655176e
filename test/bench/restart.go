package main

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	restartPerPod = 10
	restartRounds = 5
)

// restartRow kills the servers of nodes with many running containers and
// measures until the next one has recovered them and answers, and what all of
// it takes of the memory: monitors at rest must not be woken by a crash.
func restartRow(ctx context.Context) (tables []table, err error) {
	count, err := amount("CONTAINERS", 1000)
	if err != nil {
		return nil, err
	}
	pods := max(count/restartPerPod, 1)
	c, ours, theirs, err := newServers(ctx, "runc")
	if err != nil {
		return nil, err
	}
	defer func() { err = c.end(ctx, err) }()
	if err := c.settle(ctx); err != nil {
		return nil, err
	}
	var ready, before, after [][]float64
	for _, s := range []*server{ours, theirs} {
		r, err := s.restarts(ctx, pods)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.label, err)
		}
		ready = append(ready, r.took)
		before, after = append(before, []float64{r.before.memory() / 1024}), append(after, []float64{r.after.memory() / 1024})
	}
	t := compare(fmt.Sprintf("Server killed beside %d running containers, %d times: seconds", pods*restartPerPod, restartRounds), 95, c.names()...)
	t.line("from exec to the first list", ready...)
	memory := compare(fmt.Sprintf("Server, monitors and pauses of %d containers in %d pods: MiB (Pss)", pods*restartPerPod, pods), 0, c.names()...)
	memory.line("silent for a minute", before...)
	memory.line(fmt.Sprintf("after the server was killed and started %d times", restartRounds), after...)
	return []table{t.table, memory.table}, nil
}

// restarted is what restarts take.
type restarted struct {
	took          []float64 // seconds
	before, after weight
}

// restarts fills the server's node, kills the server again and again, and
// removes its pods.
func (s *server) restarts(ctx context.Context, pods int) (r restarted, err error) {
	if err := s.populate(ctx, pods, restartPerPod); err != nil {
		return r, err
	}
	if err := pause(ctx, silentTime-idleTime); err != nil {
		return r, err
	}
	if r.before, err = weigh(ctx, s, idleTime); err != nil {
		return r, err
	}
	for range restartRounds {
		if err := s.program.Kill(); err != nil {
			return r, err
		}
		began := time.Now()
		if err := s.program.Start(ctx); err != nil {
			return r, err
		}
		running, err := s.running(ctx)
		if err != nil {
			return r, err
		}
		r.took = append(r.took, time.Since(began).Seconds())
		if want := pods * restartPerPod; running != want {
			return r, fmt.Errorf("%d of %d containers run after a restart", running, want)
		}
	}
	if r.after, err = weigh(ctx, s, idleTime); err != nil {
		return r, err
	}
	return r, s.removeAll(ctx)
}

// populate fills the server's node with pods of that many containers each.
func (s *server) populate(ctx context.Context, pods, perPod int) error {
	if _, err := fill(ctx, s, 0, pods, nodeAtOnce); err != nil {
		return err
	}
	var group errgroup.Group
	group.SetLimit(nodeAtOnce)
	for i := range pods {
		group.Go(func() error { return s.join(ctx, s.pod(podName(i)), perPod-1) })
	}
	return group.Wait()
}

// join starts more containers of a pod.
func (s *server) join(ctx context.Context, p *pod, more int) error {
	for i := range more {
		id, err := s.create(ctx, p, fmt.Sprint("c", i), s.args)
		if err != nil {
			return err
		}
		if _, err := s.runtime().StartContainer(ctx, &cri.StartContainerRequest{ContainerId: id}); err != nil {
			return err
		}
	}
	return nil
}
