package storage

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/program"
)

// verified is a node with one image verifier, and the file in which it notes what it is asked.
func verified(t *testing.T, script string) (n *node, verifier, asked string) {
	t.Helper()
	dir := t.TempDir()
	asked = filepath.Join(t.TempDir(), "asked")
	verifier = filepath.Join(dir, "own")
	n = newNode(t, func(o *Options) { o.VerifiersDir = dir })
	write(t, verifier, asked, script)
	return n, verifier, asked
}

func write(t *testing.T, verifier, asked, script string) {
	t.Helper()
	if err := program.Write(verifier, []byte("#!/bin/sh\necho \"$2 $4\" >> "+asked+"\n"+script+"\n")); err != nil {
		t.Fatal(err)
	}
}

// times returns how often the verifier has been asked, and the digest of the last time.
func times(t *testing.T, asked string) (n int, digest string) {
	t.Helper()
	text, err := os.ReadFile(asked)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Fields(string(text))
	return len(lines) / 2, lines[len(lines)-1]
}

// A verifier decides about the index or manifest to which the name leads, before layers are
// fetched, and again when the image is used, also after a restart.
func TestImageVerifiersDecideAtPullAndUse(t *testing.T) {
	t.Parallel()
	n, verifier, asked := verified(t, `case "$2" in *:bad) echo nobody has signed it; exit 1;; esac`)
	repo, one := testRepo(), motd(t, "one")
	r := serve(t, repo, "good", one)
	list := index(t, motd(t, "two"))
	r.Push(repo, "index", list)
	bad := motd(t, "three")
	r.Push(repo, "bad", bad)
	name := r.Addr() + "/" + repo
	good, indexed := n.pull(name+":good"), n.pull(name+":index")
	if count, last := times(t, asked); count != 2 || last != list.Digest().String() {
		t.Errorf("asked %d times, at last about %s, want %s", count, last, list.Digest())
	}
	r.Forget()
	_, err := n.Pull(testContext(t), PullRequest{Image: name + ":bad"})
	if !errors.Is(err, ErrSignature) || !errors.Is(err, fault.Denied) || !strings.Contains(err.Error(), "image verifier own: refuses "+name+":bad (exit code 1): nobody has signed it") {
		t.Errorf("%v", err)
	}
	for _, request := range r.Requests() {
		if strings.Contains(request.Path, "/blobs/") && !strings.Contains(request.Path, bad.ID()) {
			t.Errorf("asked for %s before the verifier had decided", request.Path)
		}
	}
	for image, want := range map[*Image]string{good: name + ":good", indexed: name + ":index"} {
		if v, err := n.Verdicts(t.Context(), image); err != nil || len(v) != 1 || v[0].Name != want || !v[0].Accepted || v[0].Said != "own: " || v[0].At.IsZero() {
			t.Errorf("verdicts on %s: %+v, %v", want, v, err)
		}
	}
	n.wantAdmitted(good, name+":good")
	n.wantAdmitted(indexed, name+":index")
	if count, _ := times(t, asked); count != 3 {
		t.Errorf("asked %d times: the answers of the pull were not kept", count)
	}
	n.restart()
	n.wantAdmitted(indexed, name+":index")
	n.wantAdmitted(indexed, name+"@"+list.Digest().String())
	n.wantAdmitted(indexed, indexed.ID)
	if _, last := times(t, asked); last != list.Digest().String() {
		t.Errorf("asked about %s, want %s", last, list.Digest())
	}
	write(t, verifier, asked, "echo revoked; exit 1")
	n.wantRefused(good, name+":good", "revoked")
	if v, err := n.Verdicts(t.Context(), good); err != nil || len(v) != 1 || v[0].Accepted || !strings.Contains(v[0].Said, "(exit code 1): revoked") {
		t.Errorf("verdicts after the refusal: %+v, %v", v, err)
	}
	n.wantRefused(good, good.ID, "revoked")
	n.cfg.VerifiersAtPullOnly = true
	n.restart()
	n.wantAdmitted(good, name+":good")
}

func TestImageVerifiersDecideAboutArtifacts(t *testing.T) {
	t.Parallel()
	n, verifier, asked := verified(t, "")
	repo := testRepo()
	model := files(t, image.Files{"model": "weights"})
	r := serve(t, repo, "model", model)
	name := r.Addr() + "/" + repo + ":model"
	img := n.pull(name)
	n.restart()
	n.wantAdmitted(img, name)
	if count, last := times(t, asked); count != 2 || last != model.Digest().String() {
		t.Errorf("asked %d times, at last about %s, want %s", count, last, model.Digest())
	}
	write(t, verifier, asked, "exit 1")
	n.wantRefused(img, name, "image verifier own")
	if _, err := n.Pull(testContext(t), PullRequest{Image: name}); !errors.Is(err, ErrSignature) {
		t.Errorf("pulled again: %v", err)
	}
}
