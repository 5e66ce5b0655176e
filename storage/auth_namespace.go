package storage

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

// inUse is where a credential file lies during the pull that it is for.
const inUse = "in-use"

const maxAuthFile = 1 << 20 // bytes

// namespaceAuth is the credential file that a kubelet's credential provider has left in
// image.namespaced_auth_dir for one pull: CRI-O's NAMESPACE-SHA256.json, with the digest
// of the repository's full name. It holds what a pod's namespace may use, so nobody
// finds it a second time.
type namespaceAuth struct {
	file    string // empty: there is none
	secrets []string
}

// takeNamespaceAuth takes the file, if there is one. The error is fault.Precondition.
func takeNamespaceAuth(dir, namespace string, name reference.Named) (namespaceAuth, error) {
	if dir == "" || !trust.IsNamespace(namespace) {
		return namespaceAuth{}, nil
	}
	a, err := takeAuthFile(dir, fmt.Sprintf("%s-%x.json", namespace, sha256.Sum256([]byte(name.Name()))))
	if err != nil {
		return namespaceAuth{}, fmt.Errorf("credentials of namespace %s: %s: %w", namespace, err.Error(), fault.Precondition)
	}
	return a, nil
}

func takeAuthFile(dir, base string) (namespaceAuth, error) {
	from := filepath.Join(dir, base)
	if _, err := os.Lstat(from); errors.Is(err, fs.ErrNotExist) {
		return namespaceAuth{}, nil
	}
	if err := os.MkdirAll(filepath.Join(dir, inUse), 0o700); err != nil {
		return namespaceAuth{}, err
	}
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails
	a := namespaceAuth{file: filepath.Join(dir, inUse, hex.EncodeToString(random[:])+"-"+base)}
	err := os.Rename(from, a.file)
	if errors.Is(err, fs.ErrNotExist) { // another pull has been quicker
		return namespaceAuth{}, nil
	}
	if err != nil {
		return namespaceAuth{}, err
	}
	if a.secrets, err = secretsIn(a.file); err != nil {
		return namespaceAuth{}, errors.Join(fmt.Errorf("%s: %w", from, err), a.remove())
	}
	return a, nil
}

// secretsIn are those of a credential file (containers-auth.json(5)). The error does not
// show what is in it.
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
		all = append(all, secrets(&cri.AuthConfig{Auth: entry.Auth, IdentityToken: entry.IdentityToken})...)
	}
	return all, nil
}

// remove ends the use of the file.
func (a namespaceAuth) remove() error {
	if a.file == "" {
		return nil
	}
	return os.Remove(a.file)
}

// removeUsedAuthFiles removes what pulls of a server that was killed have taken.
func removeUsedAuthFiles(dir string) error {
	if dir == "" {
		return nil
	}
	return os.RemoveAll(filepath.Join(dir, inUse))
}
