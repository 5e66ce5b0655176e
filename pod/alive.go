package pod

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/pod/audit"
	"github.com/crius-run/crius/pod/records"
)

// checkAlive ends the pod if it is dead, as a server that starts would find: a namespace is no
// longer pinned, for instance. No container can be created in it, and the kubelet makes a new pod
// once this one is not ready (cri-o#1927). What cannot be looked at now counts as there, and is
// unseen. checkAlive does not wait: creations under way are cancelled, and undo themselves.
func (s *Sandbox) checkAlive() (unseen []error, dead error) {
	now := s.Now()
	if now.Phase != records.Ready || s.ending.Err() != nil {
		return nil, nil
	}
	lost, unseen := audit.Lost(records.Pod{PodPlan: s.plan, PodState: now.PodState}, now.infra, s.engine.planner.Boot)
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

// check ends the pods that are dead. If another list is just looking, it does not wait for that.
func (p *pins) check(all []*Sandbox) {
	if !p.mu.TryLock() {
		return
	}
	defer p.mu.Unlock()
	if !p.mounts.Changed() && !p.again {
		return
	}
	p.again = false
	for _, s := range all {
		unseen, _ := s.checkAlive()
		p.again = p.again || len(unseen) > 0
	}
}

func (p *pins) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mounts.Close()
}
