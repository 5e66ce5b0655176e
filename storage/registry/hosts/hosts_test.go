package hosts

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"go.podman.io/image/v5/pkg/sysregistriesv2"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
)

func write(t *testing.T, dir, name, text string) {
	t.Helper()
	file := filepath.Join(dir, name, "hosts.toml")
	if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), 0o600)); err != nil {
		t.Fatal(err)
	}
}

func TestRead(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		registry, text string
		want           Registry
	}{
		"mirrors in their order, and what they can": {"docker.io", `
server = "https://registry-1.docker.io"
[host."http://10.0.0.1:30020"]
capabilities = ["pull", "resolve"]
[host."https://a.example/v2"]
capabilities = ["pull"]
[host."https://z.example/v2/hub/"]
override_path = true
skip_verify = true
[host."https://push.example"]
capabilities = ["push"]
[host."b.example:5000"]
`, Registry{Name: "docker.io", Server: Endpoint{Location: "docker.io"}, Mirrors: []Endpoint{
			{Location: "10.0.0.1:30020", Insecure: true},
			{Location: "a.example", DigestOnly: true},
			{Location: "z.example/hub", Insecure: true},
			{Location: "b.example:5000"},
		}}},
		"certificates": {"r.example", `
ca = "ca.crt"
client = "both.pem"
[host."https://m.example"]
ca = ["/etc/a.crt", "b.crt"]
client = [["/etc/c.cert", "c.key"], ["/etc/d.pem"]]
`, Registry{Name: "r.example", Server: Endpoint{Location: "r.example", CAs: []string{"DIR/ca.crt"}, Clients: [][2]string{{"DIR/both.pem", "DIR/both.pem"}}},
			Mirrors: []Endpoint{{Location: "m.example", CAs: []string{"/etc/a.crt", "DIR/b.crt"},
				Clients: [][2]string{{"/etc/c.cert", "DIR/c.key"}, {"/etc/d.pem", "/etc/d.pem"}}}}}},
		"another server": {"r.example", `server = "http://other.example:81"`, Registry{Name: "r.example", Server: Endpoint{Location: "other.example:81", Insecure: true}}},
		"nothing":        {"r.example", ``, Registry{Name: "r.example", Server: Endpoint{Location: "r.example"}}},
	} {
		r, err := parse(test.registry, test.text, "DIR")
		if err != nil || !reflect.DeepEqual(*r, test.want) {
			t.Errorf("%s: %+v, %v; want %+v", name, r, err, test.want)
		}
	}
}

func TestReadRefuses(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"no TOML":            "server",
		"another type":       "server = 7",
		"header":             "[host.'https://m'.header]\nx = 'y'",
		"path":               "[host.'https://m/prefix']",
		"path below v2":      "[host.'https://m/v2/prefix']",
		"path like v2":       "[host.'https://m/v22']\noverride_path = true",
		"scheme":             "server = 'ftp://m'",
		"no host":            "server = 'https:///v2'",
		"a number for a CA":  "ca = [7]",
		"three client files": "client = [['a', 'b', 'c']]",
	} {
		write(t, dir, "r.example", text)
		if _, err := Read([]string{dir}, "r.example"); !errors.Is(err, fault.Precondition) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestReadFindsTheFile(t *testing.T) {
	t.Parallel()
	first, second := t.TempDir(), t.TempDir()
	server := func(registry string) string {
		t.Helper()
		r, err := Read([]string{filepath.Join(first, "none"), first, second}, registry)
		if err != nil {
			t.Fatal(err)
		}
		if r == nil {
			return ""
		}
		return r.Server.Location
	}
	if got := server("r.example:5000"); got != "" {
		t.Errorf("without files: %q", got)
	}
	for _, step := range []struct{ dir, name, want string }{
		{second, "_default", "default"},
		{second, "r.example_5000_", "underscores"},
		{second, "r.example:5000", "plain"},
		{first, "_default", "first"},
	} {
		write(t, step.dir, step.name, "server = 'https://"+step.want+"'")
		if got := server("r.example:5000"); got != step.want {
			t.Errorf("with %s: %q, want %q", step.name, got, step.want)
		}
	}
}

// Requests to a host name the registry for which it stands, unless it is that registry (as in
// containerd's hosts.md).
func TestNamespace(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ location, registry, want string }{
		{"mirror.example", "r.example", "r.example"},
		{"mirror.example:5000/hub", "docker.io", "docker.io"},
		{"r.example", "r.example:5000", "r.example:5000"},
		{"r.example:5000", "r.example:5000", ""},
		{"r.example/below", "r.example", ""},
		{"docker.io", "docker.io", ""},
		{"registry-1.docker.io", "docker.io", ""},
		{"registry-1.docker.io", "r.example", "r.example"},
		{"mirror.gcr.io", "docker.io", "docker.io"},
		{"r.example", "r.example.com", "r.example.com"},
	} {
		if got := (Endpoint{Location: c.location}).namespace(c.registry); got != c.want {
			t.Errorf("%s for %s: %q, want %q", c.location, c.registry, got, c.want)
		}
	}
}

// The library reads the files as they were meant.
func FuzzConfigure(f *testing.F) {
	f.Add(`server = "https://s:1"` + "\n[host.'http://m']\ncapabilities = ['pull']\n[host.'https://n/v2/x']\noverride_path = true\nca = 'c'")
	f.Fuzz(func(t *testing.T, text string) {
		r, err := parse("r.example:5000", text, "/etc/x")
		if err != nil {
			return
		}
		sys := &types.SystemContext{}
		if err := r.Configure(sys, t.TempDir()); err != nil {
			return // a host with a name that is too long
		}
		sysregistriesv2.InvalidateCache()
		found, err := sysregistriesv2.FindRegistry(sys, "r.example:5000/app")
		if err != nil {
			return // which the library refuses, and the pull with it
		}
		if found == nil || len(found.Mirrors) != len(r.Mirrors) {
			t.Fatalf("%+v became %+v", r, found)
		}
		for i, e := range append(found.Mirrors, found.Endpoint) {
			host, _, _ := strings.Cut(append(r.Mirrors, r.Server)[i].Location, "/")
			if own := host == r.Name; (e.NamespaceProxy == "") != own || !own && e.NamespaceProxy != r.Name {
				t.Errorf("%+v has the namespace %q", e, e.NamespaceProxy)
			}
		}
	})
}

// Certificates in the directory of a registry count without a hosts.toml, also before _default. A mirror
// by its IPv6 address is left out alone.
func TestReadCertificatesAlone(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "_default", "[host.\"https://m.test\"]\n[host.\"http://[::1]:5000\"]\n")
	for _, name := range []string{"ca.crt", "client.cert", "client.key", "other.txt"} {
		file := filepath.Join(dir, "r.test:5000", name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	own := filepath.Join(dir, "r.test:5000")
	got, err := Read([]string{dir}, "r.test:5000")
	want := &Registry{Name: "r.test:5000", Server: Endpoint{
		Location: "r.test:5000", CAs: []string{own + "/ca.crt"}, Clients: [][2]string{{own + "/client.cert", own + "/client.key"}},
	}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	if got, err = Read([]string{dir}, "other.test"); err != nil || len(got.Mirrors) != 1 || got.Mirrors[0].Location != "m.test" {
		t.Errorf("others: %+v, %v", got, err)
	}
}
