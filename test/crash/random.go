package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

const (
	crowdPods    = 6
	crowdWorkers = 8
	longestLife  = 50 * time.Millisecond
	longestReign = 3 * time.Second // of a server
)

// crowd is many short-lived containers, while the server is killed at random.
// Each writes its start and end into its own file, with which crius's answers
// are compared.
type crowd struct {
	*scene.World
	count int
	seed  uint64
	out   io.Writer

	pods []*stage

	mu       sync.Mutex
	next     int
	random   *rand.Rand
	tally    crowdTally
	problems []string
}

type crowdTally struct {
	containers, kills, retries                       int
	wrongCodes, wrongTimes, duplicates, lost, others int
}

// run runs the whole experiment.
func (c *crowd) run(ctx context.Context) (err error) {
	if c.World, err = scene.New(ctx, node.Options{}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	if err := c.Settle(ctx, scene.Handlers...); err != nil {
		return err
	}
	c.random = rand.New(rand.NewPCG(c.seed, 0))
	if err := os.Mkdir(c.Path("diaries"), 0o777); err != nil {
		return err
	}
	if err := c.runPods(ctx); err != nil {
		return err
	}
	err = c.live(ctx)
	if err == nil {
		err = c.end(ctx)
	}
	c.report()
	if len(c.problems) > 0 {
		err = errors.Join(err, fmt.Errorf("seed %d: %d problems, the first:\n%s", c.seed, len(c.problems), strings.Join(c.problems[:min(len(c.problems), 10)], "\n")))
	}
	return err
}

func (c *crowd) runPods(ctx context.Context) error {
	w := &world{World: c.World}
	for i := range crowdPods {
		s := w.stage(scene.Handlers[i%len(scene.Handlers)])
		if err := s.runPod(ctx); err != nil {
			return err
		}
		c.pods = append(c.pods, s)
	}
	return nil
}

// live runs the containers and kills the server until all have lived.
func (c *crowd) live(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var workers sync.WaitGroup
	for range crowdWorkers {
		workers.Go(func() {
			for one := c.nextContainer(); one != nil && ctx.Err() == nil; one = c.nextContainer() {
				one.live(ctx)
			}
		})
	}
	over := make(chan struct{})
	go func() {
		workers.Wait()
		close(over)
	}()
	for {
		select {
		case <-over:
			return ctx.Err()
		case <-time.After(c.reign()):
		}
		if err := c.Crash(ctx); err != nil {
			cancel()
			<-over
			return err
		}
		c.tell(func(t *crowdTally) { t.kills++ })
	}
}

func (c *crowd) reign() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Duration(c.random.Int64N(int64(longestReign)))
}

// end removes the pods, and checks that the node is as before.
func (c *crowd) end(ctx context.Context) error {
	for _, p := range c.pods {
		if err := p.do(ctx, (*stage).stopPod, (*stage).removePod); err != nil {
			return err
		}
	}
	if faults := c.Faults(); len(faults) > 0 {
		return fmt.Errorf("the server's log has %d faults; the first:\n%s", len(faults), faults[0])
	}
	return c.Clean(ctx, c.Empty, wait.Limit)
}

func (c *crowd) tell(change func(*crowdTally)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change(&c.tally)
}

func (c *crowd) report() {
	t := c.tally
	fmt.Fprintf(c.out, "crash random: %d containers, %d kills, %d retries; %d wrong codes, %d wrong times, %d duplicates, %d lost, %d other problems (seed %d)\n",
		t.containers, t.kills, t.retries, t.wrongCodes, t.wrongTimes, t.duplicates, t.lost, t.others, c.seed)
}

// shortLived is one of the containers.
type shortLived struct {
	c     *crowd
	stage *stage
	diary string
	code  int32
}

// nextContainer returns the next one, nil if there have been enough.
func (c *crowd) nextContainer() *shortLived {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.next == c.count {
		return nil
	}
	c.next++
	name := fmt.Sprintf("c%d", c.next)
	own := *c.pods[c.next%len(c.pods)]
	m := &shortLived{c: c, stage: &own, diary: c.Path("diaries", name), code: c.random.Int32N(256)}
	life := time.Duration(c.random.Int64N(int64(longestLife)))
	line := fmt.Sprintf("diary /diaries/%s ; sleep %v ; diary /diaries/%s ; exit %d", name, life, name, m.code)
	own.container = kubelet.Container(name, images.Probe, scene.Steps(line), func(cfg *cri.ContainerConfig) {
		cfg.Mounts = []*cri.Mount{{HostPath: c.Path("diaries"), ContainerPath: "/diaries"}}
	})
	return m
}

func (m *shortLived) problem(count func(*crowdTally), format string, args ...any) {
	m.c.mu.Lock()
	defer m.c.mu.Unlock()
	count(&m.c.tally)
	m.c.problems = append(m.c.problems, fmt.Sprintf("%s %.12s: ", m.stage.container.Metadata.Name, m.stage.id)+fmt.Sprintf(format, args...))
}

