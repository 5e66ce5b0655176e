package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crius-run/crius/test/kit/critest"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/tools"
)

// The registries whose images the node's registry serves. Others are
// unreachable.
var hosts = []string{"registry.k8s.io", "gcr.io", "docker.io"}

// images are those of the end-to-end tests, by the names in the tests.
type images struct {
	made    map[string]*image.Artifact
	missing []string // cannot be made here
}

// listImages returns the names of the images that the tests use.
func listImages(ctx context.Context, tests string) ([]string, error) {
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	cmd := exec.CommandContext(ctx, tests, "--list-images")
	cmd.Env = append(os.Environ(), "TMPDIR="+dir) // some tests make directories before they are run
	list, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("list the images of the tests: %w", err)
	}
	return strings.Fields(string(list)), nil
}

// newImages makes the images with these names, as far as possible.
func newImages(ctx context.Context, programs tools.Cluster, names []string) (*images, error) {
	makers, err := newMakers(ctx, programs)
	if err != nil {
		return nil, err
	}
	built := map[string]*image.Artifact{}
	i := &images{made: map[string]*image.Artifact{}}
	for _, name := range names {
		repo := repository(name)
		made, known := makers[path.Base(repo)]
		if !known || !slices.Contains(hosts, host(name)) || strings.HasPrefix(repo, private) {
			i.missing = append(i.missing, name)
			continue
		}
		if built[path.Base(repo)] == nil {
			if built[path.Base(repo)], err = made.Build(); err != nil {
				return nil, fmt.Errorf("image %s: %w", name, err)
			}
		}
		i.made[name] = built[path.Base(repo)]
	}
	slices.Sort(i.missing)
	return i, nil
}

// private is the repository prefix of images for which the tests expect to need
// credentials.
const private = "k8s-authenticated-test/"

// push pushes the images.
func (i *images) push(r *registry.Registry) {
	for name, built := range i.made {
		r.Push(repository(name), name[strings.LastIndexByte(name, ':')+1:], built)
	}
}

// one returns the name of an image, by the last part of its repository.
func (i *images) one(base string) string {
	for _, name := range slices.Sorted(maps.Keys(i.made)) {
		if path.Base(repository(name)) == base {
			return name
		}
	}
	return base
}

// host returns the registry in the name of an image.
func host(name string) string {
	host, _, _ := strings.Cut(name, "/")
	return host
}

// repository returns the name of an image without its registry and tag.
func repository(name string) string {
	_, name, _ = strings.Cut(name, "/")
	if tag := strings.LastIndexByte(name, ':'); tag > 0 {
		name = name[:tag]
	}
	return name
}

// newMakers returns what can be made, by the last part of the image's
// repository.
func newMakers(ctx context.Context, programs tools.Cluster) (map[string]image.Image, error) {
	parts, err := tools.CritestParts(ctx)
	if err != nil {
		return nil, err
	}
	busybox, err := critest.BusyboxLayer(parts.Busybox)
	if err != nil {
		return nil, err
	}
	agnhost, err := agnhostLayer(ctx, programs.Agnhost)
	if err != nil {
		return nil, err
	}
	hostname, err := hostLayer(ctx, []string{"hostname"})
	if err != nil {
		return nil, err
	}
	nginx, err := image.HostFile("bin/nginx", parts.Standin, 0o755)
	if err != nil {
		return nil, err
	}
	nnp := nginx
	nnp.Name, nnp.Mode = "usr/local/bin/nnp", 0o6755
	pause, err := image.HostFile("pause", parts.Standin, 0o755)
	if err != nil {
		return nil, err
	}
	kitten, err := image.NewLayer(image.Text("data.json", `{"image": "kitten.jpg"}`), image.Text("etc/os-release", "PRETTY_NAME=\"Alpine Linux\"\n"))
	if err != nil {
		return nil, err
	}
	standins := map[string]image.Layer{}
	for name, file := range map[string]image.File{"nginx": nginx, "nonewprivs": nnp, "pause": pause} {
		if standins[name], err = image.NewLayer(file); err != nil {
			return nil, err
		}
	}
	return map[string]image.Image{
		"agnhost":           on(imagespec.ImageConfig{Entrypoint: []string{"/agnhost"}, Cmd: []string{"pause"}}, busybox, agnhost),
		"busybox":           on(imagespec.ImageConfig{Cmd: []string{"sh"}}, busybox),
		"ipc-utils":         on(imagespec.ImageConfig{Cmd: []string{"sh"}}, busybox),
		"glibc-dns-testing": on(imagespec.ImageConfig{Cmd: []string{"sh"}}, busybox, hostname),
		"kitten":            on(imagespec.ImageConfig{}, kitten), // read by the specs of image volumes
		"nginx":             on(imagespec.ImageConfig{Cmd: []string{"nginx"}}, busybox, standins["nginx"]),
		"nonewprivs":        on(imagespec.ImageConfig{Cmd: []string{"nnp"}}, busybox, standins["nonewprivs"]),
		"nonroot":           on(imagespec.ImageConfig{Cmd: []string{"sh"}, User: "1234"}, busybox),
		"pause":             on(imagespec.ImageConfig{Entrypoint: []string{"/pause"}}, standins["pause"]),
	}, nil
}

