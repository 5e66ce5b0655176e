package registry

import (
	"encoding/base64"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"testing"

	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/pull/pullerror"
)

func encode(text string) string { return base64.StdEncoding.EncodeToString([]byte(text)) }

func TestDecodeAuth(t *testing.T) {
	wrapped := encode("user:a long password that wraps")
	wrapped = wrapped[:10] + "\r\n" + wrapped[10:20] + "\n" + wrapped[20:]
	for _, test := range []struct{ auth, user, password string }{
		{encode("user:secret"), "user", "secret"},
		{encode("user:se:cret"), "user", "se:cret"},
		{encode("user:secret\x00\x00"), "user", "secret"},
		{encode("user:secret\n"), "user", "secret\n"},
		{encode("user:"), "user", ""},
		{encode("user:a long password that wraps") + "\n", "user", "a long password that wraps"},
		{wrapped, "user", "a long password that wraps"},
	} {
		user, password, err := decodeAuth(test.auth)
		if err != nil || user != test.user || password != test.password {
			t.Errorf("%q: %q, %q, %v", test.auth, user, password, err)
		}
	}
	for _, auth := range []string{"user:secret", encode("secret"), encode(":secret"), "%%%", encode("user:secret")[1:]} {
		if _, _, err := decodeAuth(auth); !errors.Is(err, fault.Invalid) || strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), auth) {
			t.Errorf("%q: %v", auth, err)
		}
	}
}

func TestCredentialsFor(t *testing.T) {
	name, err := reference.ParseNormalizedNamed("registry.example:5000/a/b:1")
	if err != nil {
		t.Fatal(err)
	}
	hub, err := reference.ParseNormalizedNamed("busybox")
	if err != nil {
		t.Fatal(err)
	}
	userPassword := &Credentials{config: types.DockerAuthConfig{Username: "u", Password: "p"}}
	for _, test := range []struct {
		what string
		auth *cri.AuthConfig
		name reference.Named
		want *Credentials
	}{
		{"none", nil, name, nil},
		{"empty", &cri.AuthConfig{}, name, nil},
		{"only a server", &cri.AuthConfig{ServerAddress: "registry.example:5000"}, name, nil},
		{"user and password", &cri.AuthConfig{Username: "u", Password: "p"}, name, userPassword},
		{"base64", &cri.AuthConfig{Auth: encode("u:p")}, name, userPassword},
		{"user goes before base64", &cri.AuthConfig{Username: "u", Password: "p", Auth: encode("x:y")}, name, userPassword},
		{"identity token", &cri.AuthConfig{IdentityToken: "i"}, name, &Credentials{config: types.DockerAuthConfig{IdentityToken: "i"}}},
		{"registry token", &cri.AuthConfig{RegistryToken: "r"}, name, &Credentials{registry: "r"}},
		{"same server", &cri.AuthConfig{Username: "u", Password: "p", ServerAddress: "registry.example:5000"}, name, userPassword},
		{"same server as URL", &cri.AuthConfig{Username: "u", Password: "p", ServerAddress: "https://Registry.example:5000/v2/"}, name, userPassword},
		{"other port", &cri.AuthConfig{Username: "u", Password: "p", ServerAddress: "registry.example:5001"}, name, nil},
		{"other host", &cri.AuthConfig{Username: "u", Password: "p", ServerAddress: "other.example:5000"}, name, nil},
		{"host within host", &cri.AuthConfig{Username: "u", Password: "p", ServerAddress: "example:5000"}, name, nil},
		{"nonsense", &cri.AuthConfig{Username: "u", Password: "p", ServerAddress: "::::"}, name, nil},
		{"user in the address", &cri.AuthConfig{Username: "u", Password: "p", ServerAddress: "https://registry.example:5000@evil.example"}, name, nil},
		{"Docker Hub by its old name", &cri.AuthConfig{Username: "u", Password: "p", ServerAddress: "https://index.docker.io/v1/"}, hub, userPassword},
		{"Docker Hub for another", &cri.AuthConfig{Username: "u", Password: "p", ServerAddress: "https://index.docker.io/v1/"}, name, nil},
	} {
		got, err := CredentialsFor(test.auth, test.name)
		if err != nil || (got == nil) != (test.want == nil) || got != nil && *got != *test.want {
			t.Errorf("%s: %+v, %v; want %+v", test.what, got, err, test.want)
		}
	}
	if _, err := CredentialsFor(&cri.AuthConfig{Auth: "nonsense"}, name); !errors.Is(err, fault.Invalid) {
		t.Errorf("bad base64: %v", err)
	}
}

