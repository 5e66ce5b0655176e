// Crash kills crius in the middle of everything and checks that nothing is lost
// or left: every verb of CRI that changes something, and the start of the
// server, at every point of its work.
//
//	go run ./test/crash [-verb REGEXP] [-handler NAME] [-action NAME] [-point TEXT] [-count N] [-seed N] [-workers N]
//	go run ./test/crash -random N [-seed N]
//
// A point is one edge of one step (internal/trace). The points of a verb are
// found by running it: a new step is a new row. At each of them the server is
// killed (kill), or at a random instant of the step (amid), the container's
// monitor is killed (monitor), or the step fails (error). Runtimes and CNI
// plugins are killed before, after and during their work (die, dieafter, cut).
// An NRI plugin adjusts every container; while each of its hooks runs, the
// server is killed (kill), or the plugin dies (die). Afterwards a kubelet tries
// again, which must succeed and lead to exactly one pod or container; two
// unrelated containers must run on, answer and have a log without a gap; what
// the plugin has set must be in force; and once everything is removed the node
// must have what it had before: processes, mounts, namespaces, cgroups, address
// leases, firewall rules, files, descriptors.
//
// With -random, N containers live for 0 to 50 ms and end with random codes
// while the server is killed at random; see random.go.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/crius-run/crius/test/scene"
)

func main() {
	var m matrix
	flag.StringVar(&m.verb, "verb", "", "only verbs that this regular expression matches as a whole")
	flag.StringVar(&m.handler, "handler", "", "only this runtime handler")
	flag.StringVar(&m.action, "action", "", "only this action: kill, amid, monitor, error, die, dieafter or cut")
	flag.StringVar(&m.point, "point", "", "only points whose names contain this")
	flag.IntVar(&m.count, "count", 0, "only so many cases, chosen at random; 0: all")
	flag.IntVar(&m.workers, "workers", 2, "nodes that work side by side")
	flag.Uint64Var(&m.seed, "seed", uint64(time.Now().UnixNano()), "of what is random")
	random := flag.Int("random", 0, "instead of the matrix: so many containers that live for a moment, while the server is killed at random")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	m.out = os.Stdout
	run := m.run
	if *random > 0 {
		run = (&crowd{count: *random, seed: m.seed, out: m.out}).run
	}
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "crash:", err)
		os.Exit(1)
	}
}

// matrix is a run of cases.
type matrix struct {
	verb, handler, action, point string

	count, workers int
	seed           uint64
	out            io.Writer

	mu       sync.Mutex
	random   *rand.Rand
	tally    map[row]counts
	failures []string
}

// row is a line of the result.
type row struct{ verb, handler, action string }

type counts struct{ passed, failed int }

// job is a verb with a handler: its points are found, and then tested.
type job struct {
	verb    verb
	handler string
}

func (m *matrix) run(ctx context.Context) error {
	fmt.Fprintf(m.out, "seed %d\n", m.seed)
	m.random = rand.New(rand.NewPCG(m.seed, 0))
	m.tally = map[row]counts{}
	programs, err := build(ctx, m.handler)
	if err != nil {
		return err
	}
	if programs.criu == "" {
		fmt.Fprintln(m.out, "criu is not available: the verbs of checkpoints are left out")
	}
	jobs, err := m.jobs(programs.criu != "")
	if err != nil {
		return err
	}
	errs := make([]error, min(m.workers, len(jobs)))
	var group sync.WaitGroup
	queue := make(chan job, len(jobs))
	for _, j := range jobs {
		queue <- j
	}
	close(queue)
	each := (m.count + len(jobs) - 1) / len(jobs) // 0: all
	for i := range errs {
		group.Go(func() { errs[i] = m.work(ctx, programs, queue, each) })
	}
	group.Wait()
	m.report()
	if len(m.failures) > 0 {
		errs = append(errs, fmt.Errorf("%d cases failed", len(m.failures)))
	}
	return errors.Join(append(errs, ctx.Err())...)
}

// jobs returns what is to be run, without what needs criu if there is none.
func (m *matrix) jobs(criu bool) ([]job, error) {
	name, err := regexp.Compile("^(" + m.verb + ")$")
	if err != nil {
		return nil, err
	}
	var jobs []job
	for _, v := range verbs() {
		if m.verb != "" && !name.MatchString(v.name) || v.only == criuHandler && !criu {
			continue
		}
		handlers := scene.Handlers
		switch {
		case m.handler != "":
			handlers = []string{m.handler}
		case m.count > 0: // a sample
			handlers = handlers[m.random.IntN(len(handlers)):][:1]
		}
		if v.only != "" {
			handlers = slices.DeleteFunc([]string{v.only}, func(h string) bool { return m.handler != "" && m.handler != h })
		}
		for _, h := range handlers {
			jobs = append(jobs, job{v, h})
		}
	}
	if len(jobs) == 0 {
		return nil, fmt.Errorf("no verb is called %q", m.verb)
	}
	if m.count > 0 { // finding the points of a verb takes as long as a case
		m.random.Shuffle(len(jobs), func(i, j int) { jobs[i], jobs[j] = jobs[j], jobs[i] })
		jobs = jobs[:min(len(jobs), m.count/casesEach+1)]
	}
	return jobs, nil
}

