package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/checkpoint"
	"github.com/crius-run/crius/storage/checkpoint/remote"
	"github.com/crius-run/crius/storage/registry"
	"github.com/crius-run/crius/storage/registry/decrypt"
	"github.com/crius-run/crius/storage/registry/trust"
	"github.com/crius-run/crius/storage/registry/verifier"
)

// isDirectory reports whether an argument names a directory, and not an artifact in a registry: it exists, or begins
// as no name of an artifact does.
func isDirectory(arg string) bool {
	if strings.HasPrefix(arg, "/") || strings.HasPrefix(arg, ".") {
		return true
	}
	info, err := os.Stat(arg)
	return err == nil && info.IsDir()
}

// access returns how the server reaches registries. What the library reads is written below dir.
func access(cfg config.Config, auth *cri.AuthConfig, dir string) (remote.Access, error) {
	a := remote.Access{
		Registries: registry.Config{RegistriesConf: cfg.Image.RegistriesConf, AuthFile: cfg.Image.AuthFile, RunRoot: dir, ShortNameMode: cfg.Image.ShortNameMode},
		HostsDirs:  cfg.Image.HostsDirs, Auth: auth, Dir: filepath.Join(dir, "registries"),
		Policies:  trust.NewPolicies(cfg.Image.SignaturePolicy, cfg.Image.SignaturePolicyDir),
		Verifiers: new(verifier.Verifiers), ProgressTimeout: cfg.Image.ProgressTimeout,
	}
	a.Verifiers.Use(cfg.Image.VerifiersDir, cfg.Image.VerifierTimeout)
	return a, os.Mkdir(a.Dir, 0o700)
}

// fetch pulls a checkpoint into a scratch directory, and returns the path of its directory.
func (r *restorer) fetch(ctx context.Context, ref string, s *scratch) (string, error) {
	a, err := access(r.config, r.auth, s.path)
	if err != nil {
		return "", err
	}
	a.Keys = r.keys
	keys, err := checkpoint.TrustedKeys(r.config.Root, r.config.Runtime.RestoreKeys)
	if err != nil {
		return "", err
	}
	dir := filepath.Join(s.path, podName)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", err
	}
	fmt.Fprintf(r.progress, "pulling %s\n", cli.Printable(ref))
	return dir, remote.Pull(ctx, a, ref, keys, dir)
}

// keys returns the private keys for encrypted checkpoints.
func (r *restorer) keys() (*decrypt.Keys, error) {
	switch configured := r.config.Image.DecryptionKeysPath; {
	case r.decrypt != "":
		return decrypt.ReadKeys(r.decrypt, "--decrypt")
	case configured != "":
		return decrypt.ReadKeys(configured, decrypt.Option)
	}
	return nil, fmt.Errorf("give its private key with --decrypt, or set %s: %w", decrypt.Option, fault.Precondition)
}

// push writes a checkpoint of a pod and pushes it under ref. It returns the name of the artifact by digest.
func (w *writer) push(ctx context.Context, pod, ref string, cfg config.Config, auth *cri.AuthConfig) (name string, err error) {
	s, err := newScratch(ctx, cfg.Root)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, s.remove(ctx)) }()
	a, err := access(cfg, auth, s.path)
	if err != nil {
		return "", err
	}
	if len(w.encrypt) > 0 {
		if a.Recipients, err = decrypt.ReadRecipients(w.encrypt); err != nil {
			return "", fmt.Errorf("--encrypt: %w", err)
		}
	}
	p, err := remote.NewPusher(ctx, a, ref) // before anything is frozen
	if err != nil {
		return "", err
	}
	defer p.Close()
	kept := w.output != ""
	if !kept {
		w.output = filepath.Join(s.path, podName)
	}
	dir, err := w.asked(ctx, cfg.API.Listen, pod, w.pod)
	if err != nil {
		return "", err
	}
	if name, err = w.pushFrom(ctx, p, dir, ref, cfg); err != nil && kept {
		err = fmt.Errorf("%w; the checkpoint is complete in %s", err, dir)
	}
	return name, err
}

func (w *writer) pushFrom(ctx context.Context, p *remote.Pusher, dir, ref string, cfg config.Config) (string, error) {
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return "", err
	}
	keys, err := checkpoint.TrustedKeys(cfg.Root, nil)
	if err != nil {
		return "", err
	}
	source, err := checkpoint.OpenSource(dir, keys)
	if err != nil {
		return "", err
	}
	defer source.Close()
	fmt.Fprintf(w.progress, "pushing %s\n", cli.Printable(ref))
	return p.Push(ctx, source)
}
