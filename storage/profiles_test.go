package storage

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/registry/source"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
)

var profileKind = source.Kind{Config: source.SeccompProfile, MaxSize: 1 << 10, Single: true}

// profile is an artifact with a profile, as tools push it: its layer has no name.
func profile(t testing.TB, content string) *image.Artifact {
	t.Helper()
	a, err := image.Files{"x": content}.BuildWith(source.SeccompProfile)
	ok(t, err)
	ok(t, a.Change(func(m *imagespec.Manifest) error {
		m.Layers[0].Annotations = nil
		return nil
	}))
	return a
}

var errBad = fmt.Errorf("bad profile: %w", fault.Invalid)

// pullProfile pulls a profile for a namespace. Content with "bad" cannot be used.
func (n *node) pullProfile(ref, namespace string) (cached bool, err error) {
	n.t.Helper()
	return n.Profiles.Pull(testContext(n.t), PullRequest{Image: ref, Namespace: namespace, Kind: &profileKind}, func(content []byte) error {
		if strings.Contains(string(content), "bad") {
			return errBad
		}
		return nil
	})
}

func (n *node) wantPulled(ref string, cached bool) {
	n.t.Helper()
	if got, err := n.pullProfile(ref, "ns"); err != nil || got != cached {
		n.t.Errorf("pulled %s: cached %t, %v; want %t", ref, got, err, cached)
	}
}

func (n *node) content(ref, namespace string) (string, error) {
	n.t.Helper()
	content, err := n.Profiles.Content(testContext(n.t), ProfileUse{Ref: ref, Namespace: namespace, Kind: &profileKind})
	return string(content), err
}

// wantProfiles compares the references of all profiles.
func (n *node) wantProfiles(refs ...[]string) {
	n.t.Helper()
	var got [][]string
	for _, p := range n.Profiles.List() {
		got = append(got, p.Refs)
	}
	if fmt.Sprint(got) != fmt.Sprint(refs) {
		n.t.Errorf("references of profiles: %q, want %q", got, refs)
	}
}

func (n *node) noProfiles() {
	n.t.Helper()
	n.wantProfiles()
	for _, dir := range []string{"artifacts", "blobs", "pending"} {
		if left := n.entries("root/crius-profiles/" + dir); len(left) > 0 {
			n.t.Errorf("left in %s: %q", dir, left)
		}
	}
}

func TestProfileIsPulledOnceListedAndRemoved(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := profile(t, "{}")
	r := serve(t, "one", "1", a)
	r.Push("two", "1", a)
	one, two := r.Addr()+"/one@"+a.Digest().String(), r.Addr()+"/two@"+a.Digest().String()
	tagged := r.Addr() + "/two:1@" + a.Digest().String()
	if _, err := n.content(one, "ns"); !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "PullSecurityProfile") {
		t.Errorf("before it is pulled: %v", err)
	}
	n.wantPulled(one, false)
	n.wantProfiles([]string{one})
	r.Forget()
	for range 2 {
		n.wantPulled(one, true)
		n.wantPulled(two, true)
		n.wantPulled(tagged, true)
		n.wantProfiles([]string{tagged, two, one})
		n.restart()
	}
	if asked := r.Requests(); len(asked) > 0 {
		t.Errorf("the registry was asked: %+v", asked)
	}
	if len(n.list()) > 0 {
		t.Errorf("it is an image: %+v", n.list())
	}
	for _, ref := range []string{one, two, tagged} {
		if content, err := n.content(ref, "ns"); err != nil || content != "{}" {
			t.Errorf("%s: %q, %v", ref, content, err)
		}
	}
	list := n.Profiles.List()
	if len(list) != 1 || list[0].Digest != a.Digest().String() || list[0].Size < uint64(len(a.Manifest)) {
		t.Fatalf("listed %+v", list)
	}
	for range 2 {
		ok(t, n.Profiles.Remove(testContext(t), list[0].Digest))
	}
	n.noProfiles()
	ok(t, n.Profiles.Remove(testContext(t), "sha512:"+strings.Repeat("0", 128)))
	if err := n.Profiles.Remove(testContext(t), list[0].Digest[:12]); !errors.Is(err, fault.Invalid) {
		t.Errorf("removed a part of a digest: %v", err)
	}
	n.wantPulled(two, false)
	n.wantProfiles([]string{two})
}

// The digest of an index leads to the profile as well, and that of its manifest without another pull.
func TestProfileBehindIndex(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := profile(t, "{}")
	all := index(t, a)
	r := serve(t, "p", "1", all)
	ref := r.Addr() + "/p@" + all.Digest().String()
	n.wantPulled(ref, false)
	n.wantPulled(ref, true)
	if list := n.Profiles.List(); len(list) != 1 || list[0].Digest != a.Digest().String() || !slices.Equal(list[0].Refs, []string{ref}) {
		t.Errorf("listed %+v", list)
	}
	n.wantPulled(r.Addr()+"/p@"+a.Digest().String(), true)
}