// Credentials decode to what was encoded, and refused ones do not appear in the error.
func FuzzDecodeAuth(f *testing.F) {
	for _, auth := range []string{"dXNlcjpwYXNzd29yZA==", "dXNlcg==", "OnBhc3N3b3Jk", "dTpw\r\n", "====", "\xff\xfe longer than a few bytes"} {
		f.Add(auth, "user", "pass:word\x00\n")
	}
	f.Fuzz(func(t *testing.T, auth, user, password string) {
		if _, _, err := decodeAuth(auth); err != nil && (!errors.Is(err, fault.Invalid) || len(auth) > 40 && strings.Contains(err.Error(), auth)) {
			t.Errorf("%q: %v", auth, err)
		}
		if user == "" || strings.Contains(user, ":") {
			return
		}
		gotUser, gotPassword, err := decodeAuth(encode(user + ":" + password))
		if err != nil || gotUser != user || gotPassword != strings.Trim(password, "\x00") {
			t.Errorf("%q and %q became %q and %q, %v", user, password, gotUser, gotPassword, err)
		}
	})
}

// Credentials go to the registry whose name or URL comes with them, and to no
// other one.
func FuzzServerAddress(f *testing.F) {
	for _, address := range []string{
		"", "registry.example:5000", "https://Registry.example:5000/v2/", "index.docker.io:443", "https://registry-1.docker.io:443/v1/",
		"https://registry.example:5000@evil.example", "[::1]:443", "://", "\xff",
	} {
		f.Add(address, "registry.example:5000/app")
		f.Add(address, "busybox")
		f.Add(address, "index.docker.io:443/library/app")
	}
	f.Fuzz(func(t *testing.T, address, name string) {
		named, err := reference.ParseNormalizedNamed(name)
		if err != nil {
			return
		}
		registry := reference.Domain(named)
		for _, own := range []string{registry, "https://" + registry, "HTTPS://" + strings.ToUpper(registry) + "/v2/"} {
			if !serves(own, registry) {
				t.Errorf("%q does not serve %q", own, registry)
			}
		}
		if host := canonicalHost(registry); canonicalHost(host) != host {
			t.Errorf("%q is %q, and that %q", registry, host, canonicalHost(host))
		}
		if address == "" || !serves(address, registry) {
			return
		}
		if !strings.Contains(address, "://") {
			address = "https://" + address
		}
		if u, err := url.Parse(address); err != nil || canonicalHost(u.Host) != canonicalHost(registry) {
			t.Errorf("credentials of %q go to %q", address, registry)
		}
	})
}

// maxErrorText is the most that is shown of an error, in bytes.
const maxErrorText = 4096

func TestPullErrorShowsNoSecret(t *testing.T) {
	auth := &cri.AuthConfig{Username: "joe", Password: "hunter2", IdentityToken: "identity-token", RegistryToken: "registry-token"}
	basic := encode("joe:hunter2")
	inner := fmt.Errorf(`Get "https://joe:hunter2@cdn.example/blob?X-Amz-Signature=deadbeef&token=abc#frag": body %q said "Authorization: Basic %s"; Bearer eyJhbGciOiJSUzI1NiJ9.x.y; refresh_token=identity-token; registry-token`,
		"\x1b[31mred\x00\xff", basic)
	name, err := reference.ParseNormalizedNamed("registry.example/a:1")
	if err != nil {
		t.Fatal(err)
	}
	failed := func(auth *cri.AuthConfig, err error) error {
		return pullerror.New(pullerror.Failed{Name: name, Secrets: Secrets(auth)}, err)
	}
	err = failed(auth, inner)
	for _, secret := range []string{"hunter2", "deadbeef", "abc#", "identity-token", "registry-token", basic, "eyJhbGciOiJSUzI1NiJ9", "\x1b", "\x00", "\xff"} {
		if strings.Contains(err.Error(), secret) {
			t.Errorf("%q is in %q", secret, err)
		}
	}
	for _, kept := range []string{"pull registry.example/a:1", "https://cdn.example/blob?<redacted>"} {
		if !strings.Contains(err.Error(), kept) {
			t.Errorf("%q is not in %q", kept, err)
		}
	}
	if errors.Is(err, inner) {
		t.Error("the original error, with its secrets, is still wrapped")
	}
	base64Form := &cri.AuthConfig{Auth: encode("joe:correct horse")}
	err = failed(base64Form, fmt.Errorf("no: %s: correct horse", base64Form.Auth))
	if strings.Contains(err.Error(), "horse") || strings.Contains(err.Error(), base64Form.Auth) {
		t.Errorf("%q", err)
	}
	across := failed(auth, errors.New(strings.Repeat("x", maxErrorText-6)+"hunter2"))
	if strings.Contains(across.Error(), "hunter") {
		t.Error("what was cut from a text has left a part of a secret")
	}
	long := failed(nil, errors.New(strings.Repeat("x", 1<<20)))
	if len(long.Error()) > 2*maxErrorText {
		t.Errorf("error text of %d bytes", len(long.Error()))
	}
}
