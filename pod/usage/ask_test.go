package usage

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/storage"
)

// The tests of this file are not parallel: the race detector of Go 1.26 crashes at times when
// bubbles with many timers run side by side.

// runtimeFake answers questions, and counts them.
type runtimeFake struct {
	answer func(ctx context.Context) (cgroup.Usage, error)

	underWay, most, asked atomic.Int64
}

func (f *runtimeFake) Usage(ctx context.Context) (cgroup.Usage, error) {
	f.asked.Add(1)
	now := f.underWay.Add(1)
	defer f.underWay.Add(-1)
	for most := f.most.Load(); now > most && !f.most.CompareAndSwap(most, now); most = f.most.Load() {
	}
	return f.answer(ctx)
}

func (f *runtimeFake) counts(t *testing.T, what string, asked int64) {
	t.Helper()
	if got := f.asked.Load(); got != asked {
		t.Errorf("%s: asked %d times, want %d", what, got, asked)
	}
}

func hang(ctx context.Context) (cgroup.Usage, error) {
	<-ctx.Done()
	return cgroup.Usage{}, ctx.Err()
}

func tasks(n uint64) func(context.Context) (cgroup.Usage, error) {
	return func(context.Context) (cgroup.Usage, error) {
		return cgroup.Usage{Time: time.Now(), Tasks: &n}, nil
	}
}

// layers has a writable layer of each container.
type layers struct{ Images }

func (layers) WritableUsage(context.Context, string) (storage.FsUsage, bool) {
	return storage.FsUsage{UsedBytes: 4096}, true
}

// aPod has n containers of a runtime that is asked, or that is not: nil.
func aPod(id string, n int, task Reporter) Sandbox {
	var all []Container
	for i := range n {
		all = append(all, Container{View: &view.Container{ID: fmt.Sprint(id, i), SandboxID: id, State: cri.ContainerState_CONTAINER_RUNNING}, Task: task})
	}
	return Sandbox{
		View:       &view.Sandbox{ID: id, State: cri.PodSandboxState_SANDBOX_READY},
		Containers: func() []Container { return all },
	}
}

func readerOf(pods ...Sandbox) *Reader {
	return &Reader{
		Images:    layers{},
		Sandboxes: func() []Sandbox { return append([]Sandbox{}, pods...) },
		Containers: func() (all []Container) {
			for _, p := range pods {
				all = append(all, p.Containers()...)
			}
			return all
		},
	}
}

func everyPod(*view.Sandbox) bool         { return true }
func everyContainer(*view.Container) bool { return true }

// took is how long f takes.
func took(f func()) time.Duration {
	began := time.Now()
	f()
	return time.Since(began)
}

// Sandboxes that hang delay a call once, however many containers they have, and take no
// numbers from other pods. Calls meanwhile, and for a while after it, ask no more.
func TestHungSandboxesDelayStatsOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hung, well := &runtimeFake{answer: hang}, &runtimeFake{answer: tasks(7)}
		r := readerOf(aPod("a", 6, hung), aPod("b", 6, hung), aPod("well", 1, well), aPod("runc", 1, nil))
		check := func() {
			for _, s := range r.SandboxStats(t.Context(), everyPod) {
				known := s.View.ID == "well"
				if s.Usage.Gone() == known || known && *s.Usage.Tasks != 7 {
					t.Errorf("pod %s uses %+v", s.View.ID, s.Usage)
				}
				for _, c := range s.Containers {
					if c.Layer == nil || c.Usage.Gone() == known {
						t.Errorf("container %s uses %+v, layer %+v", c.View.ID, c.Usage, c.Layer)
					}
				}
			}
		}
		var calls sync.WaitGroup
		for range 5 {
			calls.Go(func() {
				if d := took(check); d != answerTime {
					t.Errorf("a call took %s, want %s", d, answerTime)
				}
			})
		}
		calls.Wait()
		hung.counts(t, "five calls", 12)
		if most := hung.most.Load(); most != 12 {
			t.Errorf("%d questions at a time, want 12", most)
		}
		before := well.asked.Load()
		if d := took(check); d != 0 {
			t.Errorf("the next call took %s", d)
		}
		hung.counts(t, "the next call", 12)
		well.counts(t, "the next call", before+1)
		time.Sleep(silence)
		if d := took(check); d != answerTime {
			t.Errorf("a call after a while took %s, want %s", d, answerTime)
		}
		hung.counts(t, "a call after a while", 24)
		time.Sleep(answerTime)
	})
}