// What cannot be used is refused for good, and nothing of it stays.
func TestProfilesThatAreRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	bad, large := profile(t, `"bad"`), profile(t, strings.Repeat(" ", 2<<10))
	two, err := image.Files{"a": "{}", "b": "{}"}.BuildWith(source.SeccompProfile)
	ok(t, err)
	other := files(t, image.Files{"profile.json": "{}"})
	container := motd(t, "an image")
	r := serve(t, "p", "1", bad)
	for _, a := range []*image.Artifact{large, two, other, container} {
		r.Push("p", a.Digest().Encoded()[:8], a)
	}
	at := func(a *image.Artifact) string { return r.Addr() + "/p@" + a.Digest().String() }
	for ref, why := range map[string]string{
		at(bad): "bad profile", at(large): "more than 1024 bytes", at(two): "2 layers", at(other): "config", at(container): "image",
		r.Addr() + "/p:1": "no digest", "p@" + bad.Digest().String(): "canonical", "": "invalid", bad.Digest().String(): "invalid", "https://" + at(bad): "invalid",
	} {
		if cached, err := n.pullProfile(ref, "ns"); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), why) || cached {
			t.Errorf("%q: cached %t, %v; want %q", ref, cached, err, why)
		}
		if _, err := n.content(ref, "ns"); err == nil {
			t.Errorf("%q has content", ref)
		}
	}
	n.noProfiles()
	n.noArtifacts()
	missing := r.Addr() + "/none@" + bad.Digest().String()
	if _, err := n.pullProfile(missing, "ns"); !errors.Is(err, fault.NotFound) || errors.Is(err, fault.Invalid) {
		t.Errorf("a repository without it: %v", err)
	}
	r.Inject(registry.Fault{Path: "/manifests/", Do: registry.Status(http.StatusServiceUnavailable)})
	if _, err := n.pullProfile(at(bad), "ns"); !errors.Is(err, fault.Unavailable) || errors.Is(err, fault.Invalid) {
		t.Errorf("a registry that is down: %v", err)
	}
}

// A profile that a later version refuses, or that is damaged, is not used because it is there.
func TestStoredProfileIsCheckedAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := profile(t, "{}")
	r := serve(t, "p", "1", a)
	ref := r.Addr() + "/p@" + a.Digest().String()
	n.wantPulled(ref, false)
	cached, err := n.Profiles.Pull(testContext(t), PullRequest{Image: ref, Kind: &profileKind}, func([]byte) error { return errBad })
	if !errors.Is(err, fault.Invalid) || cached {
		t.Errorf("pulled what cannot be used: cached %t, %v", cached, err)
	}
	file := filepath.Join(n.cfg.Root, "crius-profiles/artifacts", a.Digest().Encoded(), "files/profile.json")
	damages := map[string]func(){
		"changed": func() { ok(t, os.WriteFile(file, []byte("[]"), 0o600)) },
		"removed": func() { ok(t, os.Remove(file)) },
	}
	for name, damage := range damages {
		damage()
		if _, err := n.content(ref, "ns"); !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "PullSecurityProfile") {
			t.Errorf("%s: %v", name, err)
		}
		defects, err := n.Verify(testContext(t), nil)
		ok(t, err)
		if len(defects) != 1 || !strings.Contains(defects[0].Object, a.Digest().String()) {
			t.Errorf("%s: found %+v", name, defects)
		}
		n.wantPulled(ref, false)
		if content, err := n.content(ref, "ns"); err != nil || content != "{}" {
			t.Errorf("%s, pulled again: %q, %v", name, content, err)
		}
	}
	damages["changed"]()
	defects, err := n.Verify(testContext(t), nil)
	ok(t, err)
	for _, d := range defects {
		ok(t, d.Mend(testContext(t)))
	}
	n.noProfiles()
}

