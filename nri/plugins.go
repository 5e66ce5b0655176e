package nri

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/log"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/inherit"
	"github.com/crius-run/crius/internal/panics"
)

// Resources are limits: unset ones keep their value.
type Resources = specs.LinuxResources

// BlockIO is the settings of a class of block I/O.
type BlockIO = specs.LinuxBlockIO

// RDT is the settings of a class of Intel RDT.
type RDT = specs.LinuxIntelRdt

// Node is the runtime that plugins observe and change. Pods and Containers must not
// wait for a verb: while a plugin synchronizes, verbs wait for it.
type Node interface {
	// Pods returns all pods that were run and not removed.
	Pods() []*Pod
	// Containers returns all containers that were created and have not exited.
	Containers() []*Container
	// UpdateContainer calls change with the limits in force, applies the result, and
	// records the limits that change returns. It may wait for a verb.
	UpdateContainer(ctx context.Context, id string, change Change) error
	// InjectDevices adds the CDI devices with these names to a spec.
	InjectDevices(s *Spec, names []string) error
	// BlockIOClass and RDTClass return the settings of a class; nil: none.
	BlockIOClass(class string) (*BlockIO, error)
	RDTClass(class string) (*RDT, error)
}

// Change changes limits in place and returns the ones that plugins set.
type Change func(*Resources) (*Resources, error)

// Plugins are the NRI plugins of a node. All methods except Start work on nil,
// which is a node without plugins.
type Plugins struct {
	// CreationTime is how long the creation of a container delays new plugins at
	// most, by default 20 s. It may be changed before the first creation.
	CreationTime time.Duration

	cfg          Config
	library      *adaptation.Adaptation
	node         Node          // from Start on
	listens      bool          // at cfg.Socket; set by Start
	active       atomic.Int32  // synchronized plugins
	started      atomic.Bool   // those of the plugin directory have been synchronized
	synchronized atomic.Uint64 // synchronizations that succeeded
	states       states
	asking       sync.Mutex // held by a request that required plugins must answer
	updates      sync.WaitGroup
}

// New returns Plugins to which no plugin can connect before Start.
func New(cfg Config, version string) (*Plugins, error) {
	setLogger()
	adaptation.SetPluginRegistrationTimeout(cfg.RegistrationTimeout)
	adaptation.SetPluginRequestTimeout(cfg.RequestTimeout)
	p := &Plugins{cfg: cfg, CreationTime: creationTime}
	options := []adaptation.Option{
		adaptation.WithPluginPath(cfg.PluginDir),
		adaptation.WithPluginConfigPath(cfg.PluginConfigDir),
		adaptation.WithSocketPath(hiddenSocket(cfg.Socket)),
		adaptation.WithMetrics(metrics{p}),
		adaptation.WithDefaultValidator(cfg.Validator.library()),
	}
	if !cfg.Connections {
		options = append(options, adaptation.WithDisabledExternalConnections())
	}
	var err error
	p.library, err = adaptation.New("crius", version, p.synchronize, p.updateContainers, options...)
	return p, err
}

// Start starts the plugins in the plugin directory and listens for others. A plugin
// that fails is skipped and logged. On an error no plugin can connect. Start does not
// replace the socket of another runtime.
func (p *Plugins) Start(ctx context.Context, node Node) (err error) {
	defer func() {
		if err != nil {
			p.states.cannotStart(err)
		}
	}()
	if p.cfg.Connections {
		if conn, err := new(net.Dialer).DialContext(ctx, "unix", p.cfg.Socket); err == nil {
			_ = conn.Close()
			return fmt.Errorf("another runtime listens on %s: stop it or set a different nri.socket", p.cfg.Socket)
		}
	}
	p.node = node
	return p.startLibrary()
}

func (p *Plugins) startLibrary() (err error) {
	defer func() {
		if err != nil {
			p.library.Stop()
		}
	}()
	if !p.cfg.Connections {
		return p.startPlugins()
	}
	if err := hideSocket(p.cfg.Socket); err != nil {
		return err
	}
	if err := p.startPlugins(); err != nil {
		return err
	}
	p.listens = true
	return showSocket(p.cfg.Socket)
}

// startPlugins has the library start the programs in the plugin directory.
func (p *Plugins) startPlugins() error { return inherit.Start(p.library.Start) }

// Close stops listening, kills the plugins that Start started, and waits until ctx ends
// for pending container updates.
func (p *Plugins) Close(ctx context.Context) error {
	if p == nil {
		return nil
	}
	p.library.Stop()
	if p.listens {
		_ = os.Remove(p.cfg.Socket) // the library knows it under another name
	}
	done := make(chan struct{})
	go func() { p.updates.Wait(); close(done) }()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("container updates requested by NRI plugins did not finish: %w", context.Cause(ctx))
	}
}

