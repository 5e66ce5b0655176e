// Package tuning handles containers with exclusive CPUs: it keeps interrupts
// and the scheduler's balancing off these CPUs, sets their sleep latency and
// frequency governor, and undoes all that. It does what CRI-O's
// high-performance hooks do.
//
// What it changes outside of a container's own cgroup outlives the container,
// and the server. So it first records on disk what is done for which container,
// and the original state of the node:
//
//	<state>/tuning/node/tuning.json
//
// A CPU may be tuned for the next container before the last one is known to
// have ended. So tuning never restores the state that a container found: it
// restores what no container on record needs any more to the state before the
// first one.
//
// Errors wrap fault.Invalid for an invalid request of a pod,
// fault.Unimplemented for what this kernel cannot do, and fault.Unavailable
// while the record cannot be read.
package tuning

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/record"
)

// Config is what an operator sets.
type Config struct {
	SharedCPUs      string   `toml:"shared_cpuset" apply:"restart: what was changed on the node for running containers is undone by it" help:"CPUs, such as 0-1,52-53, that containers with CPUs of their own get as well if their pod asks for that (cpu-shared.crio.io); empty: none"`
	IrqbalanceFiles []string `toml:"irqbalance_config_files" apply:"restart: what was changed on the node for running containers is undone by it" form:"path" help:"configuration files of irqbalance; in the first one that exists crius lists the CPUs that get no interrupts, and it restarts irqbalance then; empty: irqbalance is left alone"`
}

// DefaultConfig returns what an empty configuration file means.
func DefaultConfig() Config {
	return Config{IrqbalanceFiles: []string{"/etc/sysconfig/irqbalance", "/etc/default/irqbalance"}}
}

// Options configure a Tuner.
type Options struct {
	Config
	Node
	StateDir string
	Boot     string // identifies the boot of the node
	// Later does work in the background, and repeats it until it succeeds. Work
	// replaces earlier work of the same name that has not begun.
	Later func(name string, work func(context.Context) error)
}

// Tuner changes the settings of a node's CPUs.
type Tuner struct {
	Options
	shared  Set
	records *record.Dir[changes]

	// mu is held during changes, which read what they write. No program runs
	// meanwhile, because ends of containers wait for mu.
	mu     sync.Mutex
	now    *changes
	unread error // why the record is unknown
	// The plans to which containers could not be moved yet, since the record could not be written.
	pending map[string]*Plan
	// The number of requests for a new look of irqbalance, and how many of these
	// are done.
	asked, rebalanced uint64

	rebalancing sync.Mutex
	banned      *Set // what irqbalance was told last; nil: nothing yet
}

// changes is the content of the record. All of it is from one boot.
type changes struct {
	Boot       string           `json:"Boot"`
	Containers map[string]claim `json:"Containers"`
	// How the node was before: CPUs taken out of the mask of interrupts, lines of irqbalance's
	// configuration, contents of files of CPUs by path, and CPUs added to
	// cpuset.cpus.exclusive by cgroup.
	Interrupts Set               `json:"Interrupts,omitempty"`
	Irqbalance *bannedLines      `json:"Irqbalance,omitempty"`
	Rebalance  bool              `json:"Rebalance,omitempty"` // irqbalance has not seen its configuration yet
	Files      map[string]string `json:"Files,omitempty"`
	Exclusive  map[string]Set    `json:"Exclusive,omitempty"`
}

// claim is what is done for one container.
type claim struct {
	Plan
	Cgroup string `json:"Cgroup"`
	// Moving: the settings may still be those of an earlier plan, for other CPUs.
	Moving bool `json:"Moving,omitempty"`
}

const (
	version = 1      // of the record
	only    = "node" // its id
)

