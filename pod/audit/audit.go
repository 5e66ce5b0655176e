package audit

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/background"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/internal/retry"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/files"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/pod/status"
	"github.com/crius-run/crius/storage"
)

// Images is what an audit needs of storage.
type Images interface {
	Verify(ctx context.Context, live []storage.Rootfs) ([]storage.Defect, error)
}

// Network is what an audit needs of CNI and of host ports.
type Network interface {
	Restore(ctx context.Context, live map[string]*network.Attachment) error
	Collect(ctx context.Context, dirs []string, live network.Live) error
	Verify(pods []network.Attached) map[string][]network.Damage
	VerifyHostPorts(ctx context.Context) ([]string, error)
	Leases(dirs []string, attachments []*network.Attachment) (leases []network.Lease, opaque []string, err error)
	Reclaim(ctx context.Context, p network.Pod, leases []network.Lease, dirs []string) error
}

// Node is the engine as an audit sees it.
type Node interface {
	Pods() []*Pod
	Containers() []*Container
	// Knows reports whether an object has this id, even one that is being made. As long as
	// anything with the id exists, it is known by this, by its record or by a pending cleanup.
	// No id is used twice.
	Knows(id string) bool
	// NameOf returns the name of the object whose id is the last word of a text, "" if it is
	// unknown: namespace/pod or namespace/pod/container.
	NameOf(text string) string
	// CgroupParents returns the cgroups below which those of pods and containers are.
	CgroupParents() []string
	// Sweep removes everything of the engine with this id, and calls reclaim to release its
	// network. It is idempotent.
	Sweep(ctx context.Context, id string, reclaim func(context.Context) error) error
	// Repair carries out a remedy for an object, within a time limit.
	Repair(ctx context.Context, object string, do func(context.Context) error) error
}

// Pod is a pod as the engine has it: facts that never change, and the side of it that does.
type Pod struct {
	LivePod

	ID      string
	Plan    *records.PodPlan
	Files   files.Pod
	Runtime oci.Runtime
	Infra   oci.Ref // of its own container
	Network network.Pod
}

// LivePod is the side of a pod that changes. An audit calls the methods that change the pod
// only within WhileIdle.
type LivePod interface {
	Idler
	Now() PodNow
	Put(ctx context.Context) error        // writes the record
	Stop(ctx context.Context) error       // stops the pod
	SettleStop(ctx context.Context) error // releases the network of a stopped pod
	Release(ctx context.Context) error    // removes what a stopped pod does not need
}

// Idler is an object that one verb at a time changes.
type Idler interface {
	// WhileIdle calls look while no verb changes the object, and reports whether it did. It
	// does not wait for a verb to end.
	WhileIdle(look func()) bool
}

// PodNow is a pod at one moment.
type PodNow struct {
	records.PodState
	Infra oci.Task // nil: there is none, or it is unknown
	Ended bool     // as the kubelet has been told
	Gone  bool     // removed
}

// Container is a container as the engine has it: facts that never change, and the side of it
// that does.
type Container struct {
	LiveContainer

	ID        string
	Plan      *records.ContainerPlan
	Sandboxed bool // it lives in its pod's runtime sandbox
	Runtime   oci.Runtime
	Ref       oci.Ref
	Roots     []storage.Rootfs
	Exited    <-chan struct{} // closed when the exit is known
}

// LiveContainer is the side of a container that changes. An audit calls Put only within
// WhileIdle.
type LiveContainer interface {
	Idler
	Now() ContainerNow
	Put(ctx context.Context) error // writes the record
}

// ContainerNow is a container at one moment.
type ContainerNow struct {
	records.ContainerState
	Task        oci.Task // nil: it is being created or torn down
	Unreachable bool     // the monitor has not answered since the server was started
	Exit        *conmon.Exit
	Gone        bool // removed
}

// Sources are what an audit works with.
type Sources struct {
	// Where the server keeps things, and how it names them.
	StateDir      string // records, below pods and containers
	RunDir        string // run directories, below pods and containers
	NamespacesDir string // pinned namespaces
	PinPrefix     string // of the names of pinned namespaces
	CgroupPrefix  string // of the names of cgroups; empty: the default
	Mark          string // of the server's ids

	Boot     string // id of this boot
	Node     Node
	Records  *records.Store
	Images   Images
	Network  Network
	Runtimes status.Runtimes
	Cleanups *retry.Queue
	Checks   *background.Group // runs the checks
}

// Auditor compares a node with its records.
type Auditor struct {
	Sources

	verifying chan struct{} // semaphore: one Verify at a time
}

// New returns an Auditor of a node.
func New(from Sources) *Auditor { return &Auditor{Sources: from, verifying: make(chan struct{}, 1)} }