// casesEach is roughly the number of cases per verb in a sample.
const casesEach = 4

// worker runs cases on a node, and on another one after a failure.
type worker struct {
	m        *matrix
	programs programs
	world    *world
}

func (m *matrix) work(ctx context.Context, p programs, queue <-chan job, each int) (err error) {
	w := &worker{m: m, programs: p}
	defer func() { err = errors.Join(err, w.close()) }()
	defer func() {
		if w.world != nil && err == nil && ctx.Err() == nil {
			err = w.world.checkTeardown(ctx)
		}
	}()
	for j := range queue {
		if ctx.Err() != nil {
			return nil
		}
		if err := w.fresh(ctx); err != nil {
			return err
		}
		all, err := w.world.discover(ctx, j.verb, j.handler)
		if err != nil {
			m.note(experiment{verb: j.verb, handler: j.handler, action: "none"}, err)
			if err := w.close(); err != nil {
				return err
			}
			continue
		}
		chosen := m.choose(all, each)
		for _, e := range chosen {
			if err := w.try(ctx, e); err != nil {
				return err
			}
		}
		fmt.Fprintf(m.out, "done: %s with %s, %d of %d cases\n", j.verb.name, j.handler, len(chosen), len(all))
	}
	return nil
}

// choose filters the cases of a verb, and takes at most most of them; 0: all.
func (m *matrix) choose(found []experiment, most int) []experiment {
	all := slices.DeleteFunc(slices.Clone(found), func(e experiment) bool {
		return m.action != "" && e.action != m.action || !strings.Contains(e.point, m.point)
	})
	if most == 0 || most >= len(all) {
		return all
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all[:most]
}

func (w *worker) fresh(ctx context.Context) (err error) {
	if w.world == nil {
		w.world, err = newWorld(ctx, w.programs)
	}
	return err
}

// try reports the result of a case; its error is one of the harness.
func (w *worker) try(ctx context.Context, e experiment) error {
	if ctx.Err() != nil {
		return nil //nolint:nilerr // interrupted
	}
	if err := w.fresh(ctx); err != nil {
		return err
	}
	err := w.world.try(ctx, e)
	if errors.Is(err, errDescriptors) {
		err = w.world.try(ctx, e) // some are opened once, on first use
	}
	if ctx.Err() != nil {
		return nil //nolint:nilerr // interrupted
	}
	if err == nil {
		err = w.world.sound()
	}
	if err != nil {
		err = fmt.Errorf("%w\nthe server complained:\n%s", err, w.world.complaints())
	}
	w.m.note(e, err)
	if err == nil {
		return nil
	}
	return w.close()
}

func (w *worker) close() error {
	if w.world == nil {
		return nil
	}
	defer func() { w.world = nil }()
	return w.world.close()
}

func (m *matrix) note(e experiment, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := row{e.verb.name, e.handler, e.action}
	c := m.tally[r]
	if err == nil {
		c.passed++
	} else {
		c.failed++
		m.failures = append(m.failures, e.String())
		fmt.Fprintf(m.out, "FAIL make crash %s\n%s\n\n", e, indent(err.Error()))
	}
	m.tally[r] = c
}

func indent(text string) string { return "     " + strings.ReplaceAll(text, "\n", "\n     ") }

func (m *matrix) report() {
	m.mu.Lock()
	defer m.mu.Unlock()
	var total counts
	var rows []row
	for r := range m.tally {
		rows = append(rows, r)
	}
	slices.SortFunc(rows, func(a, b row) int {
		return strings.Compare(a.verb+" "+a.handler+" "+a.action, b.verb+" "+b.handler+" "+b.action)
	})
	for _, r := range rows {
		c := m.tally[r]
		fmt.Fprintf(m.out, "%-26s %-5s %-9s %4d passed, %d failed\n", r.verb, r.handler, r.action, c.passed, c.failed)
		total.passed += c.passed
		total.failed += c.failed
	}
	for _, f := range m.failures {
		fmt.Fprintln(m.out, "failed: make crash", f)
	}
	fmt.Fprintf(m.out, "crash matrix: %d cases, %d passed, %d failed\n", total.passed+total.failed, total.passed, total.failed)
}
