// Package hosts reads containerd's hosts.toml files, which name mirrors for each registry, and how
// to reach them. It translates them into the configuration of containers/image.
package hosts

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/BurntSushi/toml"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/regular"
)

const maxFile = 1 << 20 // bytes

// The registry of names without a registry, and its host.
const dockerHub, dockerHost = "docker.io", "registry-1.docker.io"

// Registry is the content of a file about one registry.
type Registry struct {
	Name    string // with port, as in image names
	Server  Endpoint
	Mirrors []Endpoint // in this order
}

// Endpoint is one host that may serve a registry's images.
type Endpoint struct {
	Location   string // HOST[:PORT][/PATH], as in registries.conf
	Insecure   bool   // plain HTTP, or no verification of certificates
	DigestOnly bool   // not for tags
	CAs        []string
	Clients    [][2]string // files of certificate and key
}

// Read returns the configuration of the registry in the first of dirs that has one for it, or else
// in the directory _default of one of them; nil if there is none. The error is fault.Precondition.
func Read(dirs []string, registry string) (*Registry, error) {
	for _, dir := range dirs {
		// In names of directories containerd also accepts a port between underscores.
		host, port, _ := strings.Cut(registry, ":")
		for _, name := range slices.Compact([]string{registry, strings.TrimSuffix(host+"_"+port+"_", "__"), "_default"}) {
			file := filepath.Join(dir, name, "hosts.toml")
			text, err := regular.Read(file, maxFile)
			if errors.Is(err, fs.ErrNotExist) {
				r, err := certificatesIn(registry, filepath.Dir(file))
				if r != nil || err != nil {
					return r, err
				}
				continue
			}
			var r *Registry
			if err == nil {
				r, err = parse(registry, string(text), filepath.Dir(file))
			}
			if err != nil {
				return nil, fmt.Errorf("%s: %s: %w", file, err.Error(), fault.Precondition)
			}
			return r, nil
		}
	}
	return nil, nil //nolint:nilnil // see above
}

// Check reads the files of all registries in dirs and returns what is wrong with them: pulls from
// these registries fail.
func Check(dirs []string) (wrong []error) {
	for _, dir := range dirs {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			wrong = append(wrong, err)
		}
		for _, entry := range entries {
			registry := entry.Name()
			if host, port, ok := strings.Cut(strings.TrimSuffix(registry, "_"), "_"); ok && host != "" {
				registry = host + ":" + port
			}
			if _, err := Read([]string{dir}, registry); err != nil {
				wrong = append(wrong, err)
			}
		}
	}
	return wrong
}

// certificatesIn returns the configuration of a registry whose directory has certificates and no
// hosts.toml, in Docker's pattern: *.crt are authorities, *.cert and *.key belong together. It is nil if
// there are none.
func certificatesIn(registry, dir string) (*Registry, error) {
	if filepath.Base(dir) == "_default" { // whose certificates would be sent to any registry
		return nil, nil //nolint:nilnil // see above
	}
	r := &Registry{Name: registry, Server: Endpoint{Location: registry}}
	var err error
	if r.Server.CAs, err = filepath.Glob(filepath.Join(dir, "*.crt")); err != nil {
		return nil, fmt.Errorf("%s: %w: %w", dir, err, fault.Precondition)
	}
	certificates, err := filepath.Glob(filepath.Join(dir, "*.cert"))
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %w", dir, err, fault.Precondition)
	}
	for _, certificate := range certificates {
		r.Server.Clients = append(r.Server.Clients, [2]string{certificate, strings.TrimSuffix(certificate, ".cert") + ".key"})
	}
	if !r.Server.hasCertificates() {
		return nil, nil //nolint:nilnil // see above
	}
	return r, nil
}

// section is the table of a host, or the top of the file, which describes the server.
type section struct {
	Server       string             `toml:"server"`
	Capabilities []string           `toml:"capabilities"`
	CA           any                `toml:"ca"`
	Client       any                `toml:"client"`
	SkipVerify   *bool              `toml:"skip_verify"`
	Header       map[string]any     `toml:"header"`
	OverridePath bool               `toml:"override_path"`
	Hosts        map[string]section `toml:"host"`
}

