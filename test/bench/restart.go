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
// measures until the next one has recovered them and answers.
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
	var ready [][]float64
	for _, s := range []*server{ours, theirs} {
		took, err := s.restarts(ctx, pods)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.label, err)
		}
		ready = append(ready, took)
	}
	t := compare(fmt.Sprintf("Server killed beside %d running containers, %d times: seconds", pods*restartPerPod, restartRounds), 95, c.names()...)
	t.line("from exec to the first list", ready...)
	return []table{t.table}, nil
}

// restarts fills the server's node, kills the server again and again, and
// removes its pods.
func (s *server) restarts(ctx context.Context, pods int) (took []float64, err error) {
	if _, err := fill(ctx, s, 0, pods, nodeAtOnce); err != nil {
		return nil, err
	}
	var group errgroup.Group
	group.SetLimit(nodeAtOnce)
	for i := range pods {
		group.Go(func() error { return s.join(ctx, s.pod(podName(i))) })
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	for range restartRounds {
		if err := s.program.Kill(); err != nil {
			return nil, err
		}
		began := time.Now()
		if err := s.program.Start(ctx); err != nil {
			return nil, err
		}
		running, err := s.running(ctx)
		if err != nil {
			return nil, err
		}
		took = append(took, time.Since(began).Seconds())
		if want := pods * restartPerPod; running != want {
			return nil, fmt.Errorf("%d of %d containers run after a restart", running, want)
		}
	}
	return took, s.removeAll(ctx)
}

// join starts the missing containers of a pod.
func (s *server) join(ctx context.Context, p *pod) error {
	for i := range restartPerPod - 1 {
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
