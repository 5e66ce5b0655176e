package storage

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/opencontainers/go-digest"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/image"
)

// policies opens a node whose namespace lax accepts everything, and whose namespace strict has the
// rules strict.
func policies(t testing.TB, strict string) *node {
	t.Helper()
	n := newNode(t, func(c *Options) { c.SignaturePolicyDir = filepath.Join(filepath.Dir(c.Root), "policies") })
	if err := os.Mkdir(n.cfg.SignaturePolicyDir, 0o700); err != nil {
		t.Fatal(err)
	}
	n.write("policies/strict.json", strict)
	return n
}

// admit asks for the namespace strict.
func (n *node) admit(img *Image, name string) error {
	n.t.Helper()
	return n.Admit(testContext(n.t), Use{ImageID: img.ID, Name: name, Namespace: "strict"})
}

func (n *node) wantAdmitted(img *Image, name string) {
	n.t.Helper()
	if err := n.admit(img, name); err != nil {
		n.t.Errorf("%s: %v", name, err)
	}
}

func (n *node) wantRefused(img *Image, name, why string) {
	n.t.Helper()
	err := n.admit(img, name)
	if !errors.Is(err, ErrSignature) || !errors.Is(err, fault.Denied) {
		n.t.Errorf("%s: %v", name, err)
	} else if !strings.Contains(err.Error(), why) {
		n.t.Errorf("%s: refused with %q, want %q in it", name, err, why)
	}
}

// What a lax namespace has pulled runs in a strict one only if it is signed (cri-o
// pull request 8212): also after a restart of the server.
func TestAdmitLaxPull(t *testing.T) {
	t.Parallel()
	for _, s := range []signer{newSigstoreSigner(t), newGPGSigner(t)} {
		n := policies(t, `{"default": [`+s.rule("matchRepoDigestOrExact")+`]}`)
		repo, signed, unsigned := testRepo(), motd(t, "signed"), motd(t, "unsigned")
		r := serve(t, repo, "1", signed)
		r.Push(repo, "index", index(t, signed))
		r.Push(repo, "unsigned", unsigned)
		name := r.Addr() + "/" + repo
		lookaside(t, repo, signed.Digest(), 1, s.sign(name+":1", signed.Digest()))
		good, bad := n.pull(name+":1"), n.pull(name+":unsigned")
		for range 2 {
			n.wantAdmitted(good, name+":1")
			n.wantAdmitted(good, name+"@"+signed.Digest().String())
			n.wantAdmitted(good, name+":other@"+signed.Digest().String())
			n.wantAdmitted(good, good.ID)
			n.wantAdmitted(good, "sha256:"+good.ID)
			for _, part := range []string{good.ID[:8], "sha256:" + good.ID[:8], "sha256:" + good.ID[:63], "sha256:"} {
				n.wantRefused(good, part, "it was not pulled as")
			}
			wants := "strict.json: rule default[0] (" + s.kind() + ") requires a signature by the key in the policy for "
			n.wantRefused(bad, name+":unsigned", wants+name+":unsigned")
			n.wantRefused(bad, bad.ID, wants+name+":unsigned")
			n.wantRefused(bad, name+"@"+unsigned.Digest().String(), wants+"repository "+name)
			if err := n.Admit(testContext(t), Use{ImageID: bad.ID, Name: name + ":unsigned", Namespace: "lax"}); err != nil {
				t.Error(err)
			}
			n.restart()
		}

		// The same image under a name that was not signed.
		n.pull(name + ":index")
		n.wantRefused(good, name+":index", `Signature for identity "`+name+`:1" is not accepted`)
		n.wantAdmitted(good, name+":1")
	}
}

