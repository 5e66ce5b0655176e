package trust

import (
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"

	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/docker/policyconfiguration"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/types"
	"go.podman.io/storage/pkg/configfile"
	"go.podman.io/storage/pkg/unshare"
	"go.yaml.in/yaml/v3"

	"github.com/crius-run/crius/internal/fault"
)

// Locations say where the signatures of images are (containers-registries.d(5)).
type Locations struct {
	Default *Location           `yaml:"default-docker,omitempty"`
	Docker  map[string]Location `yaml:"docker,omitempty"` // by image, repository, namespace or registry
}

// Location is where the signatures of some images are.
type Location struct {
	Lookaside   string `yaml:"lookaside,omitempty"`
	Sigstore    string `yaml:"sigstore,omitempty"` // former name of lookaside
	Attachments *bool  `yaml:"use-sigstore-attachments,omitempty"`
}

// ReadLocations reads the files that the library reads for an image. The error is
// fault.Precondition.
func ReadLocations(sys *types.SystemContext, ref types.ImageReference) (*Locations, error) {
	// The library checks the files, and that no two of them have the same scope.
	if _, err := docker.SignatureStorageBaseURL(sys, ref, false); err != nil {
		return nil, fmt.Errorf("registries.d: %w: %w", err, fault.Precondition)
	}
	files := configfile.File{
		Name: "registries", Extension: "yaml", DoNotLoadMainFiles: true, DoNotUseExtensionForConfigName: true,
		UserId: unshare.GetRootlessUID(), CustomConfigFileDropInDirectory: sys.RegistriesDirPath,
	}
	all := &Locations{Docker: map[string]Location{}}
	for file, err := range configfile.Read(&files) {
		if err == nil {
			err = all.add(file.Reader)
		}
		if err != nil {
			return nil, fmt.Errorf("registries.d: %w: %w", err, fault.Precondition)
		}
	}
	return all, nil
}

// add adds the locations in a file.
func (l *Locations) add(file io.Reader) error {
	text, err := io.ReadAll(file)
	if err != nil {
		return err
	}
	var found Locations
	if err := yaml.Unmarshal(text, &found); err != nil {
		return err
	}
	if found.Default != nil {
		l.Default = found.Default
	}
	maps.Copy(l.Docker, found.Docker)
	return nil
}

// Attachments reports whether to look for signatures attached to an image in its registry. The most
// specific scope that says so decides.
func (l *Locations) Attachments(name reference.Named) bool {
	scopes := policyconfiguration.DockerReferenceNamespaces(name)
	if image, err := policyconfiguration.DockerReferenceIdentity(name); err == nil {
		scopes = append([]string{image}, scopes...)
	}
	for _, scope := range scopes {
		if use := l.Docker[scope].Attachments; use != nil {
			return *use
		}
	}
	return l.Default != nil && l.Default.Attachments != nil && *l.Default.Attachments
}

// WriteWithoutAttachments writes the locations to a new directory, with attachments turned off.
func (l *Locations) WriteWithoutAttachments(dir string) error {
	without := Locations{Docker: map[string]Location{}}
	if l.Default != nil {
		without.Default = &Location{Lookaside: l.Default.Lookaside, Sigstore: l.Default.Sigstore}
	}
	for scope, location := range l.Docker {
		location.Attachments = nil
		without.Docker[scope] = location
	}
	text, err := yaml.Marshal(&without)
	if err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "registries.yaml"), text, 0o600)
}
