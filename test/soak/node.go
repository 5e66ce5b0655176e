package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

const (
	variants     = 4 // of images that are pulled and removed
	livesAtOnce  = 3 // of each worker in a round
	longestReign = 4 * time.Second
)

// soakNode is a node on which pods live.
type soakNode struct {
	*scene.World
	name     string
	shaken   bool
	handlers []string
	trends   map[string]*trend
	stay     []*life
	empty    *inventory.Snapshot

	mu       sync.Mutex
	random   *rand.Rand
	pods     int
	tally    tally
	problems []error
}

// tally counts what has been done.
type tally struct{ pods, containers, requests, kills, repeats, problems int }

func (t *tally) String() string {
	return fmt.Sprintf("%d pods, %d containers, %d requests; %d restarts and kills, %d calls repeated; %d problems",
		t.pods, t.containers, t.requests, t.kills, t.repeats, t.problems)
}

func newSoakNode(ctx context.Context, name string, shaken bool, seed uint64, handlers []string) (_ *soakNode, err error) {
	h := &soakNode{name: name, shaken: shaken, handlers: handlers, trends: map[string]*trend{}, random: rand.New(rand.NewPCG(seed, uint64(len(name))))}
	o := node.Options{Config: "log_level = \"info\"\n"}
	for _, handler := range handlers {
		if slices.Contains(scene.Handlers, handler) {
			continue
		}
		config, err := tools.Handler(ctx, handler)
		if err != nil {
			return nil, err
		}
		o.Config += config
	}
	if h.World, err = scene.New(ctx, o); err != nil {
		return nil, err
	}
	if err := h.furnish(ctx); err != nil {
		return nil, errors.Join(err, h.Close())
	}
	return h, nil
}

// furnish pushes the images and starts the permanent pods.
func (h *soakNode) furnish(ctx context.Context) error {
	for i := range variants {
		built, err := images.Build(func(c *imagespec.ImageConfig) { c.Labels = map[string]string{"variant": fmt.Sprint(i)} },
			image.Text("variant", strings.Repeat(fmt.Sprintln("variant", i), 10_000)))
		if err != nil {
			return err
		}
		h.Registry.Push(fmt.Sprintf("soak/%d", i), "latest", built)
	}
	if err := h.Settle(ctx, h.handlers...); err != nil {
		return err
	}
	h.empty = h.Empty
	for _, handler := range h.handlers {
		l := h.newLife(handler)
		if err := l.begin(ctx); err != nil {
			return err
		}
		for _, line := range []string{"lines 1000000000 20ms", "tcp :8080 echo ; sleep"} {
			if err := l.start(ctx, images.Probe, line); err != nil {
				return err
			}
		}
		h.stay = append(h.stay, l)
	}
	return nil
}

// n returns a random number below n.
func (h *soakNode) n(n int) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.random.IntN(n)
}

func (h *soakNode) note(change func(*tally)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	change(&h.tally)
}

// problem records what should not have happened.
func (h *soakNode) problem(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.tally.problems++
	h.problems = append(h.problems, err)
}

// call makes a call, and repeats it like a kubelet as long as the server is
// down. If nothing stops the server an answer is final.
func (h *soakNode) call(ctx context.Context, what string, f func(context.Context) error) error {
	var err error
	wait.Until(ctx, func() bool {
		err = f(ctx)
		if code := status.Code(err); !h.shaken || code != codes.Unavailable && code != codes.Canceled {
			return true
		}
		h.note(func(t *tally) { t.repeats++ })
		return false
	})
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// round lets each worker run some lives, while the permanent pods are checked
// and the server, if the node is shaken, is stopped. It returns when all is
// over.
func (h *soakNode) round(ctx context.Context, workers int) error {
	over := make(chan struct{})
	var lives, beside sync.WaitGroup
	for range workers {
		lives.Go(func() {
			for range livesAtOnce {
				h.live(ctx)
			}
		})
	}
	beside.Go(func() { h.care(ctx, over) })
	var shaking error
	if h.shaken {
		beside.Go(func() { shaking = h.shake(ctx, over) })
	}
	lives.Wait()
	close(over)
	beside.Wait()
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.problems) > 0 {
		shaking = errors.Join(append([]error{shaking}, h.problems[:min(len(h.problems), 10)]...)...)
	}
	return errors.Join(shaking, ctx.Err())
}

