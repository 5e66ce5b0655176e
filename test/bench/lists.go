package main

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/wait"
)

const (
	// listPods each have a running container, and others that have ended.
	listPods  = 100
	listCalls = 300
	// listTurns is how often the servers take turns in that, because the
	// machine's own speed changes within seconds.
	listTurns = 5
)

// listsRow sends nodes the frequent requests of a kubelet: with a few
// containers, with many, and while others are made and removed.
func listsRow(ctx context.Context) (tables []table, err error) {
	most, err := amount("CONTAINERS", 2000)
	if err != nil {
		return nil, err
	}
	perPod := max(most/listPods, 2)
	most = listPods * perPod
	c, ours, theirs, err := newServers(ctx, "runc")
	if err != nil {
		return nil, err
	}
	defer func() { err = c.end(ctx, err) }()
	if err := c.settle(ctx); err != nil {
		return nil, err
	}
	servers := []*server{ours, theirs}
	for _, s := range servers {
		if _, err := fill(ctx, s, 0, listPods, nodeAtOnce); err != nil {
			return nil, err
		}
	}
	measure := func(what string, count int, busy bool) error {
		t := compare(fmt.Sprintf("%s, %d calls each: ms", what, listCalls), 99, c.names()...)
		all, err := askInTurns(servers, func(s *server) ([]asked, error) { return s.ask(ctx, count, busy) })
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		for i, a := range all[0] {
			t.line(a.call, a.took(), all[1][i].took())
		}
		tables = append(tables, t.table, tails(what, all[0]))
		return nil
	}
	if err := measure(fmt.Sprintf("%d containers", listPods), listPods, false); err != nil {
		return nil, err
	}
	for _, s := range servers {
		if err := s.crowd(ctx, perPod-1); err != nil {
			return nil, fmt.Errorf("%s: %w", s.label, err)
		}
	}
	if err := measure(fmt.Sprintf("%d containers", most), most, false); err != nil {
		return nil, err
	}
	if err := measure(fmt.Sprintf("%d containers, while others are created and removed", most), most, true); err != nil {
		return nil, err
	}
	for _, s := range servers {
		if err := s.removeAll(ctx); err != nil {
			return nil, fmt.Errorf("%s: %w", s.label, err)
		}
	}
	return tables, nil
}

