//go:build differential

package differential

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	cstorage "go.podman.io/storage"
	"go.podman.io/storage/pkg/archive"
	"go.podman.io/storage/types"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/storage"
	"github.com/crius-run/crius/storage/unpack/layers"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/tools"
)

func TestMain(m *testing.M) {
	if storage.Init() {
		return
	}
	slog.SetDefault(slog.New(slog.DiscardHandler))
	os.Exit(m.Run())
}

// Each layer has the same files in crius's store as in that of the other tool,
// and can be rebuilt bit by bit, unless `known` says why not.
func TestLayersAreUnpackedAsElsewhere(t *testing.T) {
	all, err := samples(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	r := registry.New()
	if err := r.Listen("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	ours, theirs := newOurs(t), newTheirs(t)
	verdicts := map[string]int{}
	for i, s := range all {
		a, err := image.Image{Layers: s.layers}.Build()
		if err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
		for _, l := range s.layers {
			ours.names[l.DiffID] = s.name
		}
		r.Push("sample", fmt.Sprint(i), a)
		ref := fmt.Sprintf("%s/sample:%d", r.Addr(), i)
		ourErr := ours.pull(ref)
		theirErr := theirs.pull(ref)
		verdicts[judge(t, ours, theirs, s, ourErr, theirErr)]++
	}
	ours.rebuild(t, verdicts)
	for _, verdict := range slices.Sorted(maps.Keys(verdicts)) {
		t.Logf("%4d %s", verdicts[verdict], verdict)
	}
}

// judge compares the results of one image, and returns what came of it.
func judge(t *testing.T, ours *oursStore, theirs *theirsStore, s sample, ourErr, theirErr error) string {
	t.Helper()
	switch {
	case ourErr != nil && theirErr != nil:
		t.Logf("%s: %v", s.name, ourErr)
		return "refused by both"
	case ourErr != nil:
		return explain(t, refusedByUs, s.name, ourErr.Error())
	case theirErr != nil:
		return explain(t, refusedByThem, s.name, theirErr.Error())
	}
	var contents []digest.Digest
	for _, l := range s.layers {
		contents = append(contents, l.DiffID)
	}
	implied := false
	lower := map[string][]string{}
	for i, id := range layers.IDs(contents) {
		a, err := walk(filepath.Join(ours.root, "overlay", id, "diff"))
		b, err2 := walk(filepath.Join(theirs.root, "overlay", id, "diff"))
		if err := first(err, err2); err != nil {
			return explain(t, cannotBeReread, s.name, err.Error())
		}
		implied = dropInherited(a, b, lower) || implied
		if lines := differences(a, b); len(lines) > 0 {
			return explain(t, different, s.name, fmt.Sprintf("layer %d: %s", i, strings.Join(lines[:min(len(lines), 4)], "\n  ")))
		}
	}
	if implied {
		return "the same, except for directories without entries, which have the attributes of those below"
	}
	return "the same"
}

// explain returns a verdict with its reason, or fails the test.
func explain(t *testing.T, verdict, name, detail string) string {
	t.Helper()
	for _, k := range known {
		if k.verdict == verdict && k.name.MatchString(name) && strings.Contains(detail, k.detail) {
			return verdict + ": " + k.reason
		}
	}
	t.Errorf("%s: %s: %s", name, verdict, detail)
	return verdict + ", unexplained"
}

// oursStore is a store of crius.
type oursStore struct {
	*storage.Store
	dir, root string
	names     map[digest.Digest]string // of images, by their layers
}

func newOurs(t *testing.T) *oursStore {
	dir := t.TempDir()
	cfg := storage.Options{Config: storage.DefaultConfig()}
	cfg.StateDir, cfg.Root, cfg.RunRoot = filepath.Join(dir, "state"), filepath.Join(dir, "root"), filepath.Join(dir, "run")
	cfg.Options = []string{"overlay.sync=none"}
	cfg.RegistriesConf, cfg.SignaturePolicy = filepath.Join(dir, "registries.conf"), filepath.Join(dir, "policy.json")
	unpacker, err := tools.Unpacker(t.Context(), false)
	cfg.Unpacker = unpacker
	err = first(err,
		os.WriteFile(cfg.RegistriesConf, []byte("[[registry]]\nlocation = \"127.0.0.1\"\ninsecure = true\n"), 0o600),
		os.WriteFile(cfg.SignaturePolicy, []byte(`{"default": [{"type": "insecureAcceptAnything"}]}`), 0o600))
	if err != nil {
		t.Fatal(err)
	}
	s, err := storage.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return &oursStore{s, dir, cfg.Root, map[digest.Digest]string{}}
}

func (o *oursStore) pull(ref string) error {
	_, err := o.Pull(context.Background(), storage.PullRequest{Image: ref})
	return err
}

// rebuild reads the archive of each layer from the store, as podman push does.
func (o *oursStore) rebuild(t *testing.T, verdicts map[string]int) {
	t.Helper()
	store, err := cstorage.GetStore(types.StoreOptions{GraphDriverName: "overlay", GraphRoot: o.root, RunRoot: filepath.Join(o.dir, "run")})
	if err != nil {
		t.Fatal(err)
	}
	all, err := store.Layers()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range all {
		verdict := "rebuilt bit by bit"
		if sum, err := contentOfLayer(store, l.ID); err != nil || sum != l.UncompressedDigest {
			verdict = explain(t, cannotRebuild, o.names[l.UncompressedDigest], fmt.Sprint(err))
		}
		verdicts[verdict]++
	}
}

// contentOfLayer returns the digest of a layer's archive.
func contentOfLayer(store cstorage.Store, layer string) (digest.Digest, error) {
	none := archive.Uncompressed
	content, err := store.Diff("", layer, &cstorage.DiffOptions{Compression: &none})
	if err != nil {
		return "", err
	}
	sum, err := digest.FromReader(content)
	return sum, first(err, content.Close())
}

// theirsStore is a store of skopeo.
type theirsStore struct{ root, run string }

func newTheirs(t *testing.T) *theirsStore {
	dir := t.TempDir()
	t.Cleanup(func() { _ = unix.Unmount(filepath.Join(dir, "root", "overlay"), 0) }) // the library's bind mount
	return &theirsStore{filepath.Join(dir, "root"), filepath.Join(dir, "run")}
}

func (s *theirsStore) pull(ref string) error {
	name := ref[strings.LastIndex(ref, ":")+1:]
	cmd := exec.Command("skopeo", "copy", "-q", "--src-tls-verify=false", "--insecure-policy", "docker://"+ref,
		fmt.Sprintf("containers-storage:[overlay@%s+%s]example.org/sample:%s", s.root, s.run, name))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}