// A policy knows an image by a name under which it was pulled and by no other: not by
// that of an image it accepts.
func TestAdmitByTheNameOfThePull(t *testing.T) {
	t.Parallel()
	repo, good, bad := testRepo(), motd(t, "good"), motd(t, "bad")
	r := serve(t, repo+"/good", "1", good)
	r.Push(repo+"/bad", "1", bad)
	base := r.Addr() + "/" + repo
	n := policies(t, `{"default": [{"type": "reject"}], "transports": {"docker": {"`+base+`/good": [{"type": "insecureAcceptAnything"}]}}}`)
	one, other := n.pull(base+"/good:1"), n.pull(base+"/bad:1")
	n.wantAdmitted(one, base+"/good:1")
	n.wantAdmitted(one, one.ID)
	n.wantRefused(other, base+"/bad:1", "rule default[0] rejects "+base+"/bad")
	n.wantRefused(other, other.ID, "rule default[0] rejects "+base+"/bad")
	for _, name := range []string{
		base + "/good:1", base + "/good@" + good.Digest().String(), base + "/good@" + bad.Digest().String(), "good:1", "", "../x", one.ID,
	} {
		n.wantRefused(other, name, "it was not pulled as")
	}

	// The kubelet has asked before, and since then the tag has moved.
	moved := motd(t, "moved")
	r.Push(repo+"/good", "1", moved)
	n.pull(base + "/good:1")
	n.wantAdmitted(one, base+"/good:1")

	n.remove(one.ID)
	if err := n.admit(one, base+"/good:1"); !errors.Is(err, fault.NotFound) {
		t.Errorf("after its removal: %v", err)
	}
}

// Pulling an image without signatures removes no signatures that the image has, neither with the
// same manifest nor with another one of the image.
func TestSignaturesOutlivePullFromElsewhere(t *testing.T) {
	t.Parallel()
	s := newSigstoreSigner(t)
	n := policies(t, `{"default": [`+s.rule("matchExact")+`]}`)
	content := layer(t, image.Text("etc/motd", "shared"))
	plain, docker := build(t, image.Image{Layers: []image.Layer{content}}), build(t, image.Image{Layers: []image.Layer{content}, Docker: true})
	if plain.ID() != docker.ID() || plain.Digest() == docker.Digest() {
		t.Fatalf("images %s, %s, manifests %s, %s", plain.ID(), docker.ID(), plain.Digest(), docker.Digest())
	}
	repo, elsewhere := testRepo(), testRepo()
	r := serve(t, repo, "1", plain)
	r.Push(elsewhere, "plain", plain)
	r.Push(elsewhere, "docker", docker)
	name := r.Addr() + "/" + repo + ":1"
	lookaside(t, repo, plain.Digest(), 1, s.sign(name, plain.Digest()))
	good := n.pull(name)
	for _, tag := range []string{"plain", "docker", "plain"} {
		n.pull(r.Addr() + "/" + elsewhere + ":" + tag)
		n.policies.Forget()
		n.wantAdmitted(good, name)
		n.wantRefused(good, r.Addr()+"/"+elsewhere+":"+tag, "is not accepted")
	}
	n.remove(good.ID)
	var pulls sync.WaitGroup
	for _, ref := range []string{name, r.Addr() + "/" + elsewhere + ":docker", r.Addr() + "/" + elsewhere + ":plain"} {
		pulls.Go(func() {
			if _, err := n.Pull(testContext(t), PullRequest{Image: ref}); err != nil {
				t.Error(err)
			}
		})
	}
	pulls.Wait()
	n.policies.Forget()
	n.wantAdmitted(good, name)
	if left := n.puller.Signatures.UnderWay(); left > 0 {
		t.Errorf("after the pulls, %d are under way", left)
	}
}

