package pod

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/oci"
)

// This file is where facts change and views are made of them.

func (s *Sandbox) put(ctx context.Context) error {
	s.mu.Lock()
	rec := s.rec
	s.mu.Unlock()
	return s.engine.podRecords.Put(ctx, s.id, &rec)
}

func (s *Sandbox) phase() phase {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rec.Phase
}

func (s *Sandbox) setPhase(p phase) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rec.Phase = p
}

func (s *Sandbox) setNetwork(a *network.Attachment) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rec.Network = a
}

func (s *Sandbox) network() *network.Attachment {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rec.Network
}

func (s *Sandbox) owesNetwork() bool { return s.network() != nil }

func (s *Sandbox) setOwed(why error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.owed = why
}

func (s *Sandbox) whyOwed() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.owed
}

func (s *Sandbox) setGone() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gone = true
}

func (s *Sandbox) setInfra(t oci.Task, unheard bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.infra, s.unheard = t, unheard
}

// takeInfra is false if nobody needs the task any more.
func (s *Sandbox) takeInfra(t oci.Task) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ending.Err() != nil {
		return false
	}
	s.infra, s.unheard = t, false
	return true
}

func (s *Sandbox) isUnheard() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.unheard
}

func (s *Sandbox) infraTask() oci.Task {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.infra
}

func (s *Sandbox) setResources(overhead, resources *cri.LinuxContainerResources) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if overhead != nil {
		s.rec.Overhead.M = overhead
	}
	if resources != nil {
		s.rec.Resources.M = resources
	}
}

func (s *Sandbox) config() *cri.PodSandboxConfig {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rec.config()
}

// publish shows readers the pod as it is now.
func (s *Sandbox) publish() {
	s.mu.Lock()
	defer s.mu.Unlock()
	v := &SandboxView{
		ID:        s.id,
		Handler:   s.rec.Handler,
		Config:    s.rec.config(),
		State:     cri.PodSandboxState_SANDBOX_NOTREADY,
		CreatedAt: s.rec.CreatedAt,
		Memo:      new(Memo),
	}
	if s.rec.Phase == phaseReady && s.ending.Err() == nil {
		v.State = cri.PodSandboxState_SANDBOX_READY
		if s.rec.Namespaces.Net {
			v.NetNS = s.rec.Namespaces.Paths().Net
		}
		if s.rec.Network != nil {
			v.IPs = s.rec.Network.IPs
			v.Interface = s.rec.Network.Interface
		}
		if s.infra != nil {
			v.PID = s.infra.PID()
		}
	} else {
		s.meter.close()
	}
	s.view.Store(v)
}

func (c *Container) put(ctx context.Context) error {
	c.mu.Lock()
	rec := c.rec
	c.mu.Unlock()
	return c.engine.ctrRecords.Put(ctx, c.id, &rec)
}

func (c *Container) phase() phase {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.rec.Phase
}

func (c *Container) setPhase(p phase) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rec.Phase = p
}

// setStart sets the phase with the time of a start; zero: there was none.
func (c *Container) setStart(p phase, at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rec.Phase, c.rec.StartedAt = p, at
}

func (c *Container) setGone() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gone = true
}

func (c *Container) setStartError(cause error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rec.StartError, c.rec.StartedAt = cause.Error(), time.Time{}
}

// refused is why the runtime did not create the container, nil if it did.
func (c *Container) refused() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.rec.unstartable() {
		return nil
	}
	return &oci.ProgramError{Message: c.rec.StartError}
}

func (c *Container) setUser(user *cri.ContainerUser) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rec.User.M = user
}

func (c *Container) stopSignal() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.rec.StopNumber
}

// mergedResources are the limits in force with r over them, of which only
// fields that are set count (CRI: UpdateContainerResourcesRequest).
func (c *Container) mergedResources(r *cri.LinuxContainerResources) *cri.LinuxContainerResources {
	c.mu.Lock()
	defer c.mu.Unlock()
	merged := &cri.LinuxContainerResources{}
	if c.rec.Resources.M != nil {
		merged = proto.CloneOf(c.rec.Resources.M) // views refer to the old one
	}
	hugepages := merged.HugepageLimits
	merged.HugepageLimits = nil
	proto.Merge(merged, r)
	for _, old := range hugepages {
		same := func(l *cri.HugepageLimit) bool { return l.GetPageSize() == old.GetPageSize() }
		if !slices.ContainsFunc(merged.HugepageLimits, same) {
			merged.HugepageLimits = append(merged.HugepageLimits, old)
		}
	}
	return merged
}

func (c *Container) setResources(r *cri.LinuxContainerResources) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rec.Resources.M = r
}

func (c *Container) task() oci.Task {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.live
}

// setTask is false for a container that is being removed: its task is nobody's.
func (c *Container) setTask(task oci.Task, unheard bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.rec.Phase == phaseRemoving {
		return false
	}
	c.live, c.unheard = task, unheard
	return true
}

func (c *Container) isUnheard() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.unheard
}

// publish shows readers the container as it is now.
func (c *Container) publish() {
	c.mu.Lock()
	defer c.mu.Unlock()
	rec := &c.rec
	v := &ContainerView{
		ID:         c.id,
		SandboxID:  rec.SandboxID,
		Handler:    rec.Handler,
		Config:     rec.Config.M,
		ImageID:    rec.ImageID,
		ImageRef:   rec.ImageRef,
		State:      cri.ContainerState_CONTAINER_CREATED,
		CreatedAt:  rec.CreatedAt,
		StartedAt:  rec.StartedAt,
		LogPath:    rec.LogPath,
		Mounts:     rec.mounts(),
		User:       rec.User.M,
		StopSignal: rec.StopSignal,
		Bundle:     c.ref.Dir,
		Memo:       new(Memo),
	}
	if rec.Resources.M != nil {
		v.Resources = &cri.ContainerResources{Linux: rec.Resources.M}
	}
	switch {
	case c.exit != nil:
		v.State = cri.ContainerState_CONTAINER_EXITED
		v.FinishedAt = c.exit.FinishedAt
		v.ExitCode, v.Reason, v.Message = rec.ending(*c.exit)
	case rec.Phase == phaseStarted:
		v.State = cri.ContainerState_CONTAINER_RUNNING
		v.PID = c.live.PID()
	default:
		v.PID = c.live.PID()
		if rec.Phase == phaseStarting { // of an earlier server, and may be still
			v.StartedAt = time.Time{}
		}
	}
	c.view.Store(v)
}