// crowd gives each pod of fill that many more containers, which end at once.
func (s *server) crowd(ctx context.Context, more int) error {
	var group errgroup.Group
	group.SetLimit(nodeAtOnce)
	for i := range listPods {
		group.Go(func() error {
			for j := range more {
				id, err := s.create(ctx, s.pod(podName(i)), fmt.Sprint("job", j), []string{"exit", "0"})
				if err != nil {
					return err
				}
				if _, err := s.runtime().StartContainer(ctx, &cri.StartContainerRequest{ContainerId: id}); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	var running int
	var err error
	if !wait.Until(ctx, func() bool { running, err = s.running(ctx); return err != nil || running == listPods }) {
		return fmt.Errorf("%d containers run instead of %d", running, listPods)
	}
	return err
}

// asked is a call with the time of its answers.
type asked struct {
	call    string
	samples []sample
}

func (a asked) took() (ms []float64) {
	for _, s := range a.samples {
		ms = append(ms, s.took)
	}
	return ms
}

// serverRan returns how long the threads of the server ran for a call, on average.
func (a asked) serverRan() (ms float64) {
	for _, s := range a.samples {
		ms += s.server.ran / float64(len(a.samples))
	}
	return ms
}

// askInTurns has each server answer the same calls in turns, and returns the
// answers of each to all turns.
func askInTurns(servers []*server, ask func(*server) ([]asked, error)) (all [][]asked, err error) {
	all = make([][]asked, len(servers))
	for range listTurns {
		for i, s := range servers {
			answers, err := ask(s)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", s.label, err)
			}
			if all[i] == nil {
				all[i] = make([]asked, len(answers))
			}
			for j, a := range answers {
				all[i][j].call = a.call
				all[i][j].samples = append(all[i][j].samples, a.samples...)
			}
		}
	}
	return all, nil
}

// ask times the calls of a turn. With busy, another container is created and removed again
// and again meanwhile.
func (s *server) ask(ctx context.Context, count int, busy bool) (all []asked, err error) {
	if busy {
		stop := s.bustle(ctx)
		defer func() {
			if changes, stopped := stop(); err == nil && stopped != nil {
				err = stopped
			} else if err == nil && changes == 0 {
				err = fmt.Errorf("no other container came and went meanwhile")
			}
		}()
	}
	p := s.pod(podName(listPods / 2))
	for _, call := range append(s.calls(p, count), s.arrival(count)) {
		a, err := s.timed(ctx, call)
		if err != nil {
			return nil, err
		}
		all = append(all, a)
	}
	return all, nil
}

// timed times a call, as often as it is made in a turn.
func (s *server) timed(ctx context.Context, call call) (asked, error) {
	a := asked{call: call.name}
	for range listCalls / listTurns {
		one, err := sampled(s.program.PID(), func() error { return call.ask(ctx) })
		if err != nil {
			return a, fmt.Errorf("%s: %w", call.name, err)
		}
		a.samples = append(a.samples, one)
	}
	return a, nil
}

// call is a request of a kubelet.
type call struct {
	name string
	ask  func(ctx context.Context) error
}

// calls check their answers: the server has that many containers, and perhaps
// one more that comes and goes.
func (s *server) calls(p *pod, count int) []call {
	r := s.runtime()
	return []call{
		{"ListPodSandbox", func(ctx context.Context) error {
			got, err := r.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
			return wrong(err, len(got.GetItems()), min(count, listPods), 0)
		}},
		{"ListContainers", func(ctx context.Context) error {
			got, err := r.ListContainers(ctx, &cri.ListContainersRequest{})
			return wrong(err, len(got.GetContainers()), count, 1)
		}},
		{"ListContainers, running", func(ctx context.Context) error {
			got, err := s.running(ctx)
			return wrong(err, got, min(count, listPods), 0)
		}},
		{"PodSandboxStatus", func(ctx context.Context) error {
			got, err := r.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: p.id})
			if err == nil && got.Status.State != cri.PodSandboxState_SANDBOX_READY {
				err = fmt.Errorf("pod %s is %s", p.id, got.Status.State)
			}
			return err
		}},
		{"ContainerStatus", func(ctx context.Context) error {
			got, err := r.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: p.container})
			if err == nil && got.Status.State != cri.ContainerState_CONTAINER_RUNNING {
				err = fmt.Errorf("container %s is %s", p.container, got.Status.State)
			}
			return err
		}},
		{"Status", func(ctx context.Context) error {
			_, err := r.Status(ctx, &cri.StatusRequest{})
			return err
		}},
	}
}

func wrong(err error, got, want, more int) error {
	if err == nil && (got < want || got > want+more) {
		err = fmt.Errorf("%d are listed instead of %d", got, want)
	}
	return err
}

// bustle creates and removes a container until it is stopped; stop returns how
// often.
func (s *server) bustle(ctx context.Context) (stop func() (int, error)) {
	ctx, cancel := context.WithCancel(ctx)
	var group errgroup.Group
	changes := 0
	group.Go(func() error {
		for ctx.Err() == nil {
			id, err := s.create(context.WithoutCancel(ctx), s.pod(podName(0)), "bustle", s.args)
			if err == nil {
				_, err = s.runtime().RemoveContainer(context.WithoutCancel(ctx), &cri.RemoveContainerRequest{ContainerId: id})
			}
			if err != nil {
				return err
			}
			changes++
		}
		return nil
	})
	return func() (int, error) {
		cancel()
		err := group.Wait()
		return changes, err
	}
}
