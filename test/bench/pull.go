package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/wait"
)

const (
	pullRounds = 3
	smallCount = 40
)

// usual is the content of an image of some 200 MB.
var usual = contentShape{layers: 6, files: 500, file: 200 << 10}

// pullRow pulls images of several shapes, and measures what is fetched again
// for one that is partly present.
func pullRow(ctx context.Context) (tables []table, err error) {
	c, us, them, err := newServers(ctx, "runc")
	if err != nil {
		return nil, err
	}
	defer func() { err = c.end(ctx, err) }()
	if err := c.settle(ctx); err != nil {
		return nil, err
	}
	p := pulls{c.names(), []*server{us, them}}
	for _, part := range []func(context.Context) (table, error){p.large, p.larger, p.deep, p.small, p.listed, p.again} {
		t, err := part(ctx)
		if err != nil {
			return nil, err
		}
		tables = append(tables, t)
	}
	return tables, nil
}

// pulls are made by servers in turns.
type pulls struct {
	names   []string
	servers []*server
}

// large pulls an image, each time followed by another one with the same layers.
func (p pulls) large(ctx context.Context) (table, error) {
	return p.shaped(ctx, usual, pullRounds, "nothing of it there", "all layers there")
}

// larger pulls an image of 1 GB.
func (p pulls) larger(ctx context.Context) (table, error) {
	return p.shaped(ctx, contentShape{layers: 10, files: 750, file: 400 << 10}, 2, "nothing of it there")
}

// deep pulls an image of many layers.
func (p pulls) deep(ctx context.Context) (table, error) {
	return p.shaped(ctx, contentShape{layers: 100, files: 20, file: 20 << 10}, pullRounds, "nothing of it there")
}

// shaped pulls images with the same layers, one for each step, and removes
// them. In the first round it also checks what containers of them read.
func (p pulls) shaped(ctx context.Context, of contentShape, rounds int, steps ...string) (table, error) {
	made, err := newContent(ctx, of)
	if err != nil {
		return table{}, err
	}
	var versions []*image.Artifact
	for range steps {
		built, err := makeImage(made.layers, len(versions))
		if err != nil {
			return table{}, err
		}
		versions = append(versions, built)
	}
	sums, err := p.inTurns(rounds, func(s *server, round int) (took []outcome, err error) {
		var names []string
		for version, built := range versions {
			name, o, err := s.timedPull(ctx, built)
			if err != nil {
				return nil, err
			}
			names, took = append(names, name), append(took, o)
			want := 0
			if version == 0 {
				want = of.layers
			}
			if fetched := made.fetched(s); fetched != want {
				return nil, fmt.Errorf("it fetched %d layers instead of %d", fetched, want)
			}
			if round > 0 {
				continue
			}
			if err := made.read(ctx, s, name); err != nil {
				return nil, err
			}
		}
		return took, s.removeImages(ctx, names...)
	})
	if err != nil {
		return table{}, err
	}
	title := fmt.Sprintf("Image of %s, from a registry on the same machine, %d pulls each: seconds", made, rounds)
	return p.table(title, rounds, sums, steps...), nil
}

// farAway is how late the answers of a registry are that is not on the same
// machine: one in the same region.
const farAway = 10 * time.Millisecond

// small pulls many images with a common base, one after the other like a
// kubelet, from a registry that answers at once and from one that is farther
// away.
func (p pulls) small(ctx context.Context) (table, error) {
	images, err := smallImages(smallCount)
	if err != nil {
		return table{}, err
	}
	sums, err := p.inTurns(pullRounds, func(s *server, _ int) (took []outcome, err error) {
		names := make([]string, len(images))
		for i, built := range images {
			names[i] = s.push(built)
		}
		defer s.on.Registry.Heal()
		for range 2 {
			o, err := accounted(ctx, s, len(images), 1, func(ctx context.Context, i int) (life, error) {
				return life{}, s.pull(ctx, names[i], images[i])
			})
			if err == nil {
				err = s.removeImages(ctx, names...)
			}
			if err != nil {
				return nil, err
			}
			took = append(took, o)
			s.on.Registry.Inject(registry.Fault{Do: registry.Late(farAway)})
		}
		return took, nil
	})
	if err != nil {
		return table{}, err
	}
	title := fmt.Sprintf("%d images of 1 to 3 MB on one base, one after the other, %d times: seconds for all", smallCount, pullRounds)
	return p.table(title, pullRounds, sums, "nothing of them there", fmt.Sprintf("the same, and each answer of the registry %v later", farAway)), nil
}

