package critest

import (
	"fmt"
	"os/exec"
	"runtime"
	"strings"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/tools"
)

// The registries of the suite's images. They stay in the names, because some
// specs compare them; see Registries.
const (
	e2eImages = "e2e-test-images/"
	criImages = "k8s-staging-cri-tools/"
)

var hosts = []string{"registry.k8s.io", "k8s.gcr.io", "gcr.io"}

// Registries returns a registries.conf that redirects every pull from the
// public registries to the one at address. There is no fallback to the public
// ones: a missing image fails.
func Registries(address string) string {
	var text strings.Builder
	for _, host := range hosts {
		fmt.Fprintf(&text, "\n[[registry]]\nprefix = %q\nlocation = %q\ninsecure = true\n", host, address)
	}
	return text.String()
}

// images builds the suite's images.
type images struct {
	busybox image.Layer // with the user database and an empty /tmp
	standin image.File
	built   map[string]*image.Artifact // by repository:tag
	digest  *image.Artifact            // pulled by its digest
}

// newImages builds every image that the suite pulls.
func newImages(p tools.Parts) (*images, error) {
	i := &images{built: map[string]*image.Artifact{}}
	var err error
	if i.busybox, err = BusyboxLayer(p.Busybox); err != nil {
		return nil, err
	}
	if i.standin, err = image.HostFile("bin/nginx", p.Standin, 0o755); err != nil {
		return nil, err
	}
	for _, build := range []func() error{i.buildWorkloads, i.buildUsers, i.buildListed} {
		if err := build(); err != nil {
			return nil, err
		}
	}
	return i, nil
}

// Push pushes all of the suite's images to r.
func (s *Suite) Push(r *registry.Registry) {
	for name, built := range s.images.built {
		repo, tag, _ := strings.Cut(name, ":")
		r.Push(repo, tag, built)
	}
	r.Push(criImages+"test-image-digest", "", s.images.digest)
}

// BusyboxLayer returns the root file system of a busybox, with every applet as
// a hard link: specs mask /bin/ls, which through a symbolic link would mask
// busybox itself.
func BusyboxLayer(program string) (image.Layer, error) {
	applets, err := exec.Command(program, "--list").Output()
	if err != nil {
		return image.Layer{}, fmt.Errorf("list the applets of busybox: %w", err)
	}
	busybox, err := image.HostFile("bin/busybox", program, 0o755)
	if err != nil {
		return image.Layer{}, err
	}
	files := []image.File{image.Dir("bin"), busybox}
	for _, applet := range strings.Fields(string(applets)) {
		if applet != "busybox" {
			link := image.Hardlink("bin/"+applet, "bin/busybox")
			link.Mode = 0o755 // unpacking a link may set it on the file
			files = append(files, link)
		}
	}
	tmp := image.Dir("tmp")
	tmp.Mode = 0o1777
	files = append(files, tmp, image.Dir("etc"), image.Dir("root"), image.Dir("var"), image.Dir("var/run"),
		image.Text("etc/passwd", passwd), image.Text("etc/group", group))
	return image.NewLayer(files...)
}

// The user database of every image. The suite compares the ids of the
// predefined user and group.
const (
	passwd = "root:x:0:0:root:/root:/bin/sh\n" +
		"www-data:x:33:33:www-data:/var/www:/bin/false\n" +
		"nobody:x:65534:65534:nobody:/home:/bin/false\n"
	group           = "root:x:0:\nwww-data:x:33:\nnogroup:x:65534:\n"
	predefinedUser  = "default-user:x:1000:1000:Linux User:/home/default-user:/bin/sh\n"
	predefinedGroup = "default-user:x:1000:\ngroup-defined-in-image:x:50000:default-user\n"
)