// New returns a Tuner, which knows nothing of an earlier one before Recover.
func New(o Options) (*Tuner, error) {
	shared, err := ParseSet(o.SharedCPUs)
	if err != nil {
		return nil, fmt.Errorf("tuning.shared_cpuset: %w", err)
	}
	o.Node.fill()
	return &Tuner{
		Options: o, shared: shared, now: &changes{}, pending: map[string]*Plan{},
		records: record.At[changes](filepath.Join(o.StateDir, "tuning"), "tuning.json", version),
	}, nil
}

// Recover reads the record of an earlier Tuner, and returns the containers in
// it. After a reboot there are none: the only remaining change is irqbalance's
// configuration, which Recover restores. After an error no other call works
// until Recover has succeeded, so that the record is not overwritten.
func (t *Tuner) Recover(ctx context.Context) (containers []string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	docs, _, damaged, err := t.records.All()
	if t.unread = err; err != nil {
		return nil, fmt.Errorf("read record of CPU settings: %w", err)
	}
	for _, d := range damaged {
		slog.ErrorContext(ctx, "unreadable record of CPU settings moved aside: settings of containers that have ended stay until a reboot, CPUs banned from interrupts in irqbalance's configuration beyond that; correct the latter and restart irqbalance",
			"file", d.File, "err", d.Err, "irqbalance_config", t.configuration())
	}
	if docs[only] == nil {
		return nil, nil
	}
	t.now = docs[only]
	if t.now.Boot != t.Boot {
		t.now = &changes{Boot: t.Boot, Irqbalance: t.now.Irqbalance}
		if err := t.settle(ctx, t.now.clone()); err != nil {
			slog.ErrorContext(ctx, "irqbalance's configuration not restored after a reboot, retrying", "irqbalance_config", t.configuration(), "err", err)
			t.Later("irqbalance's configuration", t.settleAgain)
		}
		return nil, nil
	}
	if t.now.Rebalance {
		t.askRebalance()
	}
	for id := range t.now.Containers {
		t.finishMove(ctx, id)
	}
	return slices.Sorted(maps.Keys(t.now.Containers)), nil
}

// Apply carries out the plan of a container that is about to start. If it
// fails, Release undoes what it has done.
func (t *Tuner) Apply(ctx context.Context, id, cgroup string, p *Plan) error {
	c := claim{Plan: *p, Cgroup: cgroup}
	if err := t.apply(ctx, id, c); err != nil {
		return err
	}
	t.tellSystemd(ctx, c)
	return nil
}

func (t *Tuner) apply(ctx context.Context, id string, c claim) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.known(); err != nil {
		return err
	}
	next, err := t.with(id, c)
	if err != nil {
		return err
	}
	if err := t.put(ctx, next); err != nil {
		return err
	}
	return t.carryOut(c)
}

// with returns the record with the claim of a container, and with how the node was before what
// that claim changes.
func (t *Tuner) with(id string, c claim) (*changes, error) {
	next := t.now.clone()
	next.Boot = t.Boot
	next.Containers[id] = c
	for _, note := range []func(*changes, claim) error{t.noteInterrupts, t.noteFiles, t.noteExclusive} {
		if err := note(next, c); err != nil {
			return nil, err
		}
	}
	return next, nil
}

func (t *Tuner) carryOut(c claim) error {
	if err := t.silence(c); err != nil {
		return err
	}
	if err := t.writeFiles(c); err != nil {
		return err
	}
	if err := t.liftQuota(c); err != nil {
		return err
	}
	return t.isolate(c)
}

// Release undoes what was done for an ended container. It is idempotent.
func (t *Tuner) Release(ctx context.Context, id string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.known(); err != nil {
		return err
	}
	delete(t.pending, id)
	if _, found := t.now.Containers[id]; !found {
		return nil
	}
	next := t.now.clone()
	delete(next.Containers, id)
	return t.settle(ctx, next)
}

// known requires mu.
func (t *Tuner) known() error {
	if t.unread == nil {
		return nil
	}
	return fmt.Errorf("CPU settings of the last server could not be read, and must not be overwritten: %w: %w", t.unread, fault.Unavailable)
}

func (t *Tuner) settleAgain(ctx context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.settle(ctx, t.now.clone())
}

