package storage

import (
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/program"
	"github.com/crius-run/crius/test/kit/registry"
)

// What SOCI and Nydus put beside an ordinary image, for snapshotters that crius does not have, does not
// keep that image from being pulled, in whatever order.
func TestOrdinaryImageBesideLazyOnes(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "ordinary")
	here := &imagespec.Platform{OS: "linux", Architecture: runtime.GOARCH}
	ordinary := imagespec.Descriptor{MediaType: a.MediaType, Digest: a.Digest(), Size: int64(len(a.Manifest)), Platform: here}
	files, err := image.Files{}.Build()
	ok(t, err)
	soci := imagespec.Descriptor{
		MediaType: files.MediaType, Digest: files.Digest(), Size: int64(len(files.Manifest)), ArtifactType: "application/vnd.amazon.soci.index.v2+json",
		Annotations: map[string]string{"com.amazon.soci.image-manifest-digest": a.Digest().String()},
	}
	lazy := build(t, image.Image{Annotations: map[string]string{"nydus": "yes"}, Layers: []image.Layer{layer(t, image.Text("image.boot", "x"))}})
	nydus := imagespec.Descriptor{
		MediaType: lazy.MediaType, Digest: lazy.Digest(), Size: int64(len(lazy.Manifest)),
		Platform: &imagespec.Platform{OS: "linux", Architecture: runtime.GOARCH, OSFeatures: []string{"nydus.remoteimage.v1"}},
	}
	for name, list := range map[string][]imagespec.Descriptor{
		"soci after": {ordinary, soci}, "soci before": {soci, ordinary}, "nydus after": {ordinary, nydus}, "nydus before": {nydus, ordinary},
	} {
		text, err := json.Marshal(map[string]any{"schemaVersion": 2, "mediaType": imagespec.MediaTypeImageIndex, "manifests": list})
		ok(t, err)
		all := &image.Artifact{MediaType: imagespec.MediaTypeImageIndex, Manifest: text, Children: []*image.Artifact{a, files, lazy}}
		r := serve(t, "app", "1", all)
		for _, ref := range []string{r.Addr() + "/app:1", r.Addr() + "/app@" + all.Digest().String()} {
			if img, err := n.Pull(testContext(t), PullRequest{Image: ref}); err != nil || img.ID != a.ID() {
				t.Errorf("%s: %v, %v", name, img, err)
				continue
			}
			n.remove(ref)
		}
	}
	n.empty()
}

// A credential helper that image.auth_file names for a registry is asked at each pull, and blamed if it
// has nothing, or something wrong.
func TestCredentialHelper(t *testing.T) {
	n := newNode(t, func(c *Options) { c.AuthFile = filepath.Join(filepath.Dir(c.Root), "auth.json") })
	r := serve(t, "app", "1", motd(t, "helper"))
	r.Require(registry.Auth{Username: "joe", Password: "hunter22"})
	ref := r.Addr() + "/app:1"
	n.write("auth.json", `{"credHelpers": {"`+r.Addr()+`": "crius-test"}}`)
	t.Setenv("PATH", n.dir+":"+os.Getenv("PATH"))
	helper := func(does string) {
		t.Helper()
		ok(t, program.Write(filepath.Join(n.dir, "docker-credential-crius-test"), []byte("#!/bin/sh\n"+does+"\n")))
	}
	gives := func(password string) string {
		return `read -r server; [ "$1" = get ] && [ "$server" = "` + r.Addr() + `" ] && echo '{"ServerURL": "x", "Username": "joe", "Secret": "` + password + `"}'`
	}
	helper(gives("hunter22"))
	n.remove(n.pull(ref).ID)
	helper(gives("wrong-one"))
	n.says(ref, nil, fault.Unauthenticated, "refused the credentials in "+n.cfg.AuthFile)
	helper("echo 'no such vault'; exit 1")
	_, err := n.Pull(testContext(t), PullRequest{Image: ref})
	if err == nil || !strings.Contains(err.Error(), "no such vault") {
		t.Error(err)
	}
}
