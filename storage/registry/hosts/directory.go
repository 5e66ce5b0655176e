package hosts

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/types"
)

// Prefix begins the names of the directories that MakeDir makes.
const Prefix = "crius-registries-"

// MakeDir makes a directory for the library's configuration of registries during one pull, or while
// a stored artifact is used. The caller must call end afterwards.
func MakeDir(runRoot string) (dir string, end func(), err error) {
	dir, err = os.MkdirTemp(runRoot, Prefix)
	if err != nil {
		return "", nil, err
	}
	return dir, func() {
		if err := os.RemoveAll(dir); err != nil {
			slog.Warn("cannot remove temporary files of a pull or a signature check; the next start retries", "err", err)
		}
	}, nil
}

// RemoveDirs removes the directories that pulls of a killed server have left.
func RemoveDirs(runRoot string) error {
	var errs []error
	for _, prefix := range []string{Prefix, "crius-hosts-"} { // the second was the prefix in earlier versions
		left, err := filepath.Glob(filepath.Join(runRoot, prefix+"*"))
		errs = append(errs, err)
		for _, dir := range left {
			errs = append(errs, os.RemoveAll(dir))
		}
	}
	return errors.Join(errs...)
}

// Follow makes sys follow containerd's hosts.toml for the image's registry, if there is one, as
// long as dir exists.
func Follow(hostsDirs []string, dir string, sys *types.SystemContext, name reference.Named) error {
	registry, err := Read(hostsDirs, reference.Domain(name))
	if err != nil || registry == nil {
		return err
	}
	if err := registry.Configure(sys, dir); err != nil {
		return fmt.Errorf("apply hosts.toml: %w", err)
	}
	return nil
}
