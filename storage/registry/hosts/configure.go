package hosts

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.podman.io/image/v5/types"
)

// certDirs are the other directories with certificates of registries.
var certDirs = []string{"/etc/containers/certs.d", "/etc/docker/certs.d"}

// Configure makes sys follow r instead of registries.conf. It writes the files for the library to
// dir, an empty directory that must stay as long as sys is used.
func (r *Registry) Configure(sys *types.SystemContext, dir string) error {
	var conf strings.Builder
	fmt.Fprintf(&conf, "[[registry]]\nprefix = %q\nlocation = %q\ninsecure = %t\nnamespace-proxy = %q\n",
		r.Name, r.Server.Location, r.Server.Insecure, r.Server.namespace(r.Name))
	for _, m := range r.Mirrors {
		use := "all"
		if m.DigestOnly {
			use = "digest-only"
		}
		fmt.Fprintf(&conf, "[[registry.mirror]]\nlocation = %q\ninsecure = %t\npull-from-mirror = %q\nnamespace-proxy = %q\n",
			m.Location, m.Insecure, use, m.namespace(r.Name))
	}
	sys.SystemRegistriesConfPath = filepath.Join(dir, "registries.conf")
	sys.SystemRegistriesConfDirPath = filepath.Join(dir, "registries.conf.d") // does not exist
	err := os.WriteFile(sys.SystemRegistriesConfPath, []byte(conf.String()), 0o600)
	endpoints := append([]Endpoint{r.Server}, r.Mirrors...)
	if err != nil || !slices.ContainsFunc(endpoints, Endpoint.hasCertificates) {
		return err
	}
	sys.DockerPerHostCertDirPath = filepath.Join(dir, "certs.d")
	for _, e := range endpoints {
		if err := e.linkCertificates(sys.DockerPerHostCertDirPath); err != nil {
			return err
		}
	}
	return nil
}

// namespace returns the registry that requests to the endpoint must name, because the endpoint may
// stand for several (the parameter ns of the distribution specification's "registry proxying"). As
// in containerd it is empty if the endpoint is the registry itself.
func (e Endpoint) namespace(registry string) string {
	host, _, _ := strings.Cut(e.Location, "/")
	if host == registry || host == dockerHost && registry == dockerHub {
		return ""
	}
	return registry
}

func (e Endpoint) hasCertificates() bool { return len(e.CAs)+len(e.Clients) > 0 }

// linkCertificates gives the library the endpoint's certificates, or else those that are installed
// for its host.
func (e Endpoint) linkCertificates(dir string) error {
	host, _, _ := strings.Cut(e.Location, "/")
	own := filepath.Join(dir, host)
	if !e.hasCertificates() {
		for _, installed := range certDirs {
			if _, err := os.Stat(filepath.Join(installed, host)); err == nil {
				err := errors.Join(os.MkdirAll(dir, 0o700), os.Symlink(filepath.Join(installed, host), own))
				if errors.Is(err, fs.ErrExist) {
					return nil // another endpoint of the host
				}
				return err
			}
		}
		return nil
	}
	if err := os.MkdirAll(own, 0o700); err != nil {
		return err
	}
	links := map[string]string{}
	for i, file := range e.CAs {
		links[fmt.Sprintf("%d.crt", i)] = file
	}
	for i, pair := range e.Clients {
		links[fmt.Sprintf("%d.cert", i)], links[fmt.Sprintf("%d.key", i)] = pair[0], pair[1]
	}
	for name, file := range links {
		if err := os.Symlink(file, filepath.Join(own, name)); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return nil
}
