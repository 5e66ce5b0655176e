// Package registry says how registries are reached: by which full names, with which configuration
// of containers/image and with which credentials. Its packages do so: hosts reads containerd's
// hosts.toml, source reaches an image, download fetches its blobs, decrypt decrypts layers and
// trust asks signature policies.
package registry

import (
	"fmt"
	"os"
	"path/filepath"

	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/pkg/sysregistriesv2"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
)

// Config is where the node has its configuration of registries.
type Config struct {
	RegistriesConf string // file; empty: the default of containers/image, with its drop-ins
	AuthFile       string // credentials; empty: none
	RunRoot        string // of the image store
	ShortNameMode  string // one of the modes, which replaces that of RegistriesConf
}

// Modes of short names.
const (
	ModeOfFile    = "registries.conf" // short-name-mode there decides
	ModeEnforcing = "enforcing"       // an ambiguous name is refused
	ModeDisabled  = "disabled"        // the first registry that has the image counts
)

// Context returns the configuration in the terms of containers/image.
func (c Config) Context() *types.SystemContext {
	sys := &types.SystemContext{
		SystemRegistriesConfPath: c.RegistriesConf,
		AuthFilePath:             c.AuthFile,
		DockerRegistryUserAgent:  "crius",
		// No directory can be made there, so the cache stays in memory:
		// containers/storage itself knows the blob of every layer.
		BlobInfoCacheDir: filepath.Join(os.DevNull, "none"),
	}
	if c.RegistriesConf != "" {
		sys.SystemRegistriesConfDirPath = c.RegistriesConf + ".d"
		sys.UserShortNameAliasConfPath = filepath.Join(c.RunRoot, "crius-short-names.conf")
	}
	switch mode := types.ShortNameModeEnforcing; c.ShortNameMode {
	case ModeEnforcing:
		sys.ShortNameMode = &mode
	case ModeDisabled:
		mode = types.ShortNameModeDisabled
		sys.ShortNameMode = &mode
	}
	if c.AuthFile == "" {
		// A file that does not exist, instead of those of the user who started crius.
		sys.AuthFilePath = filepath.Join(c.RunRoot, "crius-no-credentials.json")
	}
	return sys
}

// Insecure reports whether registries.conf lets a host be asked by plain HTTP.
func Insecure(sys *types.SystemContext, host string) bool {
	registry, err := sysregistriesv2.FindRegistry(sys, host)
	return err == nil && registry != nil && registry.Insecure
}

// CheckBlocked refuses a name whose registry is blocked by registries.conf, with
// fault.Denied. The library refuses it too, but its error cannot be told from others.
func CheckBlocked(sys *types.SystemContext, name reference.Named) error {
	registry, err := sysregistriesv2.FindRegistry(sys, name.Name())
	if err != nil {
		return registriesError(err)
	}
	if registry != nil && registry.Blocked {
		return fmt.Errorf("registry %s: registries.conf blocks it: %w", registry.Prefix, fault.Denied)
	}
	return nil
}
