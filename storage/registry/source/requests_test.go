package source

import (
	"crypto/tls"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/docker/reference"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/pull/pullerror"
	"github.com/crius-run/crius/storage/registry/trust"
	"github.com/crius-run/crius/test/kit/distribution"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/registry/registrytest"
)

// Signatures come from where registries.d says, also by plain HTTP, and that host is not blamed for what the
// registry lacks.
func TestSignaturesByPlainHTTP_podman_16695(t *testing.T) {
	t.Parallel()
	a := small(t)
	r, signatures := registry.New(), registrytest.Start(t)
	r.Push("app", "1", a)
	authority := distribution.NewAuthority(t)
	pair, err := tls.LoadX509KeyPair(authority.Issue())
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(r)
	server.TLS = &tls.Config{Certificates: []tls.Certificate{pair}}
	server.StartTLS()
	t.Cleanup(server.Close)
	address := server.Listener.Addr().String()
	m := newMachine(t, "", "default-docker: {lookaside: 'http://"+signatures.Addr()+"/sigs'}")
	ca, err := os.ReadFile(authority.File)
	if err != nil {
		t.Fatal(err)
	}
	m.write("certs.d/"+address+"/ca.crt", string(ca))
	policy, err := trust.NewPolicies(filepath.Join(m.dir, "policy.json"), "").For("")
	if err != nil {
		t.Fatal(err)
	}
	name, err := reference.ParseNormalizedNamed(address + "/app:1")
	if err != nil {
		t.Fatal(err)
	}
	open := func() error {
		sys := m.context()
		sys.DockerPerHostCertDirPath = filepath.Join(m.dir, "certs.d")
		img, err := Open(t.Context(), sys, policy, name, func(digest.Digest) []byte { return nil }, t.TempDir(), func(string) bool { return false })
		if err == nil {
			return img.Close()
		}
		return pullerror.New(pullerror.Failed{Name: name}, err)
	}
	if err := open(); err != nil {
		t.Error(err)
	}
	if asked := signatures.Requests(); len(asked) == 0 || !strings.HasPrefix(asked[0].Path, "/sigs/") {
		t.Errorf("signatures were asked for by %+v", asked)
	}
	signatures.Inject(registry.Fault{Times: 1, Do: registry.Page(http.StatusOK)})
	if err := open(); !errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "look at what answers where registries.d says that signatures are") || strings.Contains(err.Error(), "node reaches") {
		t.Errorf("a page in the place of a signature: %v", err)
	}
	r.Inject(registry.Fault{Path: "/blobs/", Do: registry.Page(http.StatusNotFound)})
	if err := open(); err == nil || !strings.Contains(err.Error(), address+" has the image's manifest, and not all that it names") {
		t.Errorf("without the config: %v", err)
	}
}