// A policy that requires a signature is satisfied by the one that came with the profile, asks the
// registry if there is none, and refuses what is present but not signed.
func TestPolicyDecidesAboutStoredProfiles(t *testing.T) {
	t.Parallel()
	s := newSigstoreSigner(t)
	n := policies(t, `{"default": [`+s.rule("matchRepository")+`]}`)
	repo, signed, unsigned := testRepo(), profile(t, "{}"), profile(t, "[]")
	r := serve(t, repo, "1", signed)
	r.Push(repo, "2", unsigned)
	name := r.Addr() + "/" + repo
	good, bad := name+"@"+signed.Digest().String(), name+"@"+unsigned.Digest().String()
	for _, ref := range []string{good, bad} {
		n.wantPulled(ref, false)
		if _, err := n.content(ref, "strict"); !errors.Is(err, ErrSignature) || !errors.Is(err, fault.Denied) {
			t.Errorf("%s without a signature: %v", ref, err)
		}
	}
	lookaside(t, repo, signed.Digest(), 1, s.sign(name+":1", signed.Digest()))
	if cached, err := n.pullProfile(good, "strict"); err != nil || cached {
		t.Errorf("signed meanwhile: cached %t, %v", cached, err)
	}
	r.Forget()
	if cached, err := n.pullProfile(good, "strict"); err != nil || !cached || len(r.Requests()) > 0 {
		t.Errorf("with the signature: cached %t, %v, %+v", cached, err, r.Requests())
	}
	if content, err := n.content(good, "strict"); err != nil || content != "{}" {
		t.Errorf("%q, %v", content, err)
	}
	if cached, err := n.pullProfile(bad, "strict"); !errors.Is(err, ErrSignature) || cached || len(r.Requests()) == 0 {
		t.Errorf("unsigned: cached %t, %v", cached, err)
	}
	n.write("policies/strict.json", `{"default": [{"type": "reject"}]}`)
	r.Forget()
	for _, ref := range []string{good, bad} {
		if cached, err := n.pullProfile(ref, "strict"); !errors.Is(err, ErrSignature) || cached {
			t.Errorf("rejected: cached %t, %v", cached, err)
		}
		if _, err := n.content(ref, "strict"); !errors.Is(err, ErrSignature) {
			t.Errorf("rejected: %v", err)
		}
		n.wantPulled(ref, true)
	}
	if asked := r.Requests(); len(asked) > 0 {
		t.Errorf("the registry was asked about what the policy rejects anyway: %+v", asked)
	}
}

// Image verifiers are asked about profiles, whether these are present or not.
func TestVerifiersDecideAboutProfiles(t *testing.T) {
	t.Parallel()
	n, script, asked := verified(t, "exit 0")
	a := profile(t, "{}")
	r := serve(t, "p", "1", a)
	ref := r.Addr() + "/p@" + a.Digest().String()
	n.wantPulled(ref, false)
	write(t, script, asked, "exit 1")
	if cached, err := n.pullProfile(ref, "ns"); !errors.Is(err, ErrSignature) || cached {
		t.Errorf("refused: cached %t, %v", cached, err)
	}
	if _, err := n.content(ref, "ns"); !errors.Is(err, ErrSignature) {
		t.Errorf("refused: %v", err)
	}
	ok(t, n.Profiles.Remove(testContext(t), a.Digest().String()))
	if _, err := n.pullProfile(ref, "ns"); !errors.Is(err, ErrSignature) {
		t.Errorf("refused when it is not present: %v", err)
	}
	n.noProfiles()
}

// A pull uses the credentials of its request or of the pod's namespace. What is present needs none.
func TestCredentialsOfProfiles(t *testing.T) {
	t.Parallel()
	n := newNode(t, func(c *Options) { c.NamespacedAuthDir = filepath.Join(filepath.Dir(c.Root), "auth") })
	ok(t, os.Mkdir(n.cfg.NamespacedAuthDir, 0o700))
	a := profile(t, "{}")
	r := serve(t, "p", "1", a)
	r.Require(registry.Auth{Username: "u", Password: "p"})
	ref := r.Addr() + "/p@" + a.Digest().String()
	if _, err := n.pullProfile(ref, "ns"); !errors.Is(err, fault.Unauthenticated) {
		t.Errorf("without credentials: %v", err)
	}
	req := PullRequest{Image: ref, Kind: &profileKind, Auth: &cri.AuthConfig{Username: "u", Password: "p"}}
	if cached, err := n.Profiles.Pull(testContext(t), req, func([]byte) error { return nil }); err != nil || cached {
		t.Errorf("with credentials: cached %t, %v", cached, err)
	}
	n.wantPulled(ref, true)
	ok(t, n.Profiles.Remove(testContext(t), a.Digest().String()))
	repository := sha256.Sum256([]byte(r.Addr() + "/p"))
	n.write("auth/ns-"+hex.EncodeToString(repository[:])+".json", `{"auths": {"`+r.Addr()+`": {"auth": "`+encode("u:p")+`"}}}`)
	n.wantPulled(ref, false)
}

// A pull that ends in the middle leaves no profile, and the next one succeeds.
func TestProfilePullIsCancelled(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := profile(t, "{}")
	r := serve(t, "p", "1", a)
	ref := r.Addr() + "/p@" + a.Digest().String()
	ctx, cancel := context.WithCancelCause(testContext(t))
	gone := errors.New("the pod is gone")
	r.Inject(registry.Fault{Path: "/blobs/", Do: registry.Replace(func(content []byte) []byte {
		cancel(gone)
		return content[:1]
	})})
	_, err := n.Profiles.Pull(ctx, PullRequest{Image: ref, Kind: &profileKind}, func([]byte) error { return nil })
	if err == nil {
		t.Error("pulled all the same")
	}
	n.noProfiles()
	r.Heal()
	n.restart()
	n.wantPulled(ref, false)
}
