package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/node"
)

const (
	bigSize   = 10e9 // bytes, unpacked
	bigLayers = 10
	littleOf  = 5 // the sparsely read image has a fifth of that
)

// bigRow pulls an image that may be larger than the machine's memory, on nodes
// on the disk, one server after the other. What one has pulled is removed
// before the next begins.
func bigRow(ctx context.Context) (tables []table, err error) {
	size, err := bytesOf("SIZE", bigSize)
	if err != nil {
		return nil, err
	}
	b, err := newBulk(ctx, bigLayers+1, size/bigLayers)
	if err != nil {
		return nil, err
	}
	c, us, them, err := newServersOn(ctx, "runc", node.Options{Disk: true})
	if err != nil {
		return nil, err
	}
	defer func() { err = c.end(ctx, err) }()
	if err := c.settle(ctx); err != nil {
		return nil, err
	}
	p := pulls{c.names(), []*server{us, them}}
	for _, s := range p.servers {
		b.serve(s)
	}
	pulled, err := p.big(ctx, b)
	if err != nil {
		return nil, err
	}
	little, err := p.little(ctx, size/littleOf)
	return append(pulled, little), err
}

// bytesOf returns a number of bytes: usual, unless an environment variable says
// otherwise, such as 300M or 10G.
func bytesOf(variable string, usual int64) (int64, error) {
	text := os.Getenv(variable)
	if text == "" {
		return usual, nil
	}
	unit := int64(1e6)
	digits, mega := strings.CutSuffix(text, "M")
	if !mega {
		unit = 1e9
		digits = strings.TrimSuffix(text, "G")
	}
	n, err := strconv.ParseInt(digits, 10, 32)
	if err != nil || digits == text || n < 1 || n*unit < smallestBig {
		return 0, fmt.Errorf("%s=%s: a size such as 300M or 10G is wanted, %d MB or more", variable, text, int64(smallestBig/1e6))
	}
	return n * unit, nil
}

// smallestBig is the smallest image with a file in each layer, even for the
// sparsely read image.
const smallestBig = 300e6

// serve pushes the layers to the server's registry.
func (b *bulk) serve(s *server) {
	for _, l := range b.layers {
		s.on.Registry.PushBlob(pulledFrom, l.Digest, l.blob, l.Size)
	}
}

// big pulls two versions of the image, which differ in the top layer, and the
// first once more after the server has died half-way.
func (p pulls) big(ctx context.Context, b *bulk) ([]table, error) {
	first, err := b.image(0, numbers(bigLayers)...)
	if err != nil {
		return nil, err
	}
	second, err := b.image(1, append(numbers(bigLayers-1), bigLayers)...)
	if err != nil {
		return nil, err
	}
	costs := make([][]cost, len(p.servers))
	fetched := make([][len(refetches)]float64, len(p.servers))
	for i, s := range p.servers {
		if err := hasRoom(s.on.Dir, first); err != nil {
			return nil, err
		}
		pull := func(ctx context.Context, built *image.Artifact) (string, outcome, error) {
			of := first
			if built == second.Artifact {
				of = second
			}
			name, c, err := s.watchedPull(ctx, of)
			costs[i] = append(costs[i], c)
			return name, c.outcome, err
		}
		if fetched[i], err = s.refetch(ctx, pull, first.Artifact, second.Artifact); err != nil {
			return nil, fmt.Errorf("%s: %w", s.label, err)
		}
	}
	title := fmt.Sprintf("Image of %s, from a registry on the same machine to the disk: ", first)
	var tables []table
	for i, what := range refetches[:len(costs[0])] {
		t := compare(title+what, 0, p.names...)
		for _, figure := range figures {
			t.line(figure.name, each(costs, func(of []cost) float64 { return figure.of(of[i]) })...)
		}
		tables = append(tables, t.table)
	}
	t := compare("What is fetched of it: MB", 0, p.names...)
	for i, what := range refetches {
		t.line(what, each(fetched, func(of [len(refetches)]float64) float64 { return of[i] })...)
	}
	return append(tables, t.table), nil
}

// each returns one figure for each server, as samples.
func each[T any](servers []T, figure func(T) float64) (samples [][]float64) {
	for _, of := range servers {
		samples = append(samples, []float64{figure(of)})
	}
	return samples
}

func numbers(count int) (all []int) {
	for i := range count {
		all = append(all, i)
	}
	return all
}

// figures are the lines for a pull.
var figures = []struct {
	name string
	of   func(cost) float64
}{
	{"seconds", func(c cost) float64 { return c.wall }},
	{"CPU seconds", func(c cost) float64 { return c.cpu }},
	{"MiB of memory (Pss) at most, of server and pull worker", func(c cost) float64 { return c.memory / 1024 }},
	{"GB of the disk at most, beside what was there before", func(c cost) float64 { return c.disk / 1e9 }},
}

// cost is the cost of a pull: the maximum of memory in KiB, and of the
// additional bytes on disk.
type cost struct {
	outcome
	memory, disk float64
}

