package storage

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"

	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/pkg/sysregistriesv2"
	"go.podman.io/image/v5/signature"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
)

// ErrSignature says that the signature policy does not accept the image. It comes
// together with fault.Denied and tells this refusal from a registry's.
var ErrSignature = errors.New("signature policy")

// libraryContext is how containers/image finds its configuration.
func (s *Store) libraryContext() *types.SystemContext {
	sys := &types.SystemContext{
		SignaturePolicyPath:      s.cfg.SignaturePolicy,
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

// namespaceName is what Kubernetes takes for one, and safe as a file name.
var namespaceName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// signaturePolicy reads the policy for the pods of a namespace. The caller
// must Destroy it.
func (s *Store) signaturePolicy(sys *types.SystemContext, namespace string) (*signature.PolicyContext, error) {
	sys = &types.SystemContext{SignaturePolicyPath: sys.SignaturePolicyPath}
	if s.cfg.SignaturePolicyDir != "" && namespaceName.MatchString(namespace) {
		own := filepath.Join(s.cfg.SignaturePolicyDir, namespace+".json")
		if _, err := os.Stat(own); err == nil {
			sys.SignaturePolicyPath = own
		} else if !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("%w: %w", ErrSignature, err)
		}
	}
	policy, err := signature.DefaultPolicy(sys)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %w: %w: without a policy no image is pulled; install one, "+
			"such as crius's contrib/policy.json, which accepts every image", ErrSignature, fault.Precondition, err)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w: %w", ErrSignature, err, fault.Precondition)
	}
	return signature.NewPolicyContext(policy)
}

// acceptAnything is the policy of a copy from an inspected source, about which
// the policy that counts has been asked. The caller must Destroy it.
func acceptAnything() (*signature.PolicyContext, error) {
	return signature.NewPolicyContext(&signature.Policy{
		Default: signature.PolicyRequirements{signature.NewPRInsecureAcceptAnything()},
	})
}
