package server

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage"
)

func TestListSecurityProfiles(t *testing.T) {
	t.Parallel()
	n := start(t)
	got, err := n.image.ListSecurityProfiles(t.Context(), &cri.ListSecurityProfilesRequest{})
	if err != nil || len(got.Profiles) != 1 {
		t.Fatalf("%v, %v", got, err)
	}
	want := n.engine.SecurityProfiles()[0]
	if p := got.Profiles[0]; p.Digest != want.Digest || len(p.Refs) != 1 || p.Refs[0] != want.Refs[0] || p.Size != want.Size {
		t.Errorf("%v, want %+v", p, want)
	}
}

// The kubelet retries all errors but those whose message begins with SecurityProfileInvalid.
func TestPullSecurityProfileErrors(t *testing.T) {
	t.Parallel()
	n := start(t)
	good := func() *cri.PullSecurityProfileRequest {
		return &cri.PullSecurityProfileRequest{Image: &cri.ImageSpec{Image: "r.example/p@sha256:1"}, ProfileKind: cri.SecurityProfileKind_Seccomp}
	}
	check := func(what string, err error, code codes.Code, prefix string) {
		t.Helper()
		got := status.Convert(err)
		if got.Code() != code || !strings.HasPrefix(got.Message(), prefix) {
			t.Errorf("%s: %s %q; want %s %q", what, got.Code(), got.Message(), code, prefix)
		}
	}
	for what, change := range map[string]func(*cri.PullSecurityProfileRequest){
		"no image":           func(r *cri.PullSecurityProfileRequest) { r.Image = nil },
		"no reference":       func(r *cri.PullSecurityProfileRequest) { r.Image.Image = "" },
		"a bad reference":    func(r *cri.PullSecurityProfileRequest) { r.Image.Image = "a b" },
		"no kind":            func(r *cri.PullSecurityProfileRequest) { r.ProfileKind = 0 },
		"an unknown kind":    func(r *cri.PullSecurityProfileRequest) { r.ProfileKind = 2 },
		"an unknown handler": func(r *cri.PullSecurityProfileRequest) { r.Image.RuntimeHandler = "none" },
	} {
		req := good()
		change(req)
		_, err := n.image.PullSecurityProfile(t.Context(), req)
		check(what, err, codes.InvalidArgument, crierrors.ErrSecurityProfileInvalid.Error()+": ")
		if call := n.images.last(); call.verb != "" {
			t.Errorf("%s: called %v", what, call)
		}
	}
	for _, c := range []struct {
		cause  error
		code   codes.Code
		prefix string
	}{
		{fault.Invalid, codes.InvalidArgument, "SecurityProfileInvalid: the reason"},
		{fault.Unavailable, codes.Unknown, "RegistryUnavailable: the reason"},
		{errors.Join(storage.ErrSignature, fault.Denied), codes.Unknown, "SignatureValidationFailed: the reason"},
		{fault.NotFound, codes.NotFound, "the reason"},
		{fault.Unauthenticated, codes.Unauthenticated, "the reason"},
		{fault.Denied, codes.PermissionDenied, "the reason"},
		{fault.Exhausted, codes.ResourceExhausted, "the reason"},
		{fault.Timeout, codes.DeadlineExceeded, "the reason"},
	} {
		n.images.failing(fmt.Errorf("the reason: %w", c.cause))
		_, err := n.image.PullSecurityProfile(t.Context(), good())
		check(c.prefix, err, c.code, c.prefix)
		n.images.last()
	}
	n.engine.failing(fmt.Errorf("the reason: %w: %w", storage.ErrSignature, fault.Denied))
	_, err := n.runtime.RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: maximalSandboxConfig()})
	check("a pod whose profile is not signed", err, codes.Unknown, "SignatureValidationFailed: the reason")
	n.images.failing(fmt.Errorf("the reason: %w", fault.Invalid))
	_, err = n.image.RemoveSecurityProfile(t.Context(), &cri.RemoveSecurityProfileRequest{Digest: "1"})
	check("remove", err, codes.InvalidArgument, "the reason")
}
