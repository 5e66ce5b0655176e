package pullerror

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

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/registry/trust"
)

func TestKinds(t *testing.T) {
	status := func(code int) error { return docker.UnexpectedHTTPStatusError{StatusCode: code} }
	for _, test := range []struct {
		err  error
		want []error
	}{
		{errors.New("something"), nil},
		{context.Canceled, []error{context.Canceled}},
		{fmt.Errorf("%w: %w", fault.Timeout, errors.New("stalled")), []error{fault.Timeout}},
		{signature.PolicyRequirementError("no"), []error{fault.Denied, trust.ErrSignature}},
		{fmt.Errorf("%w: %w: x", trust.ErrSignature, fault.Precondition), []error{fault.Precondition, trust.ErrSignature}},
		{fmt.Errorf("%w: %w", ErrWorkerDied, fault.Unavailable), []error{fault.Unavailable, ErrWorkerDied}},
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
		got := Kinds(fmt.Errorf("some step: %w", test.err))
		if !slices.Equal(got, test.want) {
			t.Errorf("%T %v: %v, want %v", test.err, test.err, got, test.want)
		}
	}
}

func TestHintOfRateLimit(t *testing.T) {
	const limited, unreachable = "log in by image.auth_file, or use a mirror", "check that the node reaches the registry"
	for _, test := range []struct {
		err  error
		want string
	}{
		{docker.ErrTooManyRequests, limited},
		{errcode.ErrorCodeTooManyRequests.WithMessage("toomanyrequests: You have reached your pull rate limit"), limited},
		{docker.UnexpectedHTTPStatusError{StatusCode: 429}, limited},
		{docker.UnexpectedHTTPStatusError{StatusCode: 503}, unreachable},
	} {
		err := New("registry.example/app:1", fmt.Errorf("some step: %w", test.err), nil)
		for _, hint := range []string{limited, unreachable} {
			if strings.Contains(err.Error(), hint) != (hint == test.want) || !errors.Is(err, fault.Unavailable) {
				t.Errorf("%T: %v, want %q", test.err, err, test.want)
			}
		}
	}
}

func FuzzRedact(f *testing.F) {
	f.Add("Get \"https://u:p@h/x?y=z\": Basic dXNlcjpwYXNz", "p4ssw0rd")
	f.Fuzz(func(t *testing.T, text, password string) {
		if len(password) < 8 || strings.ContainsAny(password, " \t\n\"'<>@/?#:%") {
			return
		}
		raw := (&url.URL{Scheme: "https", User: url.UserPassword("u", password), Host: "h", Path: "/p", RawQuery: "t=" + url.QueryEscape(password)}).String()
		got := Redact("error: " + raw + " " + strings.ReplaceAll(text, password, ""))
		if strings.Contains(got, password) && !strings.Contains(strings.ReplaceAll(text, password, ""), password) && !strings.Contains("error: https://h/p?<redacted> ", password) {
			t.Errorf("%q shows %q", got, password)
		}
		if Cut(got) != got && len(Cut(got)) > 2*maxText {
			t.Errorf("%d bytes", len(Cut(got)))
		}
	})
}