// shake stops or kills the server at random and restarts it.
func (h *soakNode) shake(ctx context.Context, over <-chan struct{}) error {
	for {
		select {
		case <-over:
			return nil
		case <-time.After(time.Duration(h.n(int(longestReign/time.Millisecond))) * time.Millisecond):
		}
		again := h.Crash
		if h.n(3) == 0 {
			again = h.Restart
		}
		if err := again(ctx); err != nil {
			return err
		}
		h.note(func(t *tally) { t.kills++ })
	}
}

// care queries and measures the permanent pods and rotates their logs, until
// the lives beside them are over.
func (h *soakNode) care(ctx context.Context, over <-chan struct{}) {
	for {
		for _, l := range h.stay {
			for _, c := range l.containers {
				l.request(ctx, c)
			}
			l.rotate(ctx, l.containers[0])
		}
		for what, list := range h.lists() {
			if err := h.call(ctx, what, list); err != nil {
				h.problem(err)
			}
		}
		select {
		case <-over:
			return
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// lists returns a kubelet's requests about the node as a whole.
func (h *soakNode) lists() map[string]func(context.Context) error {
	return map[string]func(context.Context) error{
		"ListPodSandbox": func(ctx context.Context) error {
			_, err := h.Runtime().ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
			return err
		},
		"ListContainers": func(ctx context.Context) error {
			_, err := h.Runtime().ListContainers(ctx, &cri.ListContainersRequest{})
			return err
		},
		"ListPodSandboxStats": func(ctx context.Context) error {
			_, err := h.Runtime().ListPodSandboxStats(ctx, &cri.ListPodSandboxStatsRequest{})
			return err
		},
		"ListContainerStats": func(ctx context.Context) error {
			_, err := h.Runtime().ListContainerStats(ctx, &cri.ListContainerStatsRequest{})
			return err
		},
		"ListPodSandboxMetrics": func(ctx context.Context) error {
			_, err := h.Runtime().ListPodSandboxMetrics(ctx, &cri.ListPodSandboxMetricsRequest{})
			return err
		},
		"Status": func(ctx context.Context) error {
			_, err := h.Runtime().Status(ctx, &cri.StatusRequest{Verbose: true})
			return err
		},
		"ImageFsInfo": func(ctx context.Context) error {
			_, err := h.Images().ImageFsInfo(ctx, &cri.ImageFsInfoRequest{})
			return err
		},
		"ListImages": func(ctx context.Context) error {
			_, err := h.Images().ListImages(ctx, &cri.ListImagesRequest{})
			return err
		},
	}
}

// end removes the permanent pods, and checks that the node is as before.
func (h *soakNode) end(ctx context.Context) error {
	for _, l := range h.stay {
		if err := l.end(ctx); err != nil {
			return err
		}
	}
	for i := range variants {
		if err := h.removeImage(ctx, i); err != nil {
			return err
		}
	}
	if faults := h.Faults(); len(faults) > 0 {
		return fmt.Errorf("the server's log has %d faults; the first:\n%s", len(faults), faults[0])
	}
	return h.Clean(ctx, h.empty, wait.Limit)
}

func (h *soakNode) pullImage(ctx context.Context, variant int) (ref string, err error) {
	ref = fmt.Sprintf("%s/soak/%d:latest", node.RegistryHost, variant)
	return ref, h.call(ctx, "PullImage", func(ctx context.Context) error {
		_, err := h.Images().PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref}})
		return err
	})
}

func (h *soakNode) removeImage(ctx context.Context, variant int) error {
	ref := fmt.Sprintf("%s/soak/%d:latest", node.RegistryHost, variant)
	return h.call(ctx, "RemoveImage", func(ctx context.Context) error {
		_, err := h.Images().RemoveImage(ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: ref}})
		return err
	})
}

// cut removes what a kubelet has rotated away.
func cut(file string) error {
	err := os.Remove(file)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
