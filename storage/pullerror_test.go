package storage

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/docker/distribution/registry/api/errcode"
	registryv2 "github.com/docker/distribution/registry/api/v2"
	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/signature"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

func TestPullErrorKinds(t *testing.T) {
	status := func(code int) error { return docker.UnexpectedHTTPStatusError{StatusCode: code} }
	for _, test := range []struct {
		err  error
		want []error
	}{
		{errors.New("something"), nil},
		{context.Canceled, []error{context.Canceled}},
		{fmt.Errorf("%w: %w", fault.Timeout, errStalled), []error{fault.Timeout}},
		{signature.PolicyRequirementError("no"), []error{fault.Denied, ErrSignature}},
		{fmt.Errorf("%w: %w: x", ErrSignature, fault.Precondition), []error{fault.Precondition, ErrSignature}},
		{docker.ErrUnauthorizedForCredentials{Err: errors.New("no")}, []error{fault.Unauthenticated}},
		{errcode.ErrorCodeUnauthorized.WithMessage("no"), []error{fault.Unauthenticated}},
		{errcode.ErrorCodeDenied, []error{fault.Denied}},
		{errcode.ErrorCodeTooManyRequests, []error{fault.Unavailable}},
		{registryv2.ErrorCodeManifestUnknown.WithDetail("x"), []error{fault.NotFound}},
		{registryv2.ErrorCodeNameUnknown, []error{fault.NotFound}},
		{registryv2.ErrorCodeBlobUnknown, []error{fault.NotFound}},
		{docker.ErrTooManyRequests, []error{fault.Unavailable}},
		{status(404), []error{fault.NotFound}},
		{status(401), []error{fault.Unauthenticated}},
		{status(403), []error{fault.Denied}},
		{status(502), []error{fault.Unavailable}},
		{status(418), nil},
		{&url.Error{Op: "Get", URL: "https://a", Err: x509.UnknownAuthorityError{}}, []error{fault.Unavailable}},
		{&net.OpError{Op: "dial", Err: os.NewSyscallError("connect", unix.ECONNREFUSED)}, []error{fault.Unavailable}},
		{&os.PathError{Op: "write", Path: "/x", Err: unix.ENOSPC}, []error{fault.Exhausted}},
	} {
		got := kinds(fmt.Errorf("some step: %w", test.err))
		if !slices.Equal(got, test.want) {
			t.Errorf("%T %v: %v, want %v", test.err, test.err, got, test.want)
		}
	}
}

func TestPullErrorShowsNoSecret(t *testing.T) {
	auth := &cri.AuthConfig{Username: "joe", Password: "hunter2", IdentityToken: "identity-token", RegistryToken: "registry-token"}
	basic := encode("joe:hunter2")
	inner := fmt.Errorf(`Get "https://joe:hunter2@cdn.example/blob?X-Amz-Signature=deadbeef&token=abc#frag": body %q said "Authorization: Basic %s"; Bearer eyJhbGciOiJSUzI1NiJ9.x.y; refresh_token=identity-token; registry-token`,
		"\x1b[31mred\x00\xff", basic)
	err := newPullError("registry.example/a:1", inner, secrets(auth))
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
	err = newPullError("a", fmt.Errorf("no: %s: correct horse", base64Form.Auth), secrets(base64Form))
	if strings.Contains(err.Error(), "horse") || strings.Contains(err.Error(), base64Form.Auth) {
		t.Errorf("%q", err)
	}
	across := newPullError("a", errors.New(strings.Repeat("x", maxErrorText-6)+"hunter2"), secrets(auth))
	if strings.Contains(across.Error(), "hunter") {
		t.Error("what was cut from a text has left a part of a secret")
	}
	long := newPullError("a", errors.New(strings.Repeat("x", 1<<20)), nil)
	if len(long.Error()) > 2*maxErrorText {
		t.Errorf("error text of %d bytes", len(long.Error()))
	}
}

func FuzzRedact(f *testing.F) {
	f.Add("Get \"https://u:p@h/x?y=z\": Basic dXNlcjpwYXNz", "p4ssw0rd")
	f.Fuzz(func(t *testing.T, text, password string) {
		if len(password) < 8 || strings.ContainsAny(password, " \t\n\"'<>@/?#:%") {
			return
		}
		raw := (&url.URL{Scheme: "https", User: url.UserPassword("u", password), Host: "h", Path: "/p", RawQuery: "t=" + url.QueryEscape(password)}).String()
		got := redact("error: " + raw + " " + strings.ReplaceAll(text, password, ""))
		if strings.Contains(got, password) && !strings.Contains(strings.ReplaceAll(text, password, ""), password) && !strings.Contains("error: https://h/p?<redacted> ", password) {
			t.Errorf("%q shows %q", got, password)
		}
		if cut(got) != got && len(cut(got)) > 2*maxErrorText {
			t.Errorf("%d bytes", len(cut(got)))
		}
	})
}
