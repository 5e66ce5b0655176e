package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/wait"
)

// half is a verb during which the server is killed, so that the next one has
// something to recover.
type half struct {
	change  func(*cri.PodSandboxConfig)
	prepare act
	run     act
	// operation, step and after are where it stops, the first time it gets there.
	operation, step string
	after           bool
	settle          act

	stage *stage
}

func halves() []half {
	plain := func(*cri.PodSandboxConfig) {}
	return []half{
		{plain, nil, (*stage).runPod, "run pod", "CNI ADD", true, (*stage).wantPod, nil},
		{sharedPID, nil, (*stage).runPod, "run pod", "runtime start", false, (*stage).wantPod, nil},
		{plain, (*stage).runPod, (*stage).create, "create container", "wait for runtime create", true, (*stage).wantContainer, nil},
		{plain, (*stage).runPod, (*stage).create, "create container", "mount layers", true, (*stage).wantContainer, nil},
		{plain, in((*stage).runPod, (*stage).create), (*stage).start, "start", "runtime start", true, (*stage).wantRunning, nil},
		{plain, (*stage).running, (*stage).remove, "remove", "stop monitor", true, (*stage).wantRemoved, nil},
		{hostPort, (*stage).running, (*stage).stopPod, "stop pod", "close host ports", true, (*stage).wantPodStopped, nil},
		{plain, (*stage).running, (*stage).removePod, "remove pod", "remove run directory", true, (*stage).wantPodRemoved, nil},
		{plain, nil, (*stage).pull, "pull image", "remove temporary files", false, (*stage).wantPulled, nil},
		{plain, nil, (*stage).pullArtifact, "pull image", "store artifact", true, (*stage).wantArtifact, nil},
	}
}

// leaveHalfDone kills the server in the middle of a verb of each kind.
func (s *stage) leaveHalfDone(ctx context.Context) error {
	s.halves = halves()
	for i := range s.halves {
		h := &s.halves[i]
		h.stage = s.w.stage(s.handler, h.change)
		if h.prepare == nil {
			continue
		}
		if err := h.prepare(h.stage, ctx); err != nil {
			return err
		}
	}
	var mu sync.Mutex
	waiting := slices.Clone(s.halves)
	dead := make(chan struct{})
	s.w.gate.watch(func(at spot, object string) string {
		mu.Lock()
		i := slices.IndexFunc(waiting, func(h half) bool {
			return h.operation == at.Operation && h.step == at.Step && h.after == at.After && h.stage.is(object)
		})
		if i >= 0 {
			waiting = slices.Delete(waiting, i, i+1)
		}
		mu.Unlock()
		if i >= 0 {
			<-dead
		}
		return ""
	})
	defer s.w.gate.watch(nil)
	defer close(dead)
	var group sync.WaitGroup
	defer group.Wait()
	missing := func(most int) func() bool {
		return func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(waiting) <= most
		}
	}
	for i, h := range s.halves {
		if i == len(s.halves)-1 {
			wait.Until(ctx, missing(1)) // an artifact is stored under a lock that the pull of an image takes
		}
		group.Go(func() { _ = h.run(h.stage, ctx) }) // the server dies in it
	}
	wait.Until(ctx, missing(0))
	mu.Lock()
	defer mu.Unlock()
	err := s.w.Kill()
	for _, h := range waiting {
		err = errors.Join(err, fmt.Errorf("%s does not get to %s", h.operation, h.step))
	}
	return err
}

// is reports whether the object of an operation is the stage's.
func (s *stage) is(object string) bool {
	return strings.Contains(object, "/"+s.config.Metadata.Name+" ") || // a pod
		s.pod != "" && strings.Contains(object, s.pod[:13]) || // a pod, or a container being created
		s.id != "" && object == s.id || object == extraImage || object == artifact
}

// serve starts the server; it may be killed meanwhile.
func (s *stage) serve(ctx context.Context) error { return s.w.Start(ctx) }

// wantOrder finishes what was begun, one after the other.
func (s *stage) wantOrder(ctx context.Context) error {
	for _, h := range s.halves {
		h.stage.containerKilled = s.containerKilled
		if err := h.settle(h.stage, ctx); err != nil {
			return fmt.Errorf("after the server died in %s at %s: %w", h.operation, h.step, err)
		}
	}
	return nil
}
