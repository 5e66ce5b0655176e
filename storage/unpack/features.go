package unpack

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"

	cstorage "go.podman.io/storage"
	"go.podman.io/storage/pkg/reexec"
	"go.podman.io/storage/types"

	"github.com/crius-run/crius/internal/capture"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/inherit"
	"github.com/crius-run/crius/storage/pull/pullerror"
)

// featuresName is the name under which crius runs findFeatures, by the reexec of containers/storage.
const featuresName = "crius-overlay-features"

// Features has containers/storage find out, by test mounts, what this kernel's overlay can
// do, and note the answer in the run root, since workers cannot mount. A process of its own
// does that: the library keeps a part of the answer in a variable without a lock.
type Features struct {
	mu    sync.Mutex
	found bool
}

// Find returns when the features are noted for the store of options.
func (f *Features) Find(ctx context.Context, options types.StoreOptions) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.found {
		return nil
	}
	order, err := json.Marshal(options)
	if err != nil {
		return err
	}
	said := &capture.Head{Max: 4 << 10}
	cmd := reexec.CommandContext(ctx, featuresName)
	cmd.Stdin, cmd.Stderr = bytes.NewReader(order), said
	if err := inherit.Explain(cmd.Run()); err != nil {
		if err := inherit.ExplainOutput(err, string(said.Bytes())); errors.Is(err, fault.Exhausted) {
			return fmt.Errorf("detect overlay features: %w", err)
		}
		return fmt.Errorf("detect overlay features: %w: %s", err, strings.TrimSpace(pullerror.Redact(string(said.Bytes()))))
	}
	f.found = true
	return nil
}

// findFeatures is the main function of that process.
func findFeatures() {
	var options types.StoreOptions
	err := json.NewDecoder(os.Stdin).Decode(&options)
	if err == nil {
		var store cstorage.Store
		if store, err = cstorage.GetStore(options); err == nil {
			_, err = store.Status()
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}
