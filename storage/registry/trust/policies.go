// Package trust asks signature policies (containers-policy.json(5)) about images, and knows where
// signatures are (containers-registries.d(5)) and how they are stored.
//
// A policy is read every time it is needed, so a new policy and new keys take effect at once. What
// depends on neither is cached: the parsed document, and the images that were accepted.
package trust

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"sync"
	"time"

	"go.podman.io/image/v5/signature"
	"go.podman.io/storage/pkg/configfile"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/regular"
)

// ErrSignature says that a signature policy does not accept an image, or cannot be evaluated.
var ErrSignature = errors.New("signature policy")

const (
	maxFile     = 1 << 20   // bytes of a policy, or of one of its key files
	maxAccepted = 4096      // cached answers
	keepAnswer  = time.Hour // certificates and keys expire
)

// Policies are the signature policies of a node. Their methods are safe for
// concurrent use.
type Policies struct {
	file, dir string

	mu       sync.Mutex
	parsed   map[string]*Policy   // by path
	accepted map[Answer]time.Time // when it was accepted
}

// NewPolicies returns the policies of a node: file for all namespaces except those that have a
// NAMESPACE.json in dir. An empty file means the one that containers-policy.json(5) names; without
// a dir there is one policy.
func NewPolicies(file, dir string) *Policies {
	return &Policies{file: file, dir: dir, parsed: map[string]*Policy{}, accepted: map[Answer]time.Time{}}
}

// Use replaces the files of NewPolicies.
func (p *Policies) Use(file, dir string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.file, p.dir = file, dir
}

func (p *Policies) files() (file, dir string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.file, p.dir
}

// namespaceName matches names of namespaces in Kubernetes, which are safe as file names.
var namespaceName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// IsNamespace reports whether name is the name of a namespace, and so safe as a file name.
func IsNamespace(name string) bool { return namespaceName.MatchString(name) }

// For returns the policy for the pods of a namespace. The error is ErrSignature and
// fault.Precondition, since the node's configuration must be fixed.
func (p *Policies) For(namespace string) (*Policy, error) {
	path, content, err := p.read(namespace)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: without a policy no image is accepted; install one, "+
			"such as /usr/share/doc/crius/examples/policy.json, which accepts every image: %w: %w", err, ErrSignature, fault.Precondition)
	}
	if err != nil {
		return nil, fmt.Errorf("read signature policy: %w: %w: %w", err, ErrSignature, fault.Precondition)
	}
	policy, err := p.parse(path, content)
	if err != nil {
		return nil, fmt.Errorf("signature policy %s: %w: %w: %w", path, err, ErrSignature, fault.Precondition)
	}
	return policy, nil
}

func (p *Policies) read(namespace string) (path string, content []byte, err error) {
	file, dir := p.files()
	if dir != "" && IsNamespace(namespace) {
		path = filepath.Join(dir, namespace+".json")
		if content, err = regular.Read(path, maxFile); !errors.Is(err, fs.ErrNotExist) {
			return path, content, err
		}
	}
	if path = file; path == "" {
		if path, err = defaultFile(); err != nil {
			return "", nil, err
		}
	}
	content, err = regular.Read(path, maxFile)
	return path, content, err
}

// defaultFile returns the path at which the library finds the node's policy.
func defaultFile() (string, error) {
	where := configfile.File{Name: "policy", Extension: "json", DoNotLoadDropInFiles: true, EnvironmentName: "CONTAINERS_POLICY_JSON", ErrorIfNotFound: true}
	for item, err := range configfile.Read(&where) {
		if errors.Is(err, configfile.ErrConfigFileNotFound) {
			return "", fmt.Errorf("no signature policy in /etc/containers/policy.json: %w", fs.ErrNotExist)
		}
		if err != nil {
			return "", err
		}
		return item.Name, nil
	}
	return "", fmt.Errorf("no signature policy in /etc/containers/policy.json: %w", fs.ErrNotExist)
}

// parse parses a document, unless it is the one that the path had before.
func (p *Policies) parse(path string, content []byte) (*Policy, error) {
	digest := sha256.Sum256(content)
	p.mu.Lock()
	known := p.parsed[path]
	p.mu.Unlock()
	if known != nil && known.digest == digest {
		return known, nil
	}
	rules, err := signature.NewPolicyFromBytes(content)
	if err != nil {
		return nil, err
	}
	policy := &Policy{Path: path, digest: digest, rules: rules}
	if policy.keyFiles, err = keyFiles(content); err != nil {
		return nil, err
	}
	policy.AcceptsAll = acceptsAll(rules)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.parsed[path] = policy
	return policy, nil
}

// acceptsAll reports whether the rules accept every image of every registry.
func acceptsAll(rules *signature.Policy) bool {
	anything, err := json.Marshal(signature.NewPRInsecureAcceptAnything())
	if err != nil || len(rules.Transports["docker"]) > 0 || len(rules.Default) == 0 {
		return false
	}
	return !slices.ContainsFunc(rules.Default, func(r signature.PolicyRequirement) bool {
		text, err := json.Marshal(r)
		return err != nil || !bytes.Equal(text, anything)
	})
}

// keyFiles returns the files that the rules of a policy name: keys and certificate authorities.
func keyFiles(content []byte) ([]string, error) {
	var document any
	if err := json.Unmarshal(content, &document); err != nil {
		return nil, err
	}
	files := filesIn(nil, document)
	slices.Sort(files)
	return slices.Compact(files), nil
}

var (
	pathMember  = regexp.MustCompile(`Path$`)
	pathsMember = regexp.MustCompile(`Paths$`)
)

func filesIn(files []string, value any) []string {
	switch value := value.(type) {
	case []any:
		for _, element := range value {
			files = filesIn(files, element)
		}
	case map[string]any:
		for name, member := range value {
			switch {
			case pathMember.MatchString(name):
				files = append(files, texts([]any{member})...)
			case pathsMember.MatchString(name):
				list, _ := member.([]any)
				files = append(files, texts(list)...)
			default:
				files = filesIn(files, member)
			}
		}
	}
	return files
}

func texts(values []any) []string {
	var found []string
	for _, value := range values {
		if text, ok := value.(string); ok {
			found = append(found, text)
		}
	}
	return found
}

// Answer stands for a policy, with its present keys, that accepts an image under a name.
type Answer [sha256.Size]byte

// Accepted reports whether Accept was called with the answer, not too long ago.
func (p *Policies) Accepted(a Answer) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	given, ok := p.accepted[a]
	return ok && time.Since(given) < keepAnswer
}

// Accept caches an answer for a while.
func (p *Policies) Accept(a Answer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.accepted) >= maxAccepted {
		clear(p.accepted)
	}
	p.accepted[a] = time.Now()
}

// Forget drops all answers.
func (p *Policies) Forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.accepted)
}