func on(config imagespec.ImageConfig, layers ...image.Layer) image.Image {
	config.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	return image.Image{Config: config, Layers: layers}
}

// The user database of agnhost, for a spec about groups that are defined in images.
const (
	agnhostPasswd = "root:x:0:0:root:/root:/bin/sh\n" +
		"nobody:x:65534:65534:nobody:/:/sbin/nologin\n" +
		"user-defined-in-image:x:1000:1000::/home/user-defined-in-image:/bin/sh\n"
	agnhostGroup = "root:x:0:\nnobody:x:65534:\nuser-defined-in-image:x:1000:\n" +
		"group-defined-in-image:x:50000:user-defined-in-image\n"
)

// agnhostLayer contains agnhost and, besides a busybox, the programs of this
// machine that the tests call in it.
func agnhostLayer(ctx context.Context, program string) (image.Layer, error) {
	agnhost, err := image.HostFile("agnhost", program, 0o755)
	if err != nil {
		return image.Layer{}, err
	}
	certificate, err := localhost()
	if err != nil {
		return image.Layer{}, err
	}
	files := append(certificate, agnhost, image.Symlink("agnhost-2", "agnhost"), image.Dir("uploads"),
		image.Text("etc/passwd", agnhostPasswd), image.Text("etc/group", agnhostGroup))
	return hostLayer(ctx, []string{"curl", "bash"}, files...)
}

// localhost is a certificate with its key, for agnhost's servers.
func localhost() ([]image.File, error) {
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	auth, err := newAuthority(dir)
	if err != nil {
		return nil, err
	}
	if err := auth.server("localhost", []string{"127.0.0.1"}, []string{"localhost"}); err != nil {
		return nil, err
	}
	var files []image.File
	for _, name := range []string{"localhost.crt", "localhost.key"} {
		file, err := image.HostFile(name, auth.file(name), 0o644)
		if err != nil {
			return nil, err
		}
		files = append(files, file)
	}
	return files, nil
}

// hostLayer contains programs of this machine and further files.
func hostLayer(ctx context.Context, programs []string, files ...image.File) (image.Layer, error) {
	for _, name := range programs {
		more, err := hostProgram(ctx, name)
		if err != nil {
			return image.Layer{}, err
		}
		files = append(files, more...)
	}
	return image.NewLayer(distinct(files)...)
}

// distinct leaves out repeated files: not every runtime accepts a layer that
// has one twice.
func distinct(files []image.File) []image.File {
	var out []image.File
	seen := map[string]bool{}
	for _, f := range files {
		if !seen[f.Name] {
			out = append(out, f)
		}
		seen[f.Name] = true
	}
	return out
}

// hostProgram returns a program of this machine, in /usr/bin and in /bin, with
// its libraries.
func hostProgram(ctx context.Context, name string) ([]image.File, error) {
	program, err := exec.LookPath(name)
	if err != nil {
		return nil, err
	}
	needs, err := exec.CommandContext(ctx, "ldd", program).Output()
	if err != nil {
		return nil, fmt.Errorf("ldd %s: %w", program, err)
	}
	file, err := image.HostFile("usr/bin/"+name, program, 0o755)
	if err != nil {
		return nil, err
	}
	files := []image.File{file, image.Symlink("bin/"+name, "/usr/bin/"+name)}
	for _, library := range libraries(string(needs)) {
		real, err := filepath.EvalSymlinks(library)
		if err != nil {
			return nil, err
		}
		data, err := os.ReadFile(real)
		if err != nil {
			return nil, err
		}
		files = append(files, image.Regular(strings.TrimPrefix(library, "/"), 0o755, data))
	}
	return files, nil
}

// libraries returns the files that ldd names.
func libraries(ldd string) []string {
	var out []string
	for line := range strings.Lines(ldd) {
		for _, word := range strings.Fields(line) {
			if strings.HasPrefix(word, "/") {
				out = append(out, word)
			}
		}
	}
	return out
}
