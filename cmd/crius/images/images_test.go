package images

import (
	"context"
	"encoding/json"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/test/kit/criserver"
)

type store struct {
	cri.UnimplementedImageServiceServer
}

func (store) ListImages(context.Context, *cri.ListImagesRequest) (*cri.ListImagesResponse, error) {
	return &cri.ListImagesResponse{Images: []*cri.Image{
		{Id: "i9", Size: 1},
		{Id: "i2", RepoDigests: []string{"r.test/b@sha256:1", "r.test/b@sha256:2"}, Size: 3 << 20},
		{Id: "i1", RepoTags: []string{"r.test/a:1", "r.test/c:latest"}, RepoDigests: []string{"r.test/a@sha256:3"}, Size: 5 << 19, Pinned: true},
	}}, nil
}

func (store) ListSecurityProfiles(context.Context, *cri.ListSecurityProfilesRequest) (*cri.ListSecurityProfilesResponse, error) {
	return &cri.ListSecurityProfilesResponse{Profiles: []*cri.SecurityProfileInfo{
		{Digest: "sha256:1", Refs: []string{"r.test/p@sha256:1", "r.test/q@sha256:1"}, Size: 3 << 10}, {Digest: "sha256:2"},
	}}, nil
}

func run(t *testing.T, args ...string) string {
	t.Helper()
	var out strings.Builder
	cmd := Command(func(*cobra.Command) (*config.Loaded, error) {
		cfg := config.Default()
		cfg.API.Listen = criserver.Serve(t, criserver.OnePod{}, store{})
		return &config.Loaded{Config: cfg}, nil
	})
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestImages(t *testing.T) {
	t.Parallel()
	got := regexp.MustCompile(` +`).ReplaceAllString(run(t), " ")
	const want = "IMAGE ID SIZE CONTAINERS PINNED\n" +
		"<none> i9 0.0 MiB 0 no\n" +
		"r.test/a:1 i1 2.5 MiB 1 yes\n" +
		"r.test/c:latest i1 2.5 MiB 1 yes\n" +
		"r.test/b@sha256:1 i2 3.0 MiB 0 no\n"
	if got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestImagesAsJSON(t *testing.T) {
	t.Parallel()
	var list []image
	if err := json.Unmarshal([]byte(run(t, "-o", "json")), &list); err != nil {
		t.Fatal(err)
	}
	if one := list[1]; len(list) != 3 || one.ID != "i1" || len(one.Names) != 2 || one.Containers != 1 || !one.Pinned || one.Size != 5<<19 || list[0].Names == nil {
		t.Errorf("%+v", list)
	}
}

func TestProfiles(t *testing.T) {
	t.Parallel()
	got := regexp.MustCompile(` +`).ReplaceAllString(run(t, "--profiles"), " ")
	const want = "PROFILE DIGEST SIZE\n" +
		"r.test/p@sha256:1 sha256:1 3.0 KiB\n" +
		"r.test/q@sha256:1 sha256:1 3.0 KiB\n" +
		"<none> sha256:2 0.0 KiB\n"
	if got != want {
		t.Errorf("%q, want %q", got, want)
	}
	var list []profile
	if err := json.Unmarshal([]byte(run(t, "--profiles", "-o", "json")), &list); err != nil || len(list) != 2 || len(list[0].Refs) != 2 || list[1].Refs == nil {
		t.Errorf("%+v, %v", list, err)
	}
}