// answerTime is how long a monitor may take to answer.
const answerTime = 5 * time.Second

// width bounds how many objects are checked concurrently.
const width = 16

// verification is one comparison. It first checks everything without locks. A difference counts
// only if it is still there while the object is idle, since no verb works on the object then.
// Objects are repaired by the engine's own operations, such as stop and teardown.
type verification struct {
	*Auditor
	report *Report
	loose  []storage.Defect // defects of the image store itself
}

// Verify compares the node with its records and returns the differences; with repair it also
// repairs what it can. It may be called at any time, concurrently with verbs. The error says
// what could not be checked; the findings are valid all the same. Only one check runs at a
// time, and it ends with ctx at the latest: a part that hangs is abandoned, and repairs nothing
// any more.
func (a *Auditor) Verify(ctx context.Context, repair bool) ([]Finding, error) {
	select {
	case a.verifying <- struct{}{}:
		defer func() { <-a.verifying }()
	case <-ctx.Done():
		return nil, fmt.Errorf("another check is running: %w", context.Cause(ctx))
	}
	v := &verification{Auditor: a, report: NewReport(nil)}
	if repair {
		v.report = NewReport(a.Node.Repair)
	}
	done := make(chan error, 1)
	a.Checks.Go("check", func() {
		done <- panics.Do(ctx, "check", func() error { return v.look(ctx) })
	})
	var err error
	select {
	case err = <-done:
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	findings := v.report.Findings()
	for i := range findings {
		findings[i].Name = a.Node.NameOf(findings[i].Object)
	}
	return findings, err
}

// look compares everything.
func (v *verification) look(ctx context.Context) error {
	var errs []error
	for _, step := range []func(context.Context) error{
		v.pods, v.containers, v.unknown, v.hostPorts, v.store, v.pending,
	} {
		if ctx.Err() != nil {
			errs = append(errs, context.Cause(ctx))
			break
		}
		errs = append(errs, step(ctx))
	}
	return errors.Join(errs...)
}

// unknown reports objects without a record.
func (v *verification) unknown(ctx context.Context) error { return v.Orphans(ctx, v.report) }

// suspects returns the objects that look wrong.
func suspects[T any](objects []T, looksWrong func(T) bool) []T {
	var mu sync.Mutex
	var found []T
	sideBySide(objects, func(o T) {
		if looksWrong(o) {
			mu.Lock()
			defer mu.Unlock()
			found = append(found, o)
		}
	})
	return found
}

// sideBySide calls f for all objects concurrently, since a monitor that hangs takes its time. A
// panic of f is passed on to the caller.
func sideBySide[T any](objects []T, f func(T)) {
	var group panics.Group
	turns := make(chan struct{}, width)
	for _, o := range objects {
		turns <- struct{}{}
		group.Go(func() {
			defer func() { <-turns }()
			f(o)
		})
	}
	group.Wait()
}

// hostPorts compares the rules of the firewall with the records.
func (v *verification) hostPorts(ctx context.Context) error {
	wrong, err := v.Network.VerifyHostPorts(ctx)
	if err != nil {
		return fmt.Errorf("compare the rules of host ports: %w", err)
	}
	again := Remedy{"rebuild the rules from the records", func(ctx context.Context) error { return v.Network.Restore(ctx, nil) }}
	var problems []Problem
	for _, text := range wrong {
		problems = append(problems, Problem{Wrong: text, Remedy: again})
	}
	v.report.Add(ctx, "host ports", problems)
	return nil
}

// store reports the defects of the image store itself, which containers has found.
func (v *verification) store(ctx context.Context) error {
	for _, d := range v.loose {
		v.report.Add(ctx, d.Object, []Problem{{Wrong: d.Text, Remedy: Remedy{d.Remedy, d.Mend}, Minor: d.Minor, Advice: d.Advice}})
	}
	return nil
}

// pending reports cleanups that are being retried.
func (v *verification) pending(ctx context.Context) error {
	for _, p := range v.Cleanups.Pending() {
		again := Remedy{"retry it now", func(ctx context.Context) error { return v.Cleanups.Try(ctx, p.Key) }}
		wrong := "could not be finished, retrying"
		if p.Err != nil {
			wrong += ": " + fault.Text(p.Err)
		}
		v.report.Add(ctx, "cleanup of "+p.Key, []Problem{{Wrong: wrong, Remedy: again}})
	}
	return nil
}

// unfinished is the problem of an object that a server left in the middle of a verb.
func unfinished(what string) Problem {
	return Problem{Wrong: what + " was interrupted", Remedy: Remedy{Text: "remove what is left of it"}}
}
