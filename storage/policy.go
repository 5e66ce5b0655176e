package storage

import (
	"fmt"
	"os"
	"path/filepath"

	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/pkg/sysregistriesv2"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/pull/pullerror"
	"github.com/crius-run/crius/storage/registry/trust"
)

// ErrSignature says that the signature policy does not accept the image. It comes
// together with fault.Denied and tells this refusal from a registry's.
var ErrSignature = trust.ErrSignature

// ErrWorkerDied says that the process that unpacks the image has died. It tells that from
// a registry that is not available.
var ErrWorkerDied = pullerror.ErrWorkerDied

// libraryContext is how containers/image finds its configuration.
func (s *Store) libraryContext() *types.SystemContext {
	sys := &types.SystemContext{
		SystemRegistriesConfPath: s.cfg.RegistriesConf,
		AuthFilePath:             s.cfg.AuthFile,
		DockerRegistryUserAgent:  "crius",
		// No directory can be made there, which leaves the cache in memory:
		// containers/storage itself knows which blob every layer came from.
		BlobInfoCacheDir: filepath.Join(os.DevNull, "none"),
	}
	if s.cfg.RegistriesConf != "" {
		sys.SystemRegistriesConfDirPath = s.cfg.RegistriesConf + ".d"
		sys.UserShortNameAliasConfPath = filepath.Join(s.store.RunRoot(), "crius-short-names.conf")
	}
	if s.cfg.AuthFile == "" {
		// A file that is not there, instead of those of the user who started us.
		sys.AuthFilePath = filepath.Join(s.store.RunRoot(), "crius-no-credentials.json")
	}
	return sys
}

// admitted refuses registries that registries.conf blocks. The library does so
// too, but its error cannot be told from others.
func admitted(sys *types.SystemContext, name reference.Named) error {
	registry, err := sysregistriesv2.FindRegistry(sys, name.Name())
	if err != nil {
		return registriesError(err)
	}
	if registry != nil && registry.Blocked {
		return fmt.Errorf("registry %s: registries.conf blocks it: %w", registry.Prefix, fault.Denied)
	}
	return nil
}