// build builds an image on busybox and stores it under each of the names.
func (i *images) build(config imagespec.ImageConfig, files []image.File, names ...string) error {
	config.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	if config.Cmd == nil {
		config.Cmd = []string{"sh"}
	}
	img := image.Image{Config: config, Layers: []image.Layer{i.busybox}}
	if len(files) > 0 {
		layer, err := image.NewLayer(files...)
		if err != nil {
			return fmt.Errorf("image %s: %w", names[0], err)
		}
		img.Layers = append(img.Layers, layer)
	}
	built, err := img.Build()
	if err != nil {
		return fmt.Errorf("image %s: %w", names[0], err)
	}
	for _, name := range names {
		i.built[name] = built
	}
	return nil
}

// buildWorkloads builds the images whose containers run something. Those of
// busybox and pause are indexes of several platforms, like the real ones.
func (i *images) buildWorkloads() error {
	httpd, nnp := i.standin, i.standin
	httpd.Name, nnp.Name = "bin/httpd", "nnp"
	nnp.Mode = 0o4755
	run := func(cmd ...string) imagespec.ImageConfig { return imagespec.ImageConfig{Cmd: cmd} }
	const (
		busybox = e2eImages + "busybox:1.29-2"
		pause   = "pause:3.9"
		newer   = "pause:3.10" // of docs/install.md, not of the suite
	)
	for _, err := range []error{
		i.build(run(), nil, busybox),
		i.build(run("sleep", "infinity"), []image.File{image.Text("pause", "")}, pause, newer),
		i.build(run("nginx"), []image.File{i.standin}, e2eImages+"nginx:1.14-2"),
		i.build(run("nginx", ":12003"), []image.File{i.standin}, criImages+"hostnet-nginx-"+runtime.GOARCH+":latest"),
		i.build(run("httpd"), []image.File{httpd}, e2eImages+"httpd:2.4.39-4"),
		i.build(run("/nnp"), []image.File{nnp}, e2eImages+"nonewprivs:1.3"),
		i.index(busybox),
		i.index(pause),
	} {
		if err != nil {
			return err
		}
	}
	return nil
}

// index puts an image into an index, after one for another platform.
func (i *images) index(name string) error {
	other, err := image.Image{Platform: imagespec.Platform{OS: "linux", Architecture: "s390x"}}.Build()
	if err != nil {
		return err
	}
	i.built[name], err = image.Index(other, i.built[name])
	return err
}

// buildUsers builds the images that set a user.
func (i *images) buildUsers() error {
	for name, user := range map[string]string{
		"test-image-user-uid":            "1002",
		"test-image-user-username":       "www-data",
		"test-image-user-uid-group":      "1003:1004",
		"test-image-user-username-group": "www-data:1004",
	} {
		if err := i.build(imagespec.ImageConfig{User: user}, nil, criImages+name+":latest"); err != nil {
			return err
		}
	}
	return i.build(imagespec.ImageConfig{User: "1000"}, []image.File{
		image.Text("etc/passwd", passwd+predefinedUser), image.Text("etc/group", group+predefinedGroup),
	}, criImages+"test-image-predefined-group:latest")
}

// buildListed builds the images that are only pulled, listed and removed. All
// differ, except the one with three tags.
func (i *images) buildListed() error {
	const byDigest = criImages + "test-image-digest:"
	for content, tags := range map[string][]string{
		"1":      {"test-image-1:latest"},
		"2":      {"test-image-2:latest"},
		"3":      {"test-image-3:latest"},
		"tags":   {"test-image-tags:1", "test-image-tags:2", "test-image-tags:3"},
		"latest": {"test-image-latest:latest"},
		"test":   {"test-image-tag:test"},
		"all":    {"test-image-tag:all"},
		"digest": {"test-image-digest:"},
	} {
		var names []string
		for _, tag := range tags {
			names = append(names, criImages+tag)
		}
		if err := i.build(imagespec.ImageConfig{}, []image.File{image.Text("content", content)}, names...); err != nil {
			return err
		}
	}
	i.digest = i.built[byDigest]
	delete(i.built, byDigest)
	return nil
}

// suiteDigest is the digest of test-image-digest for which the suite was built.
const suiteDigest = "9700f9a2f5bf2c45f2f605a0bd3bce7cf37420ec9d3ed50ac2758413308766bf"
