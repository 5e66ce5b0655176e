package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

// phases are the parts of a pod's life, each timed by itself.
var phases = [...]string{
	"RunPodSandbox", "CreateContainer", "StartContainer", "pod up (all three)",
	"ExecSync", "stop and remove container", "stop and remove pod",
}

const (
	runPodSandbox = iota
	createContainer
	startContainer
	podUp // the sum of those before
	execSync
	containerDown
	podDown
)

// life is the duration of each phase of a pod's life, in seconds.
type life [len(phases)]float64

// A target runs pods: a CRI server, or the commands below all of them.
type target interface {
	name() string
	// do runs one phase of the life of the pod with a name, and returns its
	// duration in seconds.
	do(ctx context.Context, pod string, phase int) (float64, error)
	// cpu returns the CPU seconds that everything of the target has used until
	// now.
	cpu() (float64, error)
	// prove checks that a running pod is as it should be.
	prove(ctx context.Context, pod string) error
	// where returns its own node.
	where() *node.Node
	close() error
}

// A doer runs pods, wherever it is.
type doer interface {
	do(ctx context.Context, pod string, phase int) (float64, error)
}

// up runs a pod with a container.
func up(ctx context.Context, t doer, pod string) (l life, err error) {
	err = l.pass(ctx, t, pod, runPodSandbox, createContainer, startContainer)
	l[podUp] = l[runPodSandbox] + l[createContainer] + l[startContainer]
	return l, err
}

// down removes a pod with its container.
func down(ctx context.Context, t doer, pod string) (l life, err error) {
	return l, l.pass(ctx, t, pod, containerDown, podDown)
}

// live runs a pod with a container and a command in it, and removes both.
func live(ctx context.Context, t doer, pod string) (life, error) {
	l, err := up(ctx, t, pod)
	if err != nil {
		return l, err
	}
	return l, l.pass(ctx, t, pod, execSync, containerDown, podDown)
}

func (l *life) pass(ctx context.Context, t doer, pod string, through ...int) (err error) {
	for _, phase := range through {
		if l[phase], err = t.do(ctx, pod, phase); err != nil {
			return fmt.Errorf("pod %s: %s: %w", pod, phases[phase], err)
		}
	}
	return nil
}

// outcome is the result of running some pods.
type outcome struct {
	lives     []life
	cpu, wall float64 // seconds
}

func (o *outcome) add(more outcome) {
	o.lives = append(o.lives, more.lives...)
	o.cpu += more.cpu
	o.wall += more.wall
}

// of returns the milliseconds of one phase.
func (o outcome) of(phase int) []float64 {
	took := make([]float64, len(o.lives))
	for i, l := range o.lives {
		took[i] = l[phase] * 1e3
	}
	return took
}

// each returns the milliseconds of CPU time per pod.
func (o outcome) each() float64 { return o.cpu * 1e3 / float64(len(o.lives)) }

// rate returns the number of pods per second.
func (o outcome) rate() float64 { return float64(len(o.lives)) / o.wall }

// together does something that many times, some at once, unless one fails.
func together(ctx context.Context, count, atOnce int, do func(ctx context.Context, i int) (life, error)) (o outcome, err error) {
	o.lives = make([]life, count)
	began := time.Now()
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(atOnce)
	for i := range count {
		group.Go(func() (err error) {
			if err := context.Cause(ctx); err != nil {
				return err
			}
			o.lives[i], err = do(ctx, i)
			return err
		})
	}
	err = group.Wait()
	o.wall = time.Since(began).Seconds()
	return o, err
}

// accounted is together with the target's cost.
func accounted(ctx context.Context, t target, count, atOnce int, do func(ctx context.Context, i int) (life, error)) (outcome, error) {
	before, err := t.cpu()
	if err != nil {
		return outcome{}, err
	}
	o, err := together(ctx, count, atOnce, do)
	if err != nil {
		return o, fmt.Errorf("%s: %w", t.name(), err)
	}
	after, err := t.cpu()
	o.cpu = after - before
	return o, err
}

