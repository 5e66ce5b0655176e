package integration

import (
	"path/filepath"
	"strings"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/image"
)

// The image's passwd has root 0:0, app 1001:1002 and nobody 65534:65534; its
// group adds app to extra 2001 and more 2002, and nobody to more.
func TestUsersAndGroups_CVE_2022_2995_CVE_2023_25173(t *testing.T) {
	t.Parallel()
	w := shared(t)
	type security = cri.LinuxContainerSecurityContext
	id := func(n int64) *cri.Int64Value { return &cri.Int64Value{Value: n} }
	cases := map[string]struct {
		image    string // USER of the image
		security *security
		uid, gid int
		groups   []int
		home     string
	}{
		"nothing":              {"", &security{}, 0, 0, []int{0}, "/root"},
		"uid":                  {"", &security{RunAsUser: id(1001)}, 1001, 1002, []int{1002, 2001, 2002}, "/home/app"},
		"uid without entry":    {"", &security{RunAsUser: id(4711)}, 4711, 0, []int{0}, "/"},
		"uid and gid":          {"", &security{RunAsUser: id(1001), RunAsGroup: id(5000)}, 1001, 5000, []int{2001, 2002, 5000}, "/home/app"},
		"user name":            {"", &security{RunAsUsername: "app"}, 1001, 1002, []int{1002, 2001, 2002}, "/home/app"},
		"user name and gid":    {"", &security{RunAsUsername: "app", RunAsGroup: id(77)}, 1001, 77, []int{77, 2001, 2002}, "/home/app"},
		"supplemental":         {"", &security{RunAsUser: id(4711), SupplementalGroups: []int64{9, 8}}, 4711, 0, []int{0, 8, 9}, "/"},
		"merge":                {"", &security{RunAsUser: id(1001), SupplementalGroups: []int64{9}, SupplementalGroupsPolicy: cri.SupplementalGroupsPolicy_Merge}, 1001, 1002, []int{9, 1002, 2001, 2002}, "/home/app"},
		"strict":               {"", &security{RunAsUser: id(1001), SupplementalGroups: []int64{9}, SupplementalGroupsPolicy: cri.SupplementalGroupsPolicy_Strict}, 1001, 1002, []int{9, 1002}, "/home/app"},
		"image name":           {"app", &security{}, 1001, 1002, []int{1002, 2001, 2002}, "/home/app"},
		"image uid":            {"1001", &security{}, 1001, 1002, []int{1002, 2001, 2002}, "/home/app"},
		"image name:group":     {"app:extra", &security{}, 1001, 2001, []int{2001, 2002}, "/home/app"},
		"image uid:gid":        {"1003:1004", &security{}, 1003, 1004, []int{1004}, "/"},
		"request beats image":  {"nobody", &security{RunAsUser: id(1001)}, 1001, 1002, []int{1002, 2001, 2002}, "/home/app"},
		"image name:":          {"app:", &security{}, 1001, 1002, []int{1002, 2001, 2002}, "/home/app"},
		"image :group":         {":extra", &security{}, 0, 2001, []int{2001}, "/root"},
		"image leading zeros":  {"007", &security{}, 7, 0, []int{0}, "/"},
		"name and group names": {"nobody:more", &security{}, 65534, 2002, []int{2002}, "/"},
	}
	p := w.run(t, "crun")
	refs := map[string]string{"": probe}
	for name, c := range cases {
		if refs[c.image] == "" {
			refs[c.image] = w.image(t, func(config *imagespec.ImageConfig) { config.User = c.image })
		}
		made := p.start(t, "facts", func(config *cri.ContainerConfig) {
			config.Image.Image = refs[c.image]
			s := config.Linux.SecurityContext
			s.RunAsUser, s.RunAsGroup, s.RunAsUsername = c.security.RunAsUser, c.security.RunAsGroup, c.security.RunAsUsername
			s.SupplementalGroups, s.SupplementalGroupsPolicy = c.security.SupplementalGroups, c.security.SupplementalGroupsPolicy
		})
		made.wait(t)
		f := lastFacts(t, made)
		equal(t, name+": uid", f.UID, c.uid)
		equal(t, name+": gid", f.GID, c.gid)
		// The primary group must be among the supplementary ones; otherwise files
		// that deny access to it would be accessible (CVE-2022-2995).
		equalSlices(t, name+": groups", unique(append(f.Groups, f.GID)), unique(c.groups))
		if f.UID != 0 && !contains(f.Groups, f.GID) {
			t.Errorf("%s: groups %v lack the primary one %d (CVE-2022-2995)", name, f.Groups, f.GID)
		}
		home, _ := f.Getenv("HOME")
		equal(t, name+": HOME", home, c.home)

		told := made.status(t).GetUser().GetLinux()
		equal(t, name+": uid in the status", told.GetUid(), int64(c.uid))
		equal(t, name+": gid in the status", told.GetGid(), int64(c.gid))
	}
}

// A kubelet sends the image's user, as ImageStatus gives it, with the container, and no group: CRI
// has none (kubernetes#93666, kubernetes#61967).
func TestUserOfTheImageAsKubeletsSendIt_kubernetes_93666(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "runc")
	for user, want := range map[string]struct{ uid, gid int }{
		"": {0, 0}, "1003:1004": {1003, 0}, "app:extra": {1001, 1002}, ":extra": {0, 0},
	} {
		ref := w.image(t, func(c *imagespec.ImageConfig) { c.User = user })
		w.pull(t, ref)
		img := w.imageStatus(t, ref)
		f := p.facts(t, func(c *cri.ContainerConfig) {
			c.Image.Image = ref
			c.Linux.SecurityContext.RunAsUser, c.Linux.SecurityContext.RunAsUsername = img.Uid, img.Username
		})
		equal(t, user+": uid", f.UID, want.uid)
		equal(t, user+": gid", f.GID, want.gid)
	}
}

