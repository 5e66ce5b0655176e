package pod

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/pod/audit"
	"github.com/crius-run/crius/pod/records"
)

// secondLook is the time after which the namespaces of a pod that seems dead are looked for again.
// The end of a pod is final, and a mount may be gone for a moment while somebody mounts or moves the
// file system above it.
const secondLook = time.Second

// checkAlive ends the pod if it is dead, as a server that starts would find: a namespace is no
// longer pinned, for instance, now and after secondLook. No container can be created in it, and the
// kubelet makes a new pod once this one is not ready (cri-o#1927). What cannot be looked at now
// counts as there. checkAlive does not wait for verbs: creations under way are cancelled, and undo
// themselves.
func (s *Sandbox) checkAlive() (dead error) {
	if lost, _ := s.lost(); len(lost) == 0 || !s.engine.awaitSecondLook() {
		return nil
	}
	_, dead = s.endIfLost()
	return dead
}

// lost returns what a ready pod has lost, and what cannot be looked at.
func (s *Sandbox) lost() (lost, unseen []error) {
	now := s.Now()
	if now.Phase != records.Ready || s.ending.Err() != nil {
		return nil, nil
	}
	return audit.Lost(records.Pod{PodPlan: s.plan, PodState: now.PodState}, now.infra, s.engine.planner().Boot)
}

// awaitSecondLook reports whether the second look may be taken: not while the server ends.
func (e *Engine) awaitSecondLook() bool {
	pause := time.NewTimer(secondLook)
	defer pause.Stop()
	select {
	case <-pause.C:
		return true
	case <-e.background.Closing().Done():
		return false
	}
}

// endIfLost is the second look.
func (s *Sandbox) endIfLost() (unseen []error, dead error) {
	lost, unseen := s.lost()
	if len(lost) == 0 {
		return unseen, nil
	}
	dead = fmt.Errorf("pod %s is not ready: %s: %w", s.ID, errors.Join(lost...).Error(), fault.Precondition)
	ended := false
	s.Change(func(now *livePod) {
		if ended = now.Phase == records.Ready && s.ending.Err() == nil; ended {
			s.callOff(dead)
		}
	})
	if ended { // else a verb or another reader was faster
		slog.Warn("pod is dead, pod not ready", "pod", s.ID, "err", errors.Join(lost...))
		s.Publish()
		s.Tell()
	}
	return nil, dead
}

// remakeFiles makes again what is gone of the pod's files and its /dev/shm. Otherwise each creation in
// the pod would fail, or give a directory of the node to the container as its /dev/shm. Containers
// that run keep what they have.
func (s *Sandbox) remakeFiles(ctx context.Context) error {
	s.remaking.Lock()
	defer s.remaking.Unlock()
	gone := s.files.Missing()
	if len(gone) == 0 || !s.plan.OwnFiles {
		return nil
	}
	slog.WarnContext(ctx, "files of the pod are gone, making them again", "pod", s.ID, "gone", gone)
	return trace.Do(ctx, "remake pod files", func(ctx context.Context) error {
		if err := s.labelled(s.files.Mount)(ctx); err != nil {
			return err
		}
		if s.plan.Namespaces.IPC {
			if err := s.labelled(s.mountShm)(ctx); err != nil {
				return err
			}
		}
		if len(s.files.Missing()) == 0 { // it was a mount; containers may have changed the files
			return nil
		}
		return s.files.Write(&s.plan)
	})
}

// pins notices pods whose pinned namespaces are gone, for lists: a list of all pods costs one
// system call more as long as the node's mounts do not change.
type pins struct {
	mu     sync.Mutex
	mounts mount.Watch
	again  bool // something could not be looked at
}

// check ends the pods that are dead, by one second look at all of them. If another list is just
// looking, it does not wait for that.
func (p *pins) check(all []*Sandbox) {
	if !p.mu.TryLock() {
		return
	}
	defer p.mu.Unlock()
	if !p.mounts.Changed() && !p.again {
		return
	}
	p.again = false
	var suspects []*Sandbox
	for _, s := range all {
		lost, unseen := s.lost()
		p.again = p.again || len(unseen) > 0
		if len(lost) > 0 {
			suspects = append(suspects, s)
		}
	}
	if len(suspects) == 0 || !suspects[0].engine.awaitSecondLook() {
		return
	}
	dead := 0
	for _, s := range suspects {
		unseen, err := s.endIfLost()
		p.again = p.again || len(unseen) > 0
		if err != nil {
			dead++
		}
	}
	if dead > 1 {
		slog.Error("several pods have lost their namespaces at once, pods not ready: find out what unmounts them", "pods", dead, "dir", suspects[0].engine.cfg.NamespacesDir)
	}
}

func (p *pins) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mounts.Close()
}