// amount returns usual, unless an environment variable says otherwise.
func amount(variable string, usual int) (int, error) {
	text := os.Getenv(variable)
	if text == "" {
		return usual, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		return 0, fmt.Errorf("%s=%s: a number from 1 on is wanted", variable, text)
	}
	return n, nil
}

// A contest is targets that do the same work in turn, each on its own node.
type contest struct {
	targets []target
	empty   []*inventory.Snapshot // contents of the nodes without pods
}

// newContest has the floor, crius and containerd in this order.
func newContest(ctx context.Context, handler string) (*contest, error) {
	c, us, _, err := newServers(ctx, handler)
	if err != nil {
		return nil, err
	}
	if err := c.addFloor(ctx, us); err != nil {
		return nil, errors.Join(err, c.close())
	}
	return c, nil
}

// addFloor adds the floor as the first target; it uses parts of a pod of like.
func (c *contest) addFloor(ctx context.Context, like *server) error {
	ground, err := newFloor(ctx, like)
	if err != nil {
		return fmt.Errorf("floor: %w", err)
	}
	c.targets = append([]target{ground}, c.targets...)
	return c.settle(ctx)
}

// newServers has crius and containerd. Settle it before use.
func newServers(ctx context.Context, handler string) (c *contest, ours, theirs *server, err error) {
	return newServersOn(ctx, handler, node.Options{})
}

// newServersOn has them on nodes with these options.
func newServersOn(ctx context.Context, handler string, o node.Options) (c *contest, ours, theirs *server, err error) {
	if ours, err = newCriusOn(ctx, handler, o); err != nil {
		return nil, nil, nil, err
	}
	if theirs, err = newContainerd(ctx, handler, o); err != nil {
		return nil, nil, nil, errors.Join(fmt.Errorf("containerd: %w", err), ours.close())
	}
	return &contest{targets: []target{ours, theirs}}, ours, theirs, nil
}

// settle runs a first pod on each target, because what is made at first use is
// neither measured nor left over, and checks it.
func (c *contest) settle(ctx context.Context) error {
	c.empty = nil
	for _, t := range c.targets {
		const pod = "first"
		_, err := up(ctx, t, pod)
		if err == nil {
			err = t.prove(ctx, pod)
		}
		if err == nil {
			_, err = down(ctx, t, pod)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", t.name(), err)
		}
		empty, err := stock(t)
		if err != nil {
			return err
		}
		c.empty = append(c.empty, empty)
	}
	return nil
}

// stock returns the contents of a target's node, without the server, which may
// be another process by then.
func stock(t target) (*inventory.Snapshot, error) {
	all, err := t.where().Inventory()
	if err == nil {
		all.Drop(all.About(" --config " + t.where().Dir + "/")...)
	}
	return all, err
}

// bare checks that the targets have left nothing, or will have left nothing
// soon.
func (c *contest) bare(ctx context.Context) error {
	for i, t := range c.targets {
		var left inventory.Difference
		var err error
		if !wait.Until(ctx, func() bool {
			var now *inventory.Snapshot
			if now, err = stock(t); err == nil {
				left = inventory.Diff(c.empty[i], now)
			}
			return err != nil || left.Empty()
		}) {
			return fmt.Errorf("%s: the node is not as it was before:\n%s", t.name(), left)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// end calls bare, after success, and close.
func (c *contest) end(ctx context.Context, err error) error {
	if err == nil {
		err = c.bare(ctx)
	}
	for _, t := range c.targets {
		if err != nil && t.name() == crius {
			err = fmt.Errorf("%w\nwarnings of crius:\n%s", err, warnings(t.where().LogTail(10000)))
		}
	}
	return errors.Join(err, c.close())
}

// warnings returns the last lines of a log that are warnings or errors.
func warnings(log string) string {
	var lines []string
	for line := range strings.Lines(log) {
		if !strings.Contains(line, " level=INFO ") {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines[max(0, len(lines)-10):], "")
}

func (c *contest) close() error {
	var errs []error
	for _, t := range c.targets {
		errs = append(errs, t.close())
	}
	return errors.Join(errs...)
}

func (c *contest) names() []string {
	var names []string
	for _, t := range c.targets {
		names = append(names, t.name())
	}
	return names
}
