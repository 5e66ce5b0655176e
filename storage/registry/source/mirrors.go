package source

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/BurntSushi/toml"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/pkg/sysregistriesv2"
	"go.podman.io/image/v5/types"
)

// mirrorError is an error of an image that may have come from a mirror.
type mirrorError struct{ error }

func (e mirrorError) Unwrap() error { return e.error }

// Failed marks the error with which the pull of this image ends, if the image may come from a
// mirror; see FromMirror.
func (s *Image) Failed(err error) error {
	if err == nil || !s.mirrored {
		return err
	}
	return mirrorError{err}
}

// FromMirror reports whether a pull failed after a mirror may have answered for the image, or kept
// it waiting. The library tries the next source only if a mirror has no manifest of the image, or
// answers for a blob with BLOB_UNKNOWN, too many requests or an error of the server: not if it sends
// other bytes, breaks off, says nothing, refuses the blob or answers with a page for people.
func FromMirror(err error) bool {
	var e mirrorError
	return errors.As(err, &e)
}

// Because replaces an error by its cause, and keeps what FromMirror says of it.
func Because(err, cause error) error {
	if cause == nil || !FromMirror(err) {
		return cause
	}
	return mirrorError{cause}
}

// Skip changes sys so that the library does not ask the first mirrors of a name, and none by its IPv6
// address, for which it would refuse the pull. It returns how many sources are left: the registry itself
// is always one. The library then reads a file in dir instead of registries.conf; dir must stay as long
// as sys is used.
func Skip(sys *types.SystemContext, name reference.Named, mirrors int, dir string) (left int, err error) {
	registry, err := sysregistriesv2.FindRegistry(sys, name.Name())
	if err != nil || registry == nil {
		return 1, err
	}
	others := *registry
	others.Mirrors = slices.DeleteFunc(slices.Clone(others.Mirrors), func(m sysregistriesv2.Endpoint) bool {
		byAddress := strings.HasPrefix(m.Location, "[")
		if byAddress {
			slog.Warn("mirror left out: an IPv6 address cannot be a registry, use a name", "registry", registry.Prefix, "mirror", m.Location)
		}
		return byAddress
	})
	sources, err := others.PullSourcesFromReference(name)
	if err != nil || mirrors == 0 && len(others.Mirrors) == len(registry.Mirrors) {
		return len(sources), err
	}
	helpers, err := sysregistriesv2.CredentialHelpers(sys)
	if err != nil {
		return 0, err
	}
	others.Mirrors = nil
	for _, mirror := range sources[min(mirrors, len(sources)-1) : len(sources)-1] {
		others.Mirrors = append(others.Mirrors, mirror.Endpoint)
	}
	text, err := toml.Marshal(sysregistriesv2.V2RegistriesConf{Registries: []sysregistriesv2.Registry{others}, CredentialHelpers: helpers})
	if err != nil {
		return 0, fmt.Errorf("configuration without mirrors: %w", err)
	}
	sys.SystemRegistriesConfPath = filepath.Join(dir, "registries-others.conf")
	sys.SystemRegistriesConfDirPath = sys.SystemRegistriesConfPath + ".d" // is not there
	return len(others.Mirrors) + 1, os.WriteFile(sys.SystemRegistriesConfPath, text, 0o600)
}