// watchedPull pulls an image while it measures the cost, and checks what a
// container of it reads.
func (s *server) watchedPull(ctx context.Context, of *bigImage) (name string, c cost, err error) {
	watched := make(chan struct{})
	var watcher sync.WaitGroup
	var failed error
	watcher.Go(func() { failed = c.watch(s, watched) })
	name, took, err := s.timedPull(ctx, of.Artifact)
	close(watched)
	watcher.Wait()
	c.outcome = took
	if err := errors.Join(err, failed); err != nil {
		return name, c, err
	}
	sum, _ := of.hotSum()
	return name, c, s.reads(ctx, name, "/"+hotDir, sum)
}

// watchEvery is short compared with a pull of seconds, and long compared with
// the measurement.
const watchEvery = 50 * time.Millisecond

// watch records the maximum of memory and disk usage until over is closed.
func (c *cost) watch(s *server, over <-chan struct{}) error {
	free, err := freeOf(s.on.Dir)
	if err != nil {
		return err
	}
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		kib, err := s.used.memory()
		if err != nil {
			return err
		}
		now, err := freeOf(s.on.Dir)
		if err != nil {
			return err
		}
		c.memory, c.disk = max(c.memory, kib), max(c.disk, free-now)
		select {
		case <-over:
			return nil
		case <-tick.C:
		}
	}
}

// memory returns the Pss of the server and of its children in KiB, without
// monitors and containers.
func (a accounting) memory() (kib float64, err error) {
	text, err := os.ReadFile(filepath.Join(a.dir, serverCgroup, "cgroup.procs"))
	if err != nil {
		return 0, err
	}
	for _, word := range strings.Fields(string(text)) {
		pid, err := strconv.Atoi(word)
		if err != nil {
			return 0, err
		}
		one, err := pss(pid)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) { // it has ended
			continue
		}
		if err != nil {
			return 0, err
		}
		kib += one
	}
	return kib, nil
}

// freeOf returns how many bytes are available on the file system of a
// directory.
func freeOf(dir string) (float64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("%s: %w", dir, err)
	}
	return float64(st.Bavail) * float64(st.Bsize), nil
}

// hasRoom returns an error if a directory does not have room for the image,
// with the downloads and a second version that has one other layer.
func hasRoom(dir string, of *bigImage) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	if st.Type == unix.TMPFS_MAGIC {
		return fmt.Errorf("%s is a tmpfs, and pulls to the disk are measured: unmount it, or mount a disk there", filepath.Dir(dir))
	}
	free, err := freeOf(dir)
	if err != nil {
		return err
	}
	if err := of.fits(free); err != nil {
		return fmt.Errorf("%s: %w", filepath.Dir(dir), err)
	}
	return nil
}

// fits returns an error if that many bytes of a disk do not suffice.
func (l *bigImage) fits(free float64) error {
	const spare = 1e9
	packed, unpacked := l.sizes()
	need := float64(packed+unpacked) * (1 + 1./bigLayers)
	if free >= need+spare {
		return nil
	}
	return fmt.Errorf("pulls of %s take up to %.1f GB of the disk, where %.1f GB are free: make room, or take a smaller image, as with SIZE=%.0fM",
		l, (need+spare)/1e9, free/1e9, max(smallestBig/1e6, 100*math.Floor(float64(unpacked)*(free-spare)/need/1e8)))
}

// littleRounds is how often each server pulls the sparsely read image.
const littleRounds = 3

// little makes a container of an image of that many bytes read a few of them.
// Neither server fetches an image lazily (decision 0046), so all of it is
// pulled before.
func (p pulls) little(ctx context.Context, size int64) (table, error) {
	b, err := newBulk(ctx, bigLayers, size/bigLayers)
	if err != nil {
		return table{}, err
	}
	of, err := b.image(2, numbers(bigLayers)...)
	if err != nil {
		return table{}, err
	}
	for _, s := range p.servers {
		b.serve(s)
	}
	sums, err := p.inTurns(littleRounds, func(s *server, _ int) ([]outcome, error) { return s.little(ctx, of) })
	if err != nil {
		return table{}, err
	}
	_, read := of.hotSum()
	title := fmt.Sprintf("From PullImage of %s until a container has read %.0f MB of it, %d times: seconds", of, float64(read)/1e6, littleRounds)
	return p.table(title, littleRounds, sums, "PullImage", "the pod is up", "it has read", "in all"), nil
}

// little is one such pull, in steps.
func (s *server) little(ctx context.Context, of *bigImage) (took []outcome, err error) {
	const reader = "little"
	name := s.push(of.Artifact)
	before := s.image
	s.image = name
	defer func() { s.image = before }()
	sum, _ := of.hotSum()
	var all outcome
	for _, step := range []func(ctx context.Context) error{
		func(ctx context.Context) error { return s.pull(ctx, name, of.Artifact) },
		func(ctx context.Context) error { _, err := up(ctx, s, reader); return err },
		func(ctx context.Context) error { return s.hasSum(ctx, reader, "/"+hotDir, sum) },
	} {
		o, err := accounted(ctx, s, 1, 1, func(ctx context.Context, _ int) (life, error) { return life{}, step(ctx) })
		if err != nil {
			return nil, err
		}
		took = append(took, o)
		all.add(o)
	}
	if _, err := down(ctx, s, reader); err != nil {
		return nil, err
	}
	return append(took, all), s.removeImages(ctx, name)
}
