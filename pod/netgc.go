package pod

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/crius-run/crius/internal/ids"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/pod/status"
)

// CollectNetwork has the network plugins remove, in the background, what they hold
// for pods of ours that are gone (network.Collect). It is for the start of a server,
// after Recover: whatever was lost with an earlier one has no record any more.
func (e *Engine) CollectNetwork() {
	e.background.Go("collect garbage of networks", func() {
		collect := func(ctx context.Context) error {
			return e.deps.Network.Collect(ctx, networkDirs(e.deps.Runtimes), network.Live{Attached: known{e}.attached, Ours: known{e}.isOurs})
		}
		if err := e.deps.Trace.Do(e.background.Closing(), "collect", "networks", collect); err != nil {
			slog.WarnContext(e.background.Closing(), "CNI plugins did not release everything they hold for removed pods, the next server start retries", "err", err)
		}
	})
}

// networkDirs are those of handlers that have networks of their own.
func networkDirs(runtimes status.Runtimes) (dirs []string) {
	for _, name := range runtimes.Names() {
		if runtime, err := runtimes.Get(name); err == nil && runtime.Handler().CNIConfDir != "" {
			dirs = append(dirs, runtime.Handler().CNIConfDir)
		}
	}
	return dirs
}

// attached are the pods on record that have a network, or are about to get one. The
// record comes before the network: of a pod that the plugins know there is one.
func (k known) attached() (map[string]string, error) {
	pods, _, damaged, err := k.engine.records.Pods.Read()
	if err != nil {
		return nil, fmt.Errorf("read pod records: %w", err)
	}
	attached := map[string]string{}
	for _, d := range damaged { // its network is not known
		return nil, fmt.Errorf("read pod records: %w", d.Err)
	}
	for id, rec := range pods {
		if rec.Network != nil {
			attached[id] = rec.Network.Interface
		}
	}
	return attached, nil
}

// isOurs reports whether an id was made by this root and by nobody else.
func (k known) isOurs(id string) bool { return ids.Valid(id) && ids.HasMark(id, k.engine.mark) }
