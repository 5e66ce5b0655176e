package network

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/crius-run/crius/internal/fault"
)

// statusLimit is how long the CNI verb STATUS may take.
var statusLimit = 10 * time.Second

// Ready reports whether a pod could be attached now. If not, the error is
// fault.Unavailable and says what is missing where: there is no usable
// configuration, a plugin is not installed, or a plugin says so itself (the CNI
// verb STATUS, for configurations of version 1.1.0 and later).
//
// A network that was ready stays so for Config.ReadyGrace: a restart or update
// of a network add-on removes its configuration or its agent for a moment, and
// the pods of a node that is not ready are removed from all services.
//
// The server calls Ready every few seconds, so it also checks the firewall's
// rules for host ports: whatever deleted them, they come back.
func (n *Network) Ready(ctx context.Context) error {
	n.ports.Check(ctx)
	err := n.ready(ctx)
	if ctx.Err() != nil {
		return err // which may be that the caller stopped waiting
	}
	return n.withGrace(ctx, err)
}

func (n *Network) ready(ctx context.Context) error {
	chosen, err := n.choose()
	if err != nil {
		return err
	}
	if err := n.installed(chosen.list); err != nil {
		return fmt.Errorf("network %q of %s: %w", chosen.list.Name, chosen.file, err)
	}
	ctx, cancel := limit(ctx, min(statusLimit, n.config().Timeout))
	defer cancel()
	if err := n.cni(Pod{}).GetStatusNetworkList(ctx, chosen.list); err != nil {
		return fmt.Errorf("network %q of %s: CNI STATUS: %w: %w", chosen.list.Name, chosen.file, err, fault.Unavailable)
	}
	return nil
}

// health is what Ready has found and returned last.
type health struct {
	ready bool      // what was returned
	err   error     // what was found; also nil before the first time
	since time.Time // when err first occurred
}

// Grace returns why the network is not ready while Ready still takes it for ready, for the rest of
// Config.ReadyGrace; nil: it is ready, or Ready says that it is not.
func (n *Network) Grace() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.health.ready || n.health.err == nil {
		return nil
	}
	return fmt.Errorf("pods cannot be given a network now; within network.ready_grace_period (%s) the node counts as ready: %w", n.config().ReadyGrace, n.health.err)
}

// withGrace records the present state of the network, and returns the error to
// report.
func (n *Network) withGrace(ctx context.Context, err error) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	before, now := n.health, time.Now()
	n.health = health{ready: err == nil, err: err, since: before.since}
	if err == nil {
		if before.err != nil {
			slog.InfoContext(ctx, "network is ready again", "took", now.Sub(before.since))
		}
		return nil
	}
	if before.err == nil {
		n.health.since = now
	}
	if before.err == nil && !before.ready { // a new node, or one that was restarted
		slog.WarnContext(ctx, "network is not ready", "err", err)
	}
	if !before.ready {
		return err
	}
	if now.Sub(n.health.since) < n.config().ReadyGrace {
		if before.err == nil {
			slog.WarnContext(ctx, "network is not ready, NetworkReady stays true for the grace period", "grace", n.config().ReadyGrace, "err", err)
		}
		n.health.ready = true
		return nil
	}
	slog.ErrorContext(ctx, "network is not ready", "err", err)
	return err
}