func TestUnknownUserNamesAreRefused(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "runc")
	_, err := p.try(t.Context(), steps("sleep"), func(c *cri.ContainerConfig) {
		c.Linux.SecurityContext.RunAsUsername = "stranger"
	})
	wantCode(t, err, codes.InvalidArgument, "stranger")

	ref := w.image(t, func(c *imagespec.ImageConfig) { c.User = "app:strangers" })
	_, err = p.try(t.Context(), steps("sleep"), fromImage(ref))
	wantCode(t, err, codes.InvalidArgument, "strangers")
}

// The attacker chooses the image's USER: a number that does not fit must
// neither wrap around to 0 nor be looked up as a name.
func TestImageUserOutOfRange_CVE_2024_40635_CVE_2026_46680(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "runc")
	for _, user := range []string{"4294967296", "-1", "2147483648", "99999999999999999999", "0x0", "+0", "1001:4294967296", "1001:-5", "::", "0::"} {
		t.Run(user, func(t *testing.T) {
			ref := w.image(t, func(c *imagespec.ImageConfig) { c.User = user })
			c, err := p.try(t.Context(), steps("facts"), func(c *cri.ContainerConfig) { c.Image.Image = ref })
			if err != nil {
				wantCode(t, err, codes.InvalidArgument)
				return
			}
			c.start(t)
			c.wait(t)
			f := lastFacts(t, c)
			t.Errorf("USER %s was accepted and runs as %d:%d", user, f.UID, f.GID)
		})
	}
}

// A user that the image does not know nevertheless has a name in the container,
// and only there; for a known user the image's own file stays.
func TestEveryUserHasAName(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	as := func(user, group int64) containerChange {
		return func(c *cri.ContainerConfig) {
			c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: user}
			c.Linux.SecurityContext.RunAsGroup = &cri.Int64Value{Value: group}
			c.WorkingDir = "/tmp"
		}
	}
	c := p.start(t, "sleep", as(4711, 4712))
	equal(t, "passwd", c.exec(t, "cat /etc/passwd"), images.Passwd+"user4711:*:4711:4712::/tmp:/sbin/nologin\n")
	equal(t, "group", c.exec(t, "cat /etc/group"), images.Group+"group4712:x:4712:\n")
	made := p.start(t, "facts", as(4711, 4712))
	made.wait(t)
	f := lastFacts(t, made)
	home, _ := f.Getenv("HOME")
	equal(t, "HOME, as in passwd", home, "/tmp")

	// HOME comes before the working directory.
	c = p.start(t, "sleep", as(4711, 0), func(c *cri.ContainerConfig) {
		c.Envs = append(c.Envs, &cri.KeyValue{Key: "HOME", Value: []byte("/data")})
	})
	equal(t, "passwd", c.exec(t, "cat /etc/passwd"), images.Passwd+"user4711:*:4711:0::/data:/sbin/nologin\n")

	c = p.start(t, "sleep", as(1001, 1002))
	equal(t, "passwd of a known user", c.exec(t, "cat /etc/passwd"), images.Passwd)
	equal(t, "group of a known user", c.exec(t, "cat /etc/group"), images.Group)

	// A volume that a pod mounts there takes precedence.
	own := filepath.Join(w.dir(t), "passwd")
	put(t, own, "own")
	c = p.start(t, "sleep", as(4711, 4712), withMounts(&cri.Mount{ContainerPath: "/etc/passwd", HostPath: own}))
	equal(t, "passwd that is a volume", c.exec(t, "cat /etc/passwd"), "own")
}

// Names as useradd and directory services make them, files of Windows and of NIS, and links.
func TestUsersOfOddFiles_podman_631_moby_12514(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "runc")
	line := func(name string) string { return images.Passwd + name + ":x:1234:1235::/:/none\n" }
	for user, files := range map[string][]image.File{
		"first.last": {image.Text("etc/passwd", line("first.last"))},
		"host$":      {image.Text("etc/passwd", line("host$"))},
		"a@b.c":      {image.Text("etc/passwd", line("a@b.c"))},
		"jürgen":     {image.Text("etc/passwd", line("jürgen"))},
		"windows":    {image.Text("etc/passwd", strings.ReplaceAll(line("windows"), "\n", "\r\n"))},
		"nis":        {image.Text("etc/passwd", "+::::::\n+@net\n# none\n\n"+line("nis"))},
		"linked":     {image.Text("usr/lib/passwd", line("linked")), image.Symlink("etc/passwd", "/usr/lib/passwd")},
	} {
		ref := w.image(t, func(c *imagespec.ImageConfig) { c.User = user }, files...)
		f := p.facts(t, func(c *cri.ContainerConfig) { c.Image.Image = ref })
		equal(t, user+": uid", f.UID, 1234)
		equal(t, user+": gid", f.GID, 1235)
	}
	// Ids that are no numbers, or too few fields, are no user; others read them as 0.
	for user, entry := range map[string]string{"weird": "weird:x:abc:def::/:\n", "short": "short:x:1234\n"} {
		ref := w.image(t, func(c *imagespec.ImageConfig) { c.User = user }, image.Text("etc/passwd", images.Passwd+entry))
		_, err := p.try(t.Context(), steps("sleep"), fromImage(ref))
		wantCode(t, err, codes.InvalidArgument, user)
	}
}