// An accepted image is refused as soon as its key is another one.
func TestAdmitFollowsKeys(t *testing.T) {
	t.Parallel()
	old, current := newSigstoreSigner(t), newSigstoreSigner(t)
	n := policies(t, "")
	key := filepath.Join(n.dir, "key.pem")
	n.write("key.pem", string(old.public()))
	n.write("policies/strict.json", `{"default": [{"type": "sigstoreSigned", "keyPath": "`+key+`", "signedIdentity": {"type": "matchRepository"}}]}`)
	repo, a := testRepo(), motd(t, "signed")
	r := serve(t, repo, "1", a)
	name := r.Addr() + "/" + repo + ":1"
	lookaside(t, repo, a.Digest(), 1, old.sign(name, a.Digest()))
	img := n.pull(name)
	n.wantAdmitted(img, name)
	n.wantAdmitted(img, name)
	n.write("key.pem", string(current.public()))
	n.wantRefused(img, name, "requires a signature by the key in "+key+" for repository "+r.Addr()+"/"+repo)
	if err := os.Remove(key); err != nil {
		t.Fatal(err)
	}
	if err := n.admit(img, name); !errors.Is(err, ErrSignature) || !errors.Is(err, fault.Precondition) {
		t.Errorf("without the key: %v", err)
	}
	n.write("key.pem", string(old.public()))
	n.wantAdmitted(img, name)
	n.write("policies/strict.json", `{"default": [{"type": "reject"}]}`)
	n.wantRefused(img, name, "rejects")
	n.write("policies/strict.json", "{")
	if err := n.admit(img, name); !errors.Is(err, ErrSignature) || !errors.Is(err, fault.Precondition) {
		t.Errorf("under a broken policy: %v", err)
	}
}

// An index is signed by its images' signatures, and named by its own digest.
func TestAdmitIndex(t *testing.T) {
	t.Parallel()
	s := newSigstoreSigner(t)
	n := policies(t, `{"default": [`+s.rule("matchRepository")+`]}`)
	repo, a := testRepo(), motd(t, "signed")
	list := index(t, a)
	r := serve(t, repo, "index", list)
	name := r.Addr() + "/" + repo
	lookaside(t, repo, a.Digest(), 1, s.sign(name+":index", a.Digest()))
	img := n.pull(name + ":index")
	for _, ref := range []string{name + ":index", name + "@" + list.Digest().String(), name + "@" + a.Digest().String()} {
		n.wantAdmitted(img, ref)
	}
	n.wantRefused(img, name+"@"+digest.FromString("another").String(), "it was not pulled as")
}

// The signatures that another tool has stored count as those of a pull.
func TestAdmitOtherToolsImage(t *testing.T) {
	t.Parallel()
	for _, s := range []signer{newSigstoreSigner(t), newGPGSigner(t)} {
		n := policies(t, `{"default": [`+s.rule("matchExact")+`]}`)
		repo, a := testRepo(), motd(t, s.kind())
		r := serve(t, repo, "1", a)
		name := r.Addr() + "/" + repo + ":1"
		lookaside(t, repo, a.Digest(), 1, s.sign(name, a.Digest()))
		if out, err := skopeo(t, "copy", "-q", "--src-tls-verify=false", "docker://"+name, n.transport(name)); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		img, err := n.Image(testContext(t), name)
		if err != nil {
			t.Fatal(err)
		}
		n.wantAdmitted(img, name)
	}
}

func BenchmarkAdmit(b *testing.B) {
	s := newSigstoreSigner(b)
	repo, a := testRepo(), motd(b, "signed")
	r := serve(b, repo, "1", a)
	name := r.Addr() + "/" + repo + ":1"
	lookaside(b, repo, a.Digest(), 1, s.sign(name, a.Digest()))
	for _, c := range []struct{ name, policy string }{
		{"accepts all", acceptAll},
		{"accepts the registry", `{"default": [{"type": "reject"}], "transports": {"docker": {"` + r.Addr() + `": [{"type": "insecureAcceptAnything"}]}}}`},
		{"signed", `{"default": [` + s.rule("matchExact") + `]}`},
		{"signed and not asked before", `{"default": [` + s.rule("matchExact") + `]}`},
	} {
		b.Run(c.name, func(b *testing.B) {
			n := policies(b, c.policy)
			img := n.pull(name)
			for b.Loop() {
				if strings.HasSuffix(c.name, "before") {
					n.policies.Forget()
				}
				n.wantAdmitted(img, name)
			}
		})
	}
}
