package source

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

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

// FromMirror reports whether a pull failed after a mirror may have answered for the image. The
// library tries the next source only if a mirror has no manifest of the image, or answers for a
// blob with BLOB_UNKNOWN, too many requests or an error of the server: not if it sends other bytes,
// breaks off, refuses the blob or answers with a page for people.
func FromMirror(err error) bool {
	var e mirrorError
	return errors.As(err, &e)
}

// Direct changes sys so that the library asks the registry of name alone, and none of its mirrors.
// The library then reads a file in dir instead of registries.conf; dir must stay as long as sys is
// used.
func Direct(sys *types.SystemContext, name reference.Named, dir string) error {
	registry, err := sysregistriesv2.FindRegistry(sys, name.Name())
	if err != nil || registry == nil {
		return err
	}
	helpers, err := sysregistriesv2.CredentialHelpers(sys)
	if err != nil {
		return err
	}
	alone := *registry
	alone.Mirrors = nil
	text, err := toml.Marshal(sysregistriesv2.V2RegistriesConf{Registries: []sysregistriesv2.Registry{alone}, CredentialHelpers: helpers})
	if err != nil {
		return fmt.Errorf("configuration without mirrors: %w", err)
	}
	sys.SystemRegistriesConfPath = filepath.Join(dir, "registries-direct.conf")
	sys.SystemRegistriesConfDirPath = sys.SystemRegistriesConfPath + ".d" // is not there
	return os.WriteFile(sys.SystemRegistriesConfPath, text, 0o600)
}
