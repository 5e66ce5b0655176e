package trust

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/signature"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/regular"
)

// Policy is a signature policy as it was when it was read.
type Policy struct {
	Path       string
	AcceptsAll bool // any image

	digest   [sha256.Size]byte
	rules    *signature.Policy
	keyFiles []string
}

// Check asks the policy about an image, by the name of its reference. A refusal is ErrSignature and
// fault.Denied, or fault.Precondition if a key cannot be read; its text has the rule that refused
// and the signature that the rule requires. An error of ctx, or of reading the image's signatures,
// is returned as it is.
func (p *Policy) Check(ctx context.Context, image types.UnparsedImage) error {
	if p.AcceptsAll {
		return nil
	}
	err := ask(ctx, p.rules, image)
	if err == nil || ctx.Err() != nil || errors.Is(err, errContent) {
		return err
	}
	kind := fault.Denied
	if path := new(fs.PathError); errors.As(err, &path) {
		kind = fault.Precondition
	}
	text := fmt.Sprintf("image refused by the signature policy %s: %s: %v", p.Path, p.refusal(ctx, image), err)
	return &refused{text, []error{ErrSignature, kind}}
}

// refused is the refusal of an image.
type refused struct {
	text  string
	kinds []error
}

func (r *refused) Error() string   { return r.text }
func (r *refused) Unwrap() []error { return r.kinds }

func ask(ctx context.Context, rules *signature.Policy, image types.UnparsedImage) error {
	policy, err := signature.NewPolicyContext(rules)
	if err != nil {
		return err
	}
	defer func() { _ = policy.Destroy() }()
	_, err = policy.IsRunningImageAllowed(ctx, image)
	return err
}

// errContent says that a rule needs the signatures of an image that is known only by its name.
var errContent = errors.New("the policy rule requires a signature")

// nameOnly is an image that is known only by its name.
type nameOnly struct{ ref types.ImageReference }

func (n nameOnly) Reference() types.ImageReference { return n.ref }
func (n nameOnly) Manifest(context.Context) ([]byte, string, error) {
	return nil, "", errContent
}
func (n nameOnly) Signatures(context.Context) ([][]byte, error) { return nil, errContent }

// CheckName asks the policy about an image that is known only by its name. decided is false if the
// answer depends on signatures.
func (p *Policy) CheckName(ctx context.Context, ref types.ImageReference) (decided bool, err error) {
	err = p.Check(ctx, nameOnly{ref})
	if errors.Is(err, errContent) {
		return false, nil
	}
	return true, err
}

// Answer identifies the policy's answer about an image under a name. It depends on the present
// keys.
func (p *Policy) Answer(image string, name reference.Named) Answer {
	sum := sha256.New()
	fmt.Fprintf(sum, "%x\n%s\n%s\n", p.digest, image, name)
	for _, file := range p.keyFiles {
		content, err := regular.Read(file, maxFile)
		fmt.Fprintf(sum, "%q %t %x\n", file, err == nil, sha256.Sum256(content))
	}
	return Answer(sum.Sum(nil))
}

// refusal describes the rule that refuses the image, and what it requires.
func (p *Policy) refusal(ctx context.Context, image types.UnparsedImage) string {
	where, rules := p.rulesFor(image.Reference())
	for i, rule := range rules {
		if err := ask(ctx, &signature.Policy{Default: signature.PolicyRequirements{rule}}, image); err != nil {
			return fmt.Sprintf("rule %s[%d] %s", where, i, describe(rule, image.Reference().DockerReference()))
		}
	}
	return "rules " + where
}

// rulesFor finds the rules for a reference, as in containers-policy.json(5): the most specific
// scope, then the transport's default, then the policy's.
func (p *Policy) rulesFor(ref types.ImageReference) (where string, rules signature.PolicyRequirements) {
	transport := ref.Transport().Name()
	scopes := p.rules.Transports[transport]
	for _, scope := range append(append([]string{ref.PolicyConfigurationIdentity()}, ref.PolicyConfigurationNamespaces()...), "") {
		if rules, ok := scopes[scope]; ok {
			return fmt.Sprintf("transports.%s[%q]", transport, scope), rules
		}
	}
	return "default", p.rules.Default
}

// rule is the part of a signature.PolicyRequirement that messages show.
type rule struct {
	Type           string   `json:"type"`
	KeyPath        string   `json:"keyPath"`
	KeyPaths       []string `json:"keyPaths"`
	SignedIdentity *struct {
		Type             string `json:"type"`
		DockerReference  string `json:"dockerReference"`
		DockerRepository string `json:"dockerRepository"`
		Prefix           string `json:"prefix"`
		SignedPrefix     string `json:"signedPrefix"`
	} `json:"signedIdentity"`
	Fulcio *struct {
		OIDCIssuer   string `json:"oidcIssuer"`
		SubjectEmail string `json:"subjectEmail"`
	} `json:"fulcio"`
	PKI *struct {
		SubjectEmail    string `json:"subjectEmail"`
		SubjectHostname string `json:"subjectHostname"`
	} `json:"pki"`
}

// describe says what a requirement demands of an image called name.
func describe(requirement signature.PolicyRequirement, name reference.Named) string {
	text, err := json.Marshal(requirement)
	var r rule
	if err == nil {
		err = json.Unmarshal(text, &r)
	}
	switch {
	case err != nil:
		return "refuses the image"
	case r.Type == "reject":
		return "rejects " + reference.TrimNamed(name).Name()
	}
	return fmt.Sprintf("(%s) requires a signature by %s for %s", r.Type, r.signer(), r.identity(name))
}

func (r *rule) signer() string {
	switch {
	case r.Fulcio != nil:
		return fmt.Sprintf("%s (issuer %s)", r.Fulcio.SubjectEmail, r.Fulcio.OIDCIssuer)
	case r.PKI != nil:
		return cmp.Or(r.PKI.SubjectEmail, r.PKI.SubjectHostname)
	case r.KeyPath != "":
		return "the key in " + r.KeyPath
	case len(r.KeyPaths) > 0:
		return "a key in " + strings.Join(r.KeyPaths, ", ")
	}
	return "the key in the policy"
}

func (r *rule) identity(name reference.Named) string {
	_, digested := name.(reference.Canonical)
	identity := r.SignedIdentity
	switch {
	case identity == nil:
		return name.String()
	case identity.Type == "matchRepository", digested && identity.Type == "matchRepoDigestOrExact":
		return "repository " + name.Name()
	case identity.Type == "remapIdentity":
		return fmt.Sprintf("%s, with %s in place of %s", name, identity.SignedPrefix, identity.Prefix)
	case identity.DockerReference != "":
		return identity.DockerReference
	case identity.DockerRepository != "":
		return "repository " + identity.DockerRepository
	}
	return name.String()
}
