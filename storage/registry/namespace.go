package registry

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"go.podman.io/image/v5/docker/reference"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/regular"
	"github.com/crius-run/crius/storage/registry/trust"
)

// inUse is the directory of a credential file during its pull.
const inUse = "in-use"

const maxAuthFile = 1 << 20 // bytes

// NamespaceAuth is the credential file that a kubelet's credential provider has left in
// image.namespaced_auth_dir for one pull: CRI-O's NAMESPACE-SHA256.json, with the digest
// of the repository's full name. The credentials are for the pod's namespace alone, so one
// pull takes the file, and no other can find it.
type NamespaceAuth struct {
	File    string   // empty: there is none
	Secrets []string // in it
}

// TakeNamespaceAuth takes the file from dir, if there is one; an empty dir has none. The caller
// must call Remove. The error is fault.Precondition.
func TakeNamespaceAuth(dir, namespace string, name reference.Named) (NamespaceAuth, error) {
	if dir == "" || !trust.IsNamespace(namespace) {
		return NamespaceAuth{}, nil
	}
	a, err := takeAuthFile(dir, fmt.Sprintf("%s-%x.json", namespace, sha256.Sum256([]byte(name.Name()))))
	if err != nil {
		return NamespaceAuth{}, fmt.Errorf("credentials of namespace %s: %s: %w", namespace, err.Error(), fault.Precondition)
	}
	return a, nil
}

func takeAuthFile(dir, base string) (NamespaceAuth, error) {
	from := filepath.Join(dir, base)
	if _, err := os.Lstat(from); errors.Is(err, fs.ErrNotExist) {
		return NamespaceAuth{}, nil
	}
	if err := os.MkdirAll(filepath.Join(dir, inUse), 0o700); err != nil {
		return NamespaceAuth{}, err
	}
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails
	a := NamespaceAuth{File: filepath.Join(dir, inUse, hex.EncodeToString(random[:])+"-"+base)}
	err := os.Rename(from, a.File)
	if errors.Is(err, fs.ErrNotExist) { // another pull has been quicker
		return NamespaceAuth{}, nil
	}
	if err != nil {
		return NamespaceAuth{}, err
	}
	if a.Secrets, err = secretsIn(a.File); err != nil {
		return NamespaceAuth{}, errors.Join(fmt.Errorf("%s: %w", from, err), a.Remove())
	}
	return a, nil
}

// secretsIn returns the secrets of a credential file (containers-auth.json(5)). The error
// shows no content.
func secretsIn(file string) ([]string, error) {
	text, err := regular.Read(file, maxAuthFile)
	if err != nil {
		return nil, err
	}
	var content struct {
		Auths map[string]struct {
			Auth          string `json:"auth"`
			IdentityToken string `json:"identitytoken"`
		} `json:"auths"`
		CredHelpers map[string]string `json:"credHelpers"`
	}
	if json.Unmarshal(text, &content) != nil {
		return nil, errors.New("not a credential file: see containers-auth.json(5)")
	}
	if len(content.CredHelpers) > 0 { // which would be run as root
		return nil, errors.New("credHelpers are not allowed in it: put the credentials under auths")
	}
	var all []string
	for _, entry := range content.Auths {
		all = append(all, Secrets(&cri.AuthConfig{Auth: entry.Auth, IdentityToken: entry.IdentityToken})...)
	}
	return all, nil
}

// Remove deletes the file.
func (a NamespaceAuth) Remove() error {
	if a.File == "" {
		return nil
	}
	return os.Remove(a.File)
}

// RemoveUsedAuthFiles deletes the files that pulls of a killed server have taken.
func RemoveUsedAuthFiles(dir string) error {
	if dir == "" {
		return nil
	}
	return os.RemoveAll(filepath.Join(dir, inUse))
}