// listed measures what a kubelet asks about images, again and again, of servers that have many.
func (p pulls) listed(ctx context.Context) (table, error) {
	images, err := smallImages(smallCount)
	if err != nil {
		return table{}, err
	}
	names := make([]string, len(images))
	for i, built := range images {
		for _, s := range p.servers {
			names[i] = s.push(built)
			if err := s.pull(ctx, names[i], built); err != nil {
				return table{}, fmt.Errorf("%s: %w", s.label, err)
			}
		}
	}
	all, err := askInTurns(p.servers, func(s *server) ([]asked, error) { return s.askForImages(ctx, names) })
	if err != nil {
		return table{}, err
	}
	for _, s := range p.servers {
		if err := s.removeImages(ctx, names...); err != nil {
			return table{}, fmt.Errorf("%s: %w", s.label, err)
		}
	}
	t := compare(fmt.Sprintf("%d images, %d calls each: ms", smallCount, listCalls), 99, p.names...)
	for i, a := range all[0] {
		t.line(a.call, a.took(), all[1][i].took())
		t.line("CPU", []float64{a.serverRan()}, []float64{all[1][i].serverRan()})
	}
	return t.table, nil
}

// askForImages times what a kubelet asks of a server that has images with names.
func (s *server) askForImages(ctx context.Context, names []string) (all []asked, err error) {
	r := s.images()
	for _, call := range []call{
		{"ListImages", func(ctx context.Context) error {
			got, err := r.ListImages(ctx, &cri.ListImagesRequest{})
			return wrong(err, len(got.GetImages()), len(names), 10) // of the node itself
		}},
		{"ImageStatus", func(ctx context.Context) error {
			got, err := r.ImageStatus(ctx, &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: names[0]}})
			if err == nil && got.Image == nil {
				err = fmt.Errorf("it has no image %s", names[0])
			}
			return err
		}},
		{"ImageFsInfo", func(ctx context.Context) error {
			got, err := r.ImageFsInfo(ctx, &cri.ImageFsInfoRequest{})
			return wrong(err, len(got.GetImageFilesystems()), 1, 0)
		}},
	} {
		answers, err := s.timed(ctx, call)
		if err != nil {
			return nil, err
		}
		all = append(all, answers)
	}
	return all, nil
}

// inTurns has each server do the steps of a round, and adds up what each step
// took.
func (p pulls) inTurns(rounds int, do func(s *server, round int) ([]outcome, error)) (sums [][]outcome, err error) {
	sums = make([][]outcome, len(p.servers))
	for round := range rounds {
		for i, s := range p.servers {
			took, err := do(s, round)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", s.label, err)
			}
			if sums[i] == nil {
				sums[i] = make([]outcome, len(took))
			}
			for step, o := range took {
				sums[i][step].add(o)
			}
		}
	}
	return sums, nil
}

// table returns seconds and CPU seconds of each step, as means of all rounds.
func (p pulls) table(title string, rounds int, sums [][]outcome, steps ...string) table {
	t := compare(title, 0, p.names...)
	for step, name := range steps {
		var wall, cpu [][]float64
		for _, of := range sums {
			wall = append(wall, []float64{of[step].wall / float64(rounds)})
			cpu = append(cpu, []float64{of[step].cpu / float64(rounds)})
		}
		t.line(name, wall...)
		t.line("CPU", cpu...)
	}
	return t.table
}

// refetches are the cases in which fetches of an image with several layers are
// counted.
var refetches = [...]string{
	"nothing of it there",
	"another version there, which has another top layer",
	"the server was killed when half of it had come",
	"both before and after it was killed",
}