// startErrorCode is what peers report for a program that could not be started.
const startErrorCode = 128

// ending says how the container ended, in the words that the kubelet knows.
func (rec *containerRecord) ending(exit conmon.Exit) (code int32, reason, message string) {
	switch {
	case rec.StartError != "":
		return startErrorCode, "StartError", rec.StartError
	case exit.Code == 0:
		return 0, "Completed", ""
	case exit.OOMKills > 0:
		return exit.Code, "OOMKilled", ""
	default:
		return exit.Code, "Error", exit.Message
	}
}

// watch waits for the end of the container and makes it known.
func (c *Container) watch() { c.engine.insist("watch container "+c.id, c.awaitExit) }

func (c *Container) awaitExit() {
	select {
	case <-c.exited:
		return
	default:
	}
	select {
	case <-c.task().Exited():
	case <-c.engine.closing.Done():
		return
	}
	exit, err := c.task().Exit()
	if err != nil {
		exit = c.lost(err)
	}
	if exit.OOMKills > 0 && exit.Code != 0 {
		c.engine.counters.oomKilled.Add(1)
	}
	if !c.stop.asked() {
		c.keep()
	}
	c.showExit(exit)
	c.tell() // before whoever waits for this goes on, and ends or removes the pod
	close(c.exited)
	slog.Info("container exited", "container", c.id, "pod", c.sandbox.id, "code", exit.Code, "oomkills", exit.OOMKills)
}

// keep has the records on the disk before anybody hears of an end that nobody
// asked for: a job that has succeeded must not be run again because a power cut
// took all that tells of it. Only what lived for a moment is not there by then.
func (c *Container) keep() {
	err := errors.Join(c.engine.podRecords.SyncOne(c.sandbox.id), c.engine.ctrRecords.SyncOne(c.id))
	if err != nil {
		slog.Warn("cannot sync the records of an exited container", "container", c.id, "err", err)
	}
}

func (c *Container) setExit(exit conmon.Exit) {
	c.showExit(exit)
	close(c.exited)
}

// showExit is for readers.
func (c *Container) showExit(exit conmon.Exit) {
	c.mu.Lock()
	c.exit = &exit
	c.mu.Unlock()
	c.publish()
	c.meter.close()
}

// Codes of exits that nobody saw.
const (
	codeKilled  = 137 // we killed it
	codeUnknown = 255 // it was gone when we came
)

// lost settles the end of a container whose monitor is gone: without it the
// container's output goes nowhere and its exit cannot be seen, so it is killed
// and this once the server writes the exit.
func (c *Container) lost(cause error) conmon.Exit {
	ctx, cancel := undoContext(c.engine.closing)
	defer cancel()
	exit := conmon.Exit{Code: codeKilled, FinishedAt: time.Now(), Message: fmt.Sprintf("the container's monitor was lost (%v), so it was killed", cause)}
	c.engine.counters.monitorsLost.Add(1)
	slog.ErrorContext(ctx, "monitor lost, killing its container", "container", c.id, "err", cause)
	_ = c.engine.deps.Trace.Do(ctx, "end lost container", c.id, func(ctx context.Context) error {
		if err := trace.Do(ctx, "SIGKILL", c.task().Kill); err != nil {
			slog.ErrorContext(ctx, "container without a monitor not dead after SIGKILL", "container", c.id, "err", err)
		}
		err := trace.Call(ctx, "write exit", func() error { return conmon.WriteExit(c.ref.ExitFile, exit) })
		if err != nil {
			slog.ErrorContext(ctx, "exit of a container without a monitor not recorded", "container", c.id, "err", err)
		}
		return err
	})
	return exit
}

// namespacesOf is what the pod's namespaces are made from; nothing else is
// needed to remove them.
func (e *Engine) namespacesOf(id string, cfg *cri.PodSandboxConfig) ns.Spec {
	options := cfg.GetLinux().GetSecurityContext().GetNamespaceOptions()
	ownNet := options.GetNetwork() != cri.NamespaceMode_NODE
	s := ns.Spec{
		Dir:  e.cfg.NamespacesDir,
		Name: pinPrefix + id,
		Net:  ownNet,
		// A pod on the node's network has the node's name (CRI:
		// PodSandboxConfig.hostname).
		UTS:     ownNet,
		IPC:     options.GetIpc() != cri.NamespaceMode_NODE,
		Sysctls: e.sysctlsOf(cfg),
	}
	if ownNet {
		s.Hostname = cfg.GetHostname()
	}
	if users := options.GetUsernsOptions(); users != nil && users.GetMode() == cri.NamespaceMode_POD {
		s.UIDs, s.GIDs = idMaps(users.GetUids()), idMaps(users.GetGids())
	}
	return s
}

func idMaps(mappings []*cri.IDMapping) []ns.IDMap {
	maps := make([]ns.IDMap, len(mappings))
	for i, m := range mappings {
		maps[i] = ns.IDMap{Container: m.GetContainerId(), Host: m.GetHostId(), Size: m.GetLength()}
	}
	return maps
}
