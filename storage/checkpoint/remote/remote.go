// Package remote keeps checkpoints of pods in registries, as OCI artifacts (docs/decisions/0070-checkpoint-artifacts.md).
//
//	manifest.json, manifest.sig   layers as they are in the directory
//	FILE.zst                      a layer for each large file
//	files.tar.zst                 a layer with all others
//
// The registry is not trusted. What Pull writes is what the manifest in the directory signs for, and nothing else is
// fetched before that manifest has been verified. All other layers may be encrypted.
package remote

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/pull/pullerror"
	"github.com/crius-run/crius/storage/registry"
	"github.com/crius-run/crius/storage/registry/decrypt"
	"github.com/crius-run/crius/storage/registry/hosts"
	"github.com/crius-run/crius/storage/registry/trust"
	"github.com/crius-run/crius/storage/registry/verifier"
)

// ArtifactType is the type of the artifacts.
const ArtifactType = "application/vnd.crius.pod.checkpoint.v1"

// Media types of layers.
const (
	documentLayer = "application/vnd.crius.pod.checkpoint.document.v1"
	fileLayer     = "application/vnd.crius.pod.checkpoint.file.v1+zstd"
	archiveLayer  = "application/vnd.crius.pod.checkpoint.files.v1.tar+zstd"
)

// Titles of layers.
const (
	archiveTitle = "files.tar" + suffix
	suffix       = ".zst" // after the path of a file
)

// Transfers is the name of the directory, below the server's root, of checkpoints on their way from or to a registry.
// They are private there, and on the disk to which a restore copies them.
const Transfers = "transfers"

// window bounds the memory that a zstd stream takes, in bytes: for both sides.
const window = 4 << 20

// Access is how registries are reached: as by pulls of images.
type Access struct {
	Registries registry.Config
	HostsDirs  []string
	Policies   *trust.Policies
	Verifiers  *verifier.Verifiers
	Auth       *cri.AuthConfig // for the registry of the name; nil: the credentials in Registries
	Dir        string          // empty and private; the library's configuration is written there

	ProgressTimeout time.Duration // the longest silence of a registry; 0: any

	Recipients *decrypt.Recipients           // for whom a push encrypts; nil: it does not
	Keys       func() (*decrypt.Keys, error) // called if what is pulled is encrypted
}

// place is a name in a registry.
type place struct {
	Access
	name  reference.Named
	sys   *types.SystemContext
	creds *registry.Credentials
}

// find returns the place with a name, which must include the registry: a short one could mean several.
func (a Access) find(ref string) (*place, error) {
	name, err := registry.ParseReference(ref)
	if err != nil {
		return nil, err
	}
	p := &place{Access: a, sys: a.Registries.Context()}
	names, err := registry.PullNames(p.sys, name)
	if err != nil {
		return nil, err
	}
	p.name = names[0]
	if len(names) > 1 || !strings.HasPrefix(name, reference.Domain(p.name)+"/") {
		return nil, fmt.Errorf("%q does not name a registry, give the full name, such as %s: %w", ref, p.name, fault.Invalid)
	}
	if err := registry.CheckBlocked(p.sys, p.name); err != nil {
		return nil, err
	}
	if err := hosts.Follow(a.HostsDirs, a.Dir, p.sys, p.name); err != nil {
		return nil, err
	}
	p.creds, err = registry.CredentialsFor(a.Auth, p.name)
	p.creds.Apply(p.sys)
	return p, err
}

// failed describes a failure without secrets, and says what to do about it.
func (p *place) failed(what string, err error) error {
	text := pullerror.Hide(pullerror.Redact(fault.Text(err)), registry.Secrets(p.Auth))
	if pullerror.LoginRefused(err) {
		text += fmt.Sprintf("; %s did not accept the credentials, or none were sent: give some with --creds or --auth-file, or set image.auth_file", reference.Domain(p.name))
	}
	return pullerror.Shown(fmt.Sprintf("%s %s: %s", what, p.name, text), err)
}

var errAbandoned = errors.New("the other side has ended")