// again measures what is fetched for an image that is partly present.
func (p pulls) again(ctx context.Context) (table, error) {
	of := usual
	of.layers++ // the top one of the second version
	made, err := newContent(ctx, of)
	if err != nil {
		return table{}, err
	}
	first, err := makeImage(made.layers[:usual.layers], 0)
	if err != nil {
		return table{}, err
	}
	second, err := makeImage(slices.Concat(made.layers[:usual.layers-1], made.layers[usual.layers:]), 1)
	if err != nil {
		return table{}, err
	}
	fetched := make([][][]float64, len(refetches))
	for _, s := range p.servers {
		megabytes, err := s.refetch(ctx, s.timedPull, first, second)
		if err != nil {
			return table{}, fmt.Errorf("%s: %w", s.label, err)
		}
		for i, mb := range megabytes {
			fetched[i] = append(fetched[i], []float64{mb})
		}
	}
	t := compare(fmt.Sprintf("What is fetched of an image in %d layers: MB", usual.layers), 0, p.names...)
	for i, what := range refetches {
		t.line(what, fetched[i]...)
	}
	return t.table, nil
}

// refetch returns how many megabytes the server fetches in each case of
// refetches. The images are pulled with pull.
func (s *server) refetch(ctx context.Context, pull puller, first, second *image.Artifact) (megabytes [len(refetches)]float64, err error) {
	fetched := func() float64 { return float64(s.on.Registry.Sent("/blobs/")) / 1e6 }
	var names []string
	for i, built := range []*image.Artifact{first, second} {
		name, _, err := pull(ctx, built)
		if err != nil {
			return megabytes, err
		}
		names = append(names, name)
		megabytes[i] = fetched()
	}
	if err := s.removeImages(ctx, names...); err != nil {
		return megabytes, err
	}
	if err := s.dieInPull(ctx, names[0], func() bool { return fetched() >= megabytes[0]/2 }); err != nil {
		return megabytes, err
	}
	before := fetched()
	name, _, err := pull(ctx, first)
	if err != nil {
		return megabytes, err
	}
	megabytes[2] = fetched()
	megabytes[3] = before + fetched()
	return megabytes, s.removeImages(ctx, name)
}

// dieInPull kills the server while it pulls an image, once now returns true,
// and restarts it.
func (s *server) dieInPull(ctx context.Context, name string, now func() bool) error {
	s.on.Registry.Forget()
	ended := make(chan error, 1)
	go func() {
		_, err := s.images().PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: name}})
		ended <- err
	}()
	came := wait.Until(ctx, now)
	if err := s.program.Kill(); err != nil {
		return err
	}
	if err := <-ended; err == nil || !came {
		return fmt.Errorf("the server was not killed while it pulled: %w", err)
	}
	if err := s.program.Start(ctx); err != nil {
		return err
	}
	return s.used.enter(s.program.PID())
}

// pulledFrom is the repository of pulled images, in the node's registry.
const pulledFrom = "pulled"

// push pushes an image to the node's registry, and returns its name there.
func (s *server) push(built *image.Artifact) (name string) {
	tag := built.ID()[:12]
	s.on.Registry.Push(pulledFrom, tag, built)
	return fmt.Sprintf("%s/%s:%s", node.RegistryHost, pulledFrom, tag)
}

// A puller pulls an image, and returns its name and the cost. The registry's
// records are of this pull alone.
type puller func(ctx context.Context, built *image.Artifact) (name string, took outcome, err error)

// timedPull pulls an image. The registry's records are of this pull alone.
func (s *server) timedPull(ctx context.Context, built *image.Artifact) (name string, took outcome, err error) {
	name = s.push(built)
	s.on.Registry.Forget()
	took, err = accounted(ctx, s, 1, 1, func(ctx context.Context, _ int) (life, error) {
		_, err := s.images().PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: name}})
		return life{}, err
	})
	if err == nil {
		err = s.pull(ctx, name, built) // it is present, so that this only resolves it
	}
	return name, took, err
}

func (s *server) removeImages(ctx context.Context, names ...string) error {
	for _, name := range names {
		if _, err := s.images().RemoveImage(ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: name}}); err != nil {
			return err
		}
	}
	return nil
}