// settle undoes what the containers in next do not need, and makes next the
// record. A failed settle is repeated as a whole the next time.
func (t *Tuner) settle(ctx context.Context, next *changes) error {
	err := errors.Join(t.settleInterrupts(next), t.settleFiles(next), t.settleExclusive(next))
	if err != nil {
		return fmt.Errorf("restore CPU settings: %w", err)
	}
	return t.put(ctx, next)
}

// put writes the record durably, because irqbalance's configuration survives a
// power cut too.
func (t *Tuner) put(ctx context.Context, next *changes) (err error) {
	if len(next.Containers) == 0 && next.Irqbalance == nil && !next.Rebalance {
		err = t.records.Delete(ctx, only)
	} else if err = t.records.Make(); err == nil {
		err = t.records.Put(ctx, only, next)
	}
	if err == nil {
		err = t.records.SyncOne(only)
	}
	if err != nil {
		return fmt.Errorf("record CPU settings: %w", err)
	}
	t.now = next
	return nil
}

func (c *changes) clone() *changes {
	next := *c
	next.Containers, next.Files, next.Exclusive = copied(c.Containers), copied(c.Files), copied(c.Exclusive)
	return &next
}

func copied[V any](m map[string]V) map[string]V {
	next := map[string]V{}
	maps.Copy(next, m)
	return next
}

// files returns the contents that the container's CPUs need, by path.
func (c claim) files() map[string]string {
	files := map[string]string{}
	for _, cpu := range c.CPUs {
		if c.Latency != "" {
			files[cpuFile(cpu, "power/pm_qos_resume_latency_us")] = c.Latency
		}
		if c.Governor != "" {
			files[cpuFile(cpu, "cpufreq/scaling_governor")] = c.Governor
		}
	}
	return files
}

func cpuFile(cpu int, name string) string {
	return fmt.Sprintf("/sys/devices/system/cpu/cpu%d/%s", cpu, name)
}

func (t *Tuner) noteFiles(next *changes, c claim) error {
	if c.Governor != "" {
		for _, cpu := range c.CPUs {
			available, err := t.read(cpuFile(cpu, "cpufreq/scaling_available_governors"))
			if err != nil {
				return fmt.Errorf("find frequency governors: %w", err)
			}
			if !slices.Contains(strings.Fields(available), c.Governor) {
				return invalid("CPU %d has no frequency governor %s, it has: %s", cpu, c.Governor, available)
			}
		}
	}
	for path := range c.files() {
		if _, noted := next.Files[path]; noted {
			continue
		}
		before, err := t.read(path)
		if err != nil {
			return fmt.Errorf("read CPU setting: %w", err)
		}
		next.Files[path] = before
	}
	return nil
}

func (t *Tuner) writeFiles(c claim) error {
	for path, value := range c.files() {
		if err := t.write(path, value); err != nil {
			return fmt.Errorf("change CPU setting: %w", err)
		}
	}
	return nil
}

func (t *Tuner) settleFiles(next *changes) error {
	needed := map[string]string{}
	for _, c := range next.Containers {
		maps.Copy(needed, c.files())
	}
	var errs []error
	for path, before := range next.Files {
		if _, stays := needed[path]; stays {
			continue
		}
		if err := t.write(path, before); err != nil && !errors.Is(err, os.ErrNotExist) { // of a CPU that was unplugged
			errs = append(errs, err)
		}
		delete(next.Files, path)
	}
	return errors.Join(errs...)
}

// siblings returns the CPUs on the same core.
func (t *Tuner) siblings(cpu int) (Set, error) {
	text, err := t.read(cpuFile(cpu, "topology/thread_siblings_list"))
	if err != nil {
		return nil, fmt.Errorf("find siblings of a CPU: %w", err)
	}
	return ParseSet(text)
}

// unimplemented returns the error for what this kernel cannot do.
func unimplemented(text string) error { return fmt.Errorf("%s: %w", text, fault.Unimplemented) }
