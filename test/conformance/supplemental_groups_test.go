package main_test

import (
	"slices"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/scene"
)

// TestSupplementalGroups tests KEP-3619: Merge adds the groups that the image
// gives its user, Strict does not. In the test images, user 1001 with primary
// group 1002 belongs to 2001 and 2002, and 65534 to 2002.
func TestSupplementalGroups(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	if !nodeStatus(t, w).GetFeatures().GetSupplementalGroupsPolicy() {
		t.Error("Status does not say that supplemental_groups_policy is supported")
	}
	id := func(n int64) *cri.Int64Value { return &cri.Int64Value{Value: n} }
	const merge, strict = cri.SupplementalGroupsPolicy_Merge, cri.SupplementalGroupsPolicy_Strict
	cases := map[string]struct {
		image    string // USER
		security *cri.LinuxContainerSecurityContext
		uid, gid int64
		groups   []int64
	}{
		"merge": {"", &cri.LinuxContainerSecurityContext{RunAsUser: id(1001), SupplementalGroups: []int64{3000}, SupplementalGroupsPolicy: merge},
			1001, 1002, []int64{1002, 2001, 2002, 3000}},
		"strict": {"", &cri.LinuxContainerSecurityContext{RunAsUser: id(1001), SupplementalGroups: []int64{3000}, SupplementalGroupsPolicy: strict},
			1001, 1002, []int64{1002, 3000}},
		"merge, with a group": {"", &cri.LinuxContainerSecurityContext{RunAsUser: id(1001), RunAsGroup: id(50), SupplementalGroups: []int64{3000}, SupplementalGroupsPolicy: merge},
			1001, 50, []int64{50, 2001, 2002, 3000}},
		"strict, with a group": {"", &cri.LinuxContainerSecurityContext{RunAsUser: id(1001), RunAsGroup: id(50), SupplementalGroups: []int64{3000}, SupplementalGroupsPolicy: strict},
			1001, 50, []int64{50, 3000}},
		"merge, of the image's user": {"app", &cri.LinuxContainerSecurityContext{SupplementalGroupsPolicy: merge},
			1001, 1002, []int64{1002, 2001, 2002}},
		"strict, of the image's user": {"app", &cri.LinuxContainerSecurityContext{SupplementalGroupsPolicy: strict},
			1001, 1002, []int64{1002}},
		"merge, by name": {"", &cri.LinuxContainerSecurityContext{RunAsUsername: "nobody", SupplementalGroups: []int64{3000, 3000}},
			65534, 65534, []int64{2002, 3000, 65534}},
		"strict, by name": {"", &cri.LinuxContainerSecurityContext{RunAsUsername: "nobody", SupplementalGroups: []int64{2002}, SupplementalGroupsPolicy: strict},
			65534, 65534, []int64{2002, 65534}},
		"strict, a user whom the image does not know": {"", &cri.LinuxContainerSecurityContext{RunAsUser: id(4000), SupplementalGroups: []int64{3000}, SupplementalGroupsPolicy: strict},
			4000, 0, []int64{0, 3000}},
		"merge, a user whom the image does not know": {"", &cri.LinuxContainerSecurityContext{RunAsUser: id(4000), SupplementalGroups: []int64{3000}},
			4000, 0, []int64{0, 3000}},
	}
	app := w.Image(t, func(c *imagespec.ImageConfig) { c.User = "app" })
	scene.Each(t, func(t *testing.T, handler string) {
		p := w.Pod(t, handler)
		for name, test := range cases {
			t.Run(name, func(t *testing.T) {
				c := p.Start(t, "sleep", func(c *cri.ContainerConfig) {
					if test.image == "app" {
						c.Image.Image = app
					}
					s := c.Linux.SecurityContext
					s.RunAsUser, s.RunAsGroup, s.RunAsUsername = test.security.RunAsUser, test.security.RunAsGroup, test.security.RunAsUsername
					s.SupplementalGroups, s.SupplementalGroupsPolicy = test.security.SupplementalGroups, test.security.SupplementalGroupsPolicy
				})
				f := c.Facts(t)
				scene.Equal(t, "uid", int64(f.UID), test.uid)
				scene.Equal(t, "gid", int64(f.GID), test.gid)
				if got := ids(f.Groups); !slices.Equal(got, test.groups) {
					t.Errorf("an exec has the groups %v, want %v", got, test.groups)
				}
				if got := c.Procfs(t, "status"); !hasGroups(got, test.groups) {
					t.Errorf("the container has other groups than %v: %s", test.groups, got)
				}
				user := c.Status(t).GetUser().GetLinux()
				scene.Equal(t, "uid in the status", user.GetUid(), test.uid)
				scene.Equal(t, "gid in the status", user.GetGid(), test.gid)
				if got := slices.Sorted(slices.Values(user.GetSupplementalGroups())); !slices.Equal(got, test.groups) {
					t.Errorf("the status says %v, want %v", got, test.groups)
				}
			})
		}
		_, err := p.Try(t.Context(), "sleep", func(c *cri.ContainerConfig) { c.Linux.SecurityContext.SupplementalGroupsPolicy = 7 })
		scene.WantCode(t, err, codes.InvalidArgument, "policy")
	})
}

func ids(s []int) []int64 {
	var out []int64
	for _, n := range s {
		out = append(out, int64(n))
	}
	return out
}