// Questions to very many containers end with the call's time, and the next call goes on
// with the others.
func TestStatsTakeBoundedTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 5 * mostAsked
		hung := &runtimeFake{answer: hang}
		r := readerOf(aPod("a", n, hung))
		for hung.asked.Load() < n {
			before := hung.asked.Load()
			if d := took(func() { r.ContainerStats(t.Context(), everyContainer) }); d >= 10*time.Second {
				t.Errorf("a call took %s, and the kubelet makes one every 10 s", d)
			}
			if hung.asked.Load() == before {
				t.Fatalf("%d containers of %d are asked about", before, n)
			}
		}
		time.Sleep(answerTime) // the time of the last questions ends
	})
}

// A runtime that does not even return when its time is up is not asked a second time.
func TestQuestionThatNeverReturns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		free := make(chan struct{})
		stuck := &runtimeFake{answer: func(ctx context.Context) (cgroup.Usage, error) {
			<-free
			return tasks(1)(ctx)
		}}
		r := readerOf(aPod("a", 1, stuck))
		for _, want := range []time.Duration{answerTime, 0, 0} {
			d := took(func() {
				if s := r.ContainerStats(t.Context(), everyContainer)[0]; !s.Usage.Gone() {
					t.Errorf("usage is %+v", s.Usage)
				}
			})
			if d != want {
				t.Errorf("a call took %s, want %s", d, want)
			}
			time.Sleep(2 * silence)
		}
		stuck.counts(t, "three calls", 1)
		close(free)
		synctest.Wait()
		if s := r.ContainerStats(t.Context(), everyContainer)[0]; s.Usage.Gone() {
			t.Error("no usage although the runtime answers again")
		}
	})
}

// What goes wrong at once is asked for again by the next call: an error, or a panic.
func TestQuestionThatFailsIsAskedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &runtimeFake{}
		r := readerOf(aPod("a", 1, f))
		for i, answer := range []func(context.Context) (cgroup.Usage, error){
			func(context.Context) (cgroup.Usage, error) { return cgroup.Usage{}, fault.Unavailable },
			func(context.Context) (cgroup.Usage, error) { panic(errors.New("a test")) },
			tasks(1),
		} {
			f.answer = answer
			if s := r.ContainerStats(t.Context(), everyContainer)[0]; s.Usage.Gone() != (i < 2) {
				t.Errorf("call %d: usage is %+v", i, s.Usage)
			}
		}
		f.counts(t, "three calls", 3)
	})
}

// A caller who leaves takes nothing from another one that waits for the same answer.
func TestCallerLeavesQuestion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		free := make(chan struct{})
		slow := &runtimeFake{answer: func(ctx context.Context) (cgroup.Usage, error) {
			select {
			case <-free:
				return tasks(1)(ctx)
			case <-ctx.Done():
				return cgroup.Usage{}, ctx.Err()
			}
		}}
		r := readerOf(aPod("a", 1, slow))
		leaving, leave := context.WithCancel(t.Context())
		var first, second sync.WaitGroup
		first.Go(func() { r.ContainerStats(leaving, everyContainer) })
		synctest.Wait()
		second.Go(func() {
			if s := r.ContainerStats(t.Context(), everyContainer)[0]; s.Usage.Gone() {
				t.Error("no usage for the caller who stayed")
			}
		})
		synctest.Wait()
		leave()
		first.Wait()
		close(free)
		second.Wait()
		slow.counts(t, "two calls", 1)
	})
}