func (m *shortLived) live(ctx context.Context) {
	m.c.tell(func(t *crowdTally) { t.containers++ })
	s := m.stage
	other := func(t *crowdTally) { t.others++ }
	if err := m.persist(ctx, s.create); err != nil {
		m.problem(other, "CreateContainer: %v", err)
		return
	}
	now, err := m.startAndWait(ctx)
	if err != nil {
		m.problem(other, "%v", err)
	} else {
		m.compare(now)
	}
	if err := m.persist(ctx, m.alone); err != nil {
		m.problem(func(t *crowdTally) { t.duplicates++ }, "%v", err)
	}
	if err := m.persist(ctx, s.remove); err != nil {
		m.problem(other, "RemoveContainer: %v", err)
	}
}

// persist repeats a call, as a kubelet does, until a server answers it.
func (m *shortLived) persist(ctx context.Context, call func(context.Context) error) error {
	var err error
	wait.Until(ctx, func() bool {
		err = call(ctx)
		if code := status.Code(err); code != codes.Unavailable && code != codes.Canceled {
			return true
		}
		m.c.tell(func(t *crowdTally) { t.retries++ })
		return false
	})
	return err
}

// startAndWait starts the container, with retries, and waits for its end.
func (m *shortLived) startAndWait(ctx context.Context) (*cri.ContainerStatus, error) {
	s := m.stage
	startErr := m.persist(ctx, s.start)
	var now *cri.ContainerStatus
	var err error
	if !wait.Until(ctx, func() bool {
		err = m.persist(ctx, func(ctx context.Context) (err error) { now, err = s.status(ctx); return err })
		if err != nil || now.State == cri.ContainerState_CONTAINER_EXITED {
			return true
		}
		if now.State == cri.ContainerState_CONTAINER_CREATED { // the answer was lost, or the server died
			startErr = m.persist(ctx, s.start)
		}
		return false
	}) {
		return nil, fmt.Errorf("it is still %v (StartContainer: %w)", now.State, startErr)
	}
	if err != nil {
		return nil, fmt.Errorf("ContainerStatus: %w", err)
	}
	return now, nil
}

// alone checks that no other container has this one's name.
func (m *shortLived) alone(ctx context.Context) error {
	list, err := m.stage.containers(ctx)
	if err != nil {
		return err
	}
	for _, c := range list {
		if c.Metadata.Name == m.stage.container.Metadata.Name && c.Id != m.stage.id {
			return fmt.Errorf("it is there a second time as %s", c.Id)
		}
	}
	return nil
}

// compare compares crius's answer with what the container has written.
func (m *shortLived) compare(now *cri.ContainerStatus) {
	data, err := os.ReadFile(m.diary)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		m.problem(func(t *crowdTally) { t.others++ }, "%v", err)
		return
	}
	defer func() { _ = os.Remove(m.diary) }()
	var times []time.Time
	for line := range strings.Lines(string(data)) {
		at, err := time.Parse(time.RFC3339Nano, strings.TrimSpace(line))
		if err != nil {
			m.problem(func(t *crowdTally) { t.others++ }, "%s: %v", filepath.Base(m.diary), err)
			return
		}
		times = append(times, at)
	}
	said := fmt.Sprintf("code %d, want %d, %s %s", now.ExitCode, m.code, now.Reason, now.Message)
	switch {
	case len(times) > 2:
		m.problem(func(t *crowdTally) { t.duplicates++ }, "it ran %d times: %s", (len(times)+1)/2, said)
		return
	case len(times) < 2:
		m.problem(func(t *crowdTally) { t.lost++ }, "it did not run to its end: %s", said)
		return
	case now.ExitCode != m.code:
		m.problem(func(t *crowdTally) { t.wrongCodes++ }, "%s", said)
	}
	noted, err := os.Stat(filepath.Join(m.c.StateRoot(), "containers", m.stage.id, "exit.json"))
	if err != nil {
		m.problem(func(t *crowdTally) { t.others++ }, "%v", err)
		return
	}
	const clock = 10 * time.Millisecond // the kernel's coarse clock
	started, finished := time.Unix(0, now.StartedAt), time.Unix(0, now.FinishedAt)
	// The end is when the monitor saw it, not when a server learned of it.
	if finished.Before(times[1].Add(-clock)) || finished.After(noted.ModTime().Add(clock)) || started.After(times[0].Add(clock)) || started.Before(time.Unix(0, now.CreatedAt)) {
		m.problem(func(t *crowdTally) { t.wrongTimes++ }, "created %v, started %v, finished %v; it itself began %v and ended %v",
			time.Unix(0, now.CreatedAt).UTC(), started.UTC(), finished.UTC(), times[0].UTC(), times[1].UTC())
	}
}
