package storage

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/storage/hosts"
)

const hostsPrefix = "crius-hosts-"

// followHosts has sys follow containerd's hosts.toml for the image's registry, if there is
// one, until end.
func followHosts(dirs []string, runRoot string, sys *types.SystemContext, name reference.Named) (end func(), err error) {
	registry, err := hosts.Read(dirs, reference.Domain(name))
	if err != nil || registry == nil {
		return func() {}, err
	}
	dir, err := os.MkdirTemp(runRoot, hostsPrefix)
	if err != nil {
		return func() {}, err
	}
	end = func() {
		if err := os.RemoveAll(dir); err != nil {
			slog.Warn("cannot remove the registry configuration of a pull; the next start retries", "err", err)
		}
	}
	if err := registry.Configure(sys, dir); err != nil {
		end()
		return func() {}, fmt.Errorf("apply hosts.toml: %w", err)
	}
	return end, nil
}

// removeHosts removes what pulls of a server that was killed have written.
func removeHosts(runRoot string) error {
	left, err := filepath.Glob(filepath.Join(runRoot, hostsPrefix+"*"))
	for _, dir := range left {
		err = errors.Join(err, os.RemoveAll(dir))
	}
	return err
}
