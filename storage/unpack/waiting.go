package unpack

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/storage/unpack/layerstore"
	"github.com/crius-run/crius/storage/unpack/wire"
)

// Worker is a crius-unpack that waits for its order. To start it takes longer than to unpack a small layer, so it is
// started while the registry is asked for the image.
type Worker struct {
	cancel  context.CancelFunc
	staging *layerstore.Staging
	store   *questions
	process *process
	begun   chan struct{}
	err     error // why it could not be started; valid after begun is closed
	used    bool
	ending  sync.Once
}

// Begin starts a worker for a task of which Library, Job, Temporary, Program, Cgroups and Pod are known. It does not wait
// for it. The caller must End it.
func (t Task) Begin(ctx context.Context) *Worker {
	ctx, cancel := context.WithCancel(ctx)
	w := &Worker{cancel: cancel, begun: make(chan struct{})}
	go func() {
		defer close(w.begun)
		w.err = panics.Do(ctx, "start pull worker", func() error { return w.begin(ctx, t) })
	}()
	return w
}

func (w *Worker) begin(ctx context.Context, t Task) (err error) {
	if w.staging, err = layerstore.NewStaging(t.Library, t.Temporary); err != nil {
		return err
	}
	if w.store, err = openQuestions(layerstore.Store{Store: t.Library}, w.staging.Staging); err != nil {
		return err
	}
	cmd, room := t.Program.command(ctx, w.store.theirs, w.staging.Lock)
	defer room.Close()
	p := &process{Task: t, cmd: cmd, room: room, writable: []string{w.staging.Dir, t.Temporary}, calls: refusedToUnpacker, questions: w.store}
	if err := p.begin(ctx); err != nil {
		return err
	}
	w.process = p
	return nil
}

// End ends the worker, unless it has ended, and deletes what it has left. It may be called on nil, and again.
func (w *Worker) End(ctx context.Context) {
	if w == nil {
		return
	}
	w.ending.Do(func() {
		w.cancel()
		<-w.begun
		if w.process != nil && !w.used {
			w.process.abandon()
		}
		if w.store != nil {
			w.store.close()
		}
		if w.staging == nil {
			return
		}
		if err := w.staging.Delete(); err != nil {
			slog.WarnContext(ctx, "cannot delete the directory in which layers were unpacked; the next start retries", "err", err)
		}
	})
}

// Unpack has a worker unpack the image's layers, and adds them to the store. All of them must have a
// format that source.Documents.Layers knows. The error is pullerror.ErrWorkerDied if the worker ended
// before its work.
func (t Task) Unpack(ctx context.Context) error {
	const attempts = 3
	worker := t.Worker
	for attempt := 1; ; attempt++ {
		if worker == nil {
			worker = t.Begin(ctx)
		}
		again, err := worker.unpack(ctx, t)
		worker.End(ctx)
		if err == nil || !again || attempt == attempts || ctx.Err() != nil {
			return err
		}
		worker = nil
	}
}

// unpack is one attempt of Unpack. It reports whether another may succeed: another program has deleted the layers meanwhile, or
// what the node lacked when this worker was started to wait, or what has killed it since, has nothing to do with the image.
func (w *Worker) unpack(ctx context.Context, t Task) (again bool, err error) {
	waited := w == t.Worker
	defer context.AfterFunc(ctx, w.cancel)()
	<-w.begun
	if w.err != nil {
		return waited, w.err
	}
	w.used = true
	missing := layerstore.Missing(t.Library, t.Source.Layers())
	w.store.expect(missing, t.Free)
	w.process.Task, w.process.blobs = t, t.Source.Blobs()
	last, err := w.process.run(ctx, wire.Order{
		Protocol: wire.Protocol, Layers: missing, Staging: w.staging.Staging, Temporary: t.Temporary, Parallel: t.Parallel, Unpack: t.Unpacking, RepeatRoom: t.RepeatRoom,
	})
	if err == nil && !last.Unpacked {
		err = fmt.Errorf("pull worker ended with an unexpected message: %w", fault.Invalid)
	}
	return w.staging.Swept() || waited && !w.process.heard, err
}