func parse(registry, text, dir string) (*Registry, error) {
	var top section
	meta, err := toml.Decode(text, &top)
	if err != nil {
		return nil, err
	}
	server := top.Server
	if server == "" {
		server = "https://" + registry
	}
	r := &Registry{Name: registry}
	if r.Server, err = top.endpoint(server, dir); err != nil {
		return nil, fmt.Errorf("server: %w", err)
	}
	if r.Server.Location == dockerHost && registry == dockerHub {
		r.Server.Location = registry // the library's name for it
	}
	var seen []string
	for _, key := range meta.Keys() { // their order counts
		if len(key) < 2 || key[0] != "host" || slices.Contains(seen, key[1]) {
			continue
		}
		seen = append(seen, key[1])
		host := top.Hosts[key[1]]
		can := func(what string) bool { return len(host.Capabilities) == 0 || slices.Contains(host.Capabilities, what) }
		if !can("pull") {
			continue
		}
		mirror, err := host.endpoint(key[1], dir)
		if err != nil {
			return nil, fmt.Errorf("host %q: %w", key[1], err)
		}
		if strings.HasPrefix(mirror.Location, "[") { // the library would refuse every pull
			slog.Warn("mirror left out: an IPv6 address cannot be a registry, use a name", "registry", registry, "mirror", key[1])
			continue
		}
		mirror.DigestOnly = !can("resolve")
		r.Mirrors = append(r.Mirrors, mirror)
	}
	return r, nil
}

func (s section) endpoint(address, dir string) (e Endpoint, err error) {
	if !strings.Contains(address, "://") {
		address = "https://" + address
	}
	u, err := url.Parse(address)
	if err != nil {
		return e, err
	}
	if u.Host == "" || u.Scheme != "https" && u.Scheme != "http" {
		return e, fmt.Errorf("%q is not the address of an HTTP server", address)
	}
	if len(s.Header) > 0 {
		return e, errors.New("header is not supported: crius sends no headers of yours to registries; give credentials to image.auth_file, or remove the table")
	}
	below, found := strings.CutPrefix(strings.TrimSuffix(u.Path, "/"), "/v2")
	if u.Path == "" || u.Path == "/" {
		below, found = "", true
	}
	if !found || below != "" && (!s.OverridePath || below[0] != '/') {
		return e, fmt.Errorf("path %q is not supported: it must be /v2, or begin with /v2/ and have override_path = true", u.Path)
	}
	e.Location = u.Host + below
	e.Insecure = u.Scheme == "http" || s.SkipVerify != nil && *s.SkipVerify
	if e.CAs, err = texts(s.CA, dir); err != nil {
		return e, fmt.Errorf("ca: %w", err)
	}
	if e.Clients, err = pairs(s.Client, dir); err != nil {
		return e, fmt.Errorf("client: %w", err)
	}
	return e, nil
}

// texts reads a path or a list of paths, relative to the file or absolute.
func texts(value any, dir string) (paths []string, err error) {
	list, ok := value.([]any)
	if !ok && value != nil {
		list = []any{value}
	}
	for _, item := range list {
		path, ok := item.(string)
		if !ok {
			return nil, fmt.Errorf("must be a path or a list of paths, got %v", item)
		}
		if !filepath.IsAbs(path) {
			path = filepath.Join(dir, path)
		}
		paths = append(paths, path)
	}
	return paths, nil
}

// pairs reads files with certificate and key in one, or pairs of files.
func pairs(value any, dir string) (all [][2]string, err error) {
	list, ok := value.([]any)
	if !ok && value != nil {
		list = []any{value}
	}
	for _, item := range list {
		files, err := texts(item, dir)
		if err != nil {
			return nil, err
		}
		switch len(files) {
		case 1:
			all = append(all, [2]string{files[0], files[0]})
		case 2:
			all = append(all, [2]string{files[0], files[1]})
		default:
			return nil, fmt.Errorf("must be a file or a pair of certificate and key, got %v", item)
		}
	}
	return all, nil
}
