// Package distribution runs CNCF Distribution's registry, which most registries are built on or
// behave like, for the length of a test.
package distribution

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"log"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/opencontainers/go-digest"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/tools"
)

// Username is who may pull from a registry with credentials.
const Username = "joe"

// Password is that of Username.
const Password = "hunter22"

// htpasswd has the hash of Password: the registry knows bcrypt alone.
const htpasswd = Username + ":$2b$04$abcdefghijklmnopqrstuunBMgByaIAZYuFgMUjBx8aaeU/9We5xa\n"

// Section is a section of the registry's configuration.
type Section map[string]any

// Registry is a running registry.
type Registry struct {
	Address string // 127.0.0.1:PORT

	t   testing.TB
	dir string
}

// Htpasswd returns the section auth for Basic authentication.
func Htpasswd(t testing.TB) Section {
	t.Helper()
	file := filepath.Join(t.TempDir(), "htpasswd")
	write(t, file, []byte(htpasswd))
	return Section{"htpasswd": Section{"realm": "test", "path": file}}
}

// Start runs a registry until the test ends. change may add sections to its configuration.
func Start(t testing.TB, change func(config Section)) *Registry {
	t.Helper()
	program, err := tools.Distribution(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	r := &Registry{t: t, dir: t.TempDir()}
	config := Section{
		"version": 0.1,
		"log":     Section{"level": "info", "accesslog": Section{"disabled": true}},
		"storage": Section{"filesystem": Section{"rootdirectory": filepath.Join(r.dir, "root")}, "delete": Section{"enabled": true}},
		"http":    Section{"addr": "127.0.0.1:0", "secret": "of this test"},
	}
	if change != nil {
		change(config)
	}
	text, err := json.Marshal(config) // YAML knows JSON
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(r.dir, "config.yml")
	write(t, file, text)
	r.run(exec.Command(program, "serve", file))
	return r
}

// listening is what the registry says when it is ready; it chooses a free port by itself.
var listening = regexp.MustCompile(`listening on (127\.0\.0\.1:[0-9]+)`)

// run starts the registry and returns when it listens.
func (r *Registry) run(cmd *exec.Cmd) {
	r.t.Helper()
	cmd.Env = append(os.Environ(), "OTEL_TRACES_EXPORTER=none")
	said, err := cmd.StderrPipe()
	if err != nil {
		r.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	var log strings.Builder
	var read sync.WaitGroup
	r.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		read.Wait() // before Wait, which closes the pipe
		_ = cmd.Wait()
		if r.t.Failed() {
			r.t.Logf("the registry said:\n%s", log.String())
		}
	})
	address := make(chan string, 1)
	read.Go(func() {
		defer close(address)
		lines := bufio.NewScanner(said)
		for lines.Scan() {
			log.WriteString(lines.Text() + "\n")
			if found := listening.FindStringSubmatch(lines.Text()); found != nil && len(address) == 0 {
				address <- found[1]
			}
		}
	})
	if r.Address = <-address; r.Address == "" {
		r.t.Fatal("the registry has ended")
	}
}

// Push stores an image or index, and everything below it, where the registry keeps it.
func (r *Registry) Push(repo, tag string, a *image.Artifact) {
	r.t.Helper()
	r.store(repo, "_manifests/revisions", a.Digest(), a.Manifest)
	for d, content := range a.Blobs {
		r.store(repo, "_layers", d, content)
	}
	for _, child := range a.Children {
		r.Push(repo, "", child)
	}
	if tag != "" {
		link := []byte(a.Digest().String())
		tags := filepath.Join(r.repository(repo), "_manifests/tags", tag)
		write(r.t, filepath.Join(tags, "current/link"), link)
		write(r.t, filepath.Join(tags, "index", a.Digest().Algorithm().String(), a.Digest().Encoded(), "link"), link)
	}
}

// Lose removes the content of a blob or manifest, as garbage collection does.
func (r *Registry) Lose(d digest.Digest) {
	r.t.Helper()
	if err := os.Remove(r.data(d)); err != nil {
		r.t.Fatal(err)
	}
}

func (r *Registry) repository(repo string) string {
	return filepath.Join(r.dir, "root/docker/registry/v2/repositories", repo)
}

func (r *Registry) data(d digest.Digest) string {
	return filepath.Join(r.dir, "root/docker/registry/v2/blobs", d.Algorithm().String(), d.Encoded()[:2], d.Encoded(), "data")
}

// store writes a blob, and a link to it in the repository.
func (r *Registry) store(repo, kind string, d digest.Digest, content []byte) {
	r.t.Helper()
	write(r.t, r.data(d), content)
	write(r.t, filepath.Join(r.repository(repo), kind, d.Algorithm().String(), d.Encoded(), "link"), []byte(d.String()))
}

// Front serves the registry on another address, with faults.
func (r *Registry) Front() *registry.Registry {
	r.t.Helper()
	transport := &http.Transport{}
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: r.Address})
	proxy.Transport = transport
	proxy.ErrorLog = log.New(io.Discard, "", 0)
	front := registry.Before(proxy)
	if err := front.Listen("127.0.0.1:0"); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		front.Close()
		transport.CloseIdleConnections()
	})
	return front
}

// write writes a file and the directories above it.
func write(t testing.TB, file string, content []byte) {
	t.Helper()
	err := os.MkdirAll(filepath.Dir(file), 0o755)
	if err == nil {
		err = os.WriteFile(file, bytes.Clone(content), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}
