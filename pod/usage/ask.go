package usage

import (
	"context"
	"log/slog"
	"maps"
	"sync"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/panics"
)

const (
	// answerTime is how long a runtime may take to report the usage of a container.
	answerTime = 5 * time.Second
	// silence is how long a container is not asked about again after a runtime did not answer
	// in time.
	silence = 30 * time.Second
	// askTime bounds the questions of one call: a kubelet waits for the statistics of all pods
	// before it decides on evictions, every 10 s.
	askTime = 8 * time.Second
	// mostAsked is how many containers a call asks about at a time: some questions start a
	// process.
	mostAsked = 16
)

// questions are the questions to runtimes that are under way or were not answered in time, by
// container: at most one for each.
type questions struct {
	mu   sync.Mutex
	byID map[string]*question
}

// question is answered when its channel is closed; the answer may be empty.
type question struct {
	deadline time.Time
	answered chan struct{}
	answer   cgroup.Usage
	ended    bool // the runtime returned; guarded by questions
}

// ask returns by id what runtimes report of those containers that only they can measure. It
// takes at most askTime; answers that come later are missing.
func (r *Reader) ask(ctx context.Context, lists ...[]Container) map[string]cgroup.Usage {
	var asked []Container
	for _, list := range lists {
		for _, c := range list {
			if c.Task != nil && c.View.State != cri.ContainerState_CONTAINER_EXITED {
				asked = append(asked, c)
			}
		}
	}
	if len(asked) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	answers := make([]cgroup.Usage, len(asked))
	spread(mostAsked, len(asked), func(i int) {
		if ctx.Err() == nil {
			answers[i] = r.questions.about(ctx, asked[i]).wait(ctx)
		}
	})
	byID := make(map[string]cgroup.Usage, len(asked))
	for i, c := range asked {
		byID[c.View.ID] = answers[i]
	}
	return byID
}

// about returns the question about a container that is under way or was recently not answered
// in time, otherwise a new one. A caller that leaves does not end the question: others may wait
// for it.
func (qs *questions) about(ctx context.Context, c Container) *question {
	now := time.Now()
	qs.mu.Lock()
	defer qs.mu.Unlock()
	maps.DeleteFunc(qs.byID, func(_ string, q *question) bool { return q.ended && now.Sub(q.deadline) >= silence })
	if q := qs.byID[c.View.ID]; q != nil {
		return q
	}
	if qs.byID == nil {
		qs.byID = map[string]*question{}
	}
	q := &question{deadline: now.Add(answerTime), answered: make(chan struct{})}
	qs.byID[c.View.ID] = q
	go qs.put(context.WithoutCancel(ctx), q, c)
	return q
}

// put asks the runtime.
func (qs *questions) put(ctx context.Context, q *question, c Container) {
	ctx, cancel := context.WithDeadline(ctx, q.deadline)
	defer cancel()
	var u cgroup.Usage
	err := panics.Do(ctx, "ask runtime for usage", func() (err error) {
		u, err = c.Task.Usage(ctx)
		return err
	})
	late := ctx.Err() != nil
	if err != nil {
		slog.DebugContext(ctx, "runtime reports no usage of a container", "container", c.View.ID, "err", err)
	}
	qs.mu.Lock()
	defer qs.mu.Unlock()
	q.ended = true
	if !late {
		q.answer = u
		delete(qs.byID, c.View.ID)
	}
	close(q.answered)
}

// wait returns the answer; empty if there is none in time.
func (q *question) wait(ctx context.Context) cgroup.Usage {
	select {
	case <-q.answered:
		return q.answer
	case <-time.After(time.Until(q.deadline)):
	case <-ctx.Done():
	}
	return cgroup.Usage{}
}