// synchronize sends all pods and containers to a new plugin. The library calls
// it with the lock that hold takes for reading.
func (p *Plugins) synchronize(ctx context.Context, send adaptation.SyncCB) error {
	err := panics.Do(ctx, "synchronize NRI plugin", func() error { return p.sendAll(ctx, send) })
	if err == nil {
		p.synchronized.Add(1)
	}
	return err
}

func (p *Plugins) sendAll(ctx context.Context, send adaptation.SyncCB) error {
	if !p.started.Swap(true) && p.noneInstalled() {
		_, err := send(ctx, nil, nil)
		return err
	}
	var pods []*api.PodSandbox
	for _, pod := range p.node.Pods() {
		pods = append(pods, pod.message())
	}
	var containers []*api.Container
	for _, container := range p.node.Containers() {
		containers = append(containers, container.message())
	}
	updates, err := send(ctx, pods, containers)
	if err != nil {
		return err
	}
	p.update(ctx, updates)
	return nil
}

// noneInstalled reports whether the first synchronization has no receiver: the
// library requests one when it starts, whether it has started plugins or not.
// Describing a thousand containers takes as long as recovering them.
func (p *Plugins) noneInstalled() bool {
	entries, err := os.ReadDir(p.cfg.PluginDir)
	return len(entries) == 0 && (err == nil || errors.Is(err, fs.ErrNotExist))
}

// updateContainers handles updates that a plugin requests outside of an event.
func (p *Plugins) updateContainers(ctx context.Context, updates []*api.ContainerUpdate) (failed []*api.ContainerUpdate, err error) {
	err = panics.Do(ctx, "update containers for NRI plugin", func() error {
		for _, u := range updates {
			if p.updateContainer(ctx, u) != nil {
				failed = append(failed, u)
			}
		}
		return nil
	})
	return failed, err
}

// update applies the updates of other containers in the answer to an event. It does
// not wait: the verb that sent the event may hold a lock that an update needs.
func (p *Plugins) update(ctx context.Context, updates []*api.ContainerUpdate) {
	if len(updates) == 0 {
		return
	}
	ctx = context.WithoutCancel(ctx)
	p.updates.Go(func() {
		panics.Run(ctx, "update containers for NRI plugins", func() {
			for _, u := range updates {
				_ = p.updateContainer(ctx, u)
			}
		})
	})
}

func (p *Plugins) updateContainer(ctx context.Context, u *api.ContainerUpdate) error {
	err := p.node.UpdateContainer(ctx, u.GetContainerId(), func(inForce *Resources) (*Resources, error) {
		return updated(inForce, u.GetLinux().GetResources())
	})
	if err == nil || u.GetIgnoreFailure() || errors.Is(err, fault.NotFound) || errors.Is(err, fault.Precondition) {
		return err // it exited meanwhile
	}
	slog.WarnContext(ctx, "container update by NRI plugin failed", "container", u.GetContainerId(), "err", err)
	return err
}

// hold delays the synchronization of new plugins until release. connected
// reports whether any plugin must receive an event now. Holds do not nest:
// while a new plugin waits for the first one, a second one waits for the
// plugin.
func (p *Plugins) hold() (release func(), connected bool) {
	if p == nil {
		return func() {}, false
	}
	block := p.library.BlockPluginSync()
	return block.Unblock, p.active.Load() > 0
}

// ask sends the event of a creation. After a panic, when the caller gets no
// release, nothing is held: one pod must not keep all plugins from connecting,
// and then block all verbs.
func (p *Plugins) ask(send func() error) (release func(), err error) {
	release, connected := p.hold()
	if !connected {
		return release, nil
	}
	answered := false
	defer func() {
		if !answered {
			release()
		}
	}()
	err = send()
	answered = true
	return release, err
}

// refused wraps the error with which a plugin refused an operation.
func refused(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("NRI plugin: %w: %w", err, fault.Denied)
}

var setLogger = sync.OnceFunc(func() { log.Set(logger{}) })

// logger receives the library's messages.
type logger struct{}

func (logger) Debugf(ctx context.Context, format string, args ...any) {
	slog.DebugContext(ctx, "message from the NRI library", "text", fmt.Sprintf(format, args...))
}

// Infof logs at debug: the library reports every step at info.
func (logger) Infof(ctx context.Context, format string, args ...any) {
	slog.DebugContext(ctx, "message from the NRI library", "text", fmt.Sprintf(format, args...))
}

func (logger) Warnf(ctx context.Context, format string, args ...any) {
	slog.WarnContext(ctx, "message from the NRI library", "text", fmt.Sprintf(format, args...))
}

// Errorf drops the error that this build has no WASM plugins.
func (logger) Errorf(ctx context.Context, format string, args ...any) {
	for _, arg := range args {
		if err, ok := arg.(error); ok && errors.Is(err, adaptation.ErrWasmDisabled) {
			return
		}
	}
	slog.ErrorContext(ctx, "message from the NRI library", "text", fmt.Sprintf(format, args...))
}
