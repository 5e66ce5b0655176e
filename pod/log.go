package pod

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/pod/records"
)

// ReopenContainerLog makes a running container continue its log in a new file. On an error the
// old file stays the log.
//
// A kubelet that evicts a pod may remove the pod's log directory before the containers have
// ended, and still ask for their logs to be reopened: that is fault.Precondition. Like CRI-O
// and containerd, crius does not make the directory again: it belongs to the kubelet, which
// would have to remove it once more. If the directory returns, the next call reopens the log.
func (e *Engine) ReopenContainerLog(ctx context.Context, id string) error {
	c, err := e.containers.Find(id)
	if err != nil {
		return err
	}
	if state := c.View().State; state != cri.ContainerState_CONTAINER_RUNNING {
		return fmt.Errorf("container %s is in state %s; reopening the log requires a running container: %w", c.ID, state, fault.Precondition)
	}
	return e.deps.Trace.Do(ctx, "reopen log", c.ID, func(ctx context.Context) error {
		err := trace.Do(ctx, "reopen log", c.Now().task.ReopenLog)
		if err == nil {
			return nil
		}
		dir := filepath.Dir(c.plan.LogPath)
		if _, statErr := os.Lstat(dir); errors.Is(statErr, os.ErrNotExist) {
			return fmt.Errorf("log directory %s has been removed; output continues to the deleted log file: %w: %w", dir, err, fault.Precondition)
		}
		return err
	})
}

// noteLog logs and publishes a trouble of the container's log, or that it has ended.
func (c *Container) noteLog(trouble conmon.LogTrouble) {
	before := c.Now().log
	if trouble == before {
		return
	}
	c.Change(func(now *liveContainer) { now.log = trouble })
	c.Publish()
	if c.warned.recently(trouble.Reason) {
		return
	}
	switch trouble.Reason {
	case conmon.LogBlocked:
		slog.Warn("container log cannot be written, output waits", "container", c.ID, "pod", c.sandbox.ID, "err", logMessage(trouble))
	case conmon.LogDetached:
		slog.Warn("container log is not at its path, output goes to a file that readers do not find", "container", c.ID, "pod", c.sandbox.ID, "err", logMessage(trouble))
	default:
		slog.Info("container log is written again", "container", c.ID, "pod", c.sandbox.ID)
	}
}

// logWarning is the last warning about a container's log.
type logWarning struct {
	reason string
	at     time.Time
}

// warnPeriod is how often the server's log tells of the same trouble of one container. On a
// nearly full disk it comes and goes several times a second.
const warnPeriod = time.Minute

// recently reports whether the log has told of this trouble within the last warnPeriod, or of one
// that ends now: then nothing is logged, so that the last line about it is the warning.
func (w *logWarning) recently(reason string) bool {
	if (reason == "" || reason == w.reason) && time.Since(w.at) < warnPeriod {
		return true
	}
	w.reason, w.at = reason, time.Now()
	if reason == "" {
		w.at = time.Time{}
	}
	return false
}

// logMessage says what is wrong with a log and what to do; empty for a log that is well.
func logMessage(trouble conmon.LogTrouble) string {
	switch trouble.Reason {
	case conmon.LogBlocked:
		return trouble.Message + ": the container's output waits, and nothing is lost: make the file system of the log writable or free space on it"
	case conmon.LogDetached:
		return trouble.Message + ": later output is not there: have the kubelet reopen the log, which it does for a missing one, or restart the container"
	}
	return ""
}

// Logged returns how many bytes the logs of all containers have grown by since the server
// started, and how many were discarded.
func (e *Engine) Logged(ctx context.Context) conmon.LogCount {
	var g errgroup.Group
	g.SetLimit(recoverWidth)
	for _, c := range e.containers.All() {
		g.Go(func() error { panics.Run(ctx, "count log", func() { c.countLog(ctx) }); return nil })
	}
	_ = g.Wait()
	log := &e.counters.log
	log.mu.Lock()
	defer log.mu.Unlock()
	total := log.removed
	for _, c := range e.containers.All() {
		total = total.Plus(c.logged.Now())
	}
	return total
}

// countTime bounds how long a monitor may take to answer how much it has logged.
const countTime = time.Second

func (c *Container) countLog(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, countTime)
	defer cancel()
	logged := c.Now().task.Logged(ctx)
	c.logged.Change(func(last *conmon.LogCount) { *last = logged })
}

// retire takes the container off the node's list, and keeps the last count of its log.
func (c *Container) retire() {
	log := &c.engine.counters.log
	log.mu.Lock()
	defer log.mu.Unlock()
	log.removed = log.removed.Plus(c.logged.Now())
	c.engine.containers.Drop(records.NameOfContainer(c.sandbox.ID, c.plan.Config.M.GetMetadata()), c.ID)
}
