package main

import (
	"context"
	"fmt"

	"github.com/opencontainers/go-digest"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/registry"
)

const profileName = node.RegistryHost + "/profile"

// pushProfile pushes a seccomp profile to the registry.
func pushProfile(to *registry.Registry) (digest.Digest, error) {
	built, err := image.Files{"profile.json": `{"defaultAction": "SCMP_ACT_ALLOW"}`}.BuildWith("application/vnd.cncf.seccomp-profile.config.v1+json")
	if err != nil {
		return "", err
	}
	to.Push("profile", "latest", built)
	return built.Digest(), nil
}

func (s *stage) profileRef() string { return profileName + "@" + s.w.profile.String() }

func (s *stage) pullProfile(ctx context.Context) error {
	_, err := s.w.Images().PullSecurityProfile(ctx, &cri.PullSecurityProfileRequest{
		Image: &cri.ImageSpec{Image: s.profileRef()}, ProfileKind: cri.SecurityProfileKind_Seccomp,
	})
	return err
}

func (s *stage) removeProfile(ctx context.Context) error {
	_, err := s.w.Images().RemoveSecurityProfile(ctx, &cri.RemoveSecurityProfileRequest{Digest: s.w.profile.String()})
	return err
}

// wantsProfile has the next container run under the profile.
func (s *stage) wantsProfile(context.Context) error {
	s.container.Linux.SecurityContext.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_OCI, OciRef: s.profileRef()}
	return nil
}

// wantProfile retries until the profile is present.
func (s *stage) wantProfile(ctx context.Context) error {
	if err := s.pullProfile(ctx); err != nil {
		return fmt.Errorf("PullSecurityProfile again: %w", err)
	}
	if err := s.profiles(ctx, 1); err != nil {
		return err
	}
	return s.do(ctx, (*stage).wantsProfile, (*stage).runPod, (*stage).create)
}

func (s *stage) wantNoProfile(ctx context.Context) error {
	if err := s.removeProfile(ctx); err != nil {
		return fmt.Errorf("RemoveSecurityProfile again: %w", err)
	}
	return s.profiles(ctx, 0)
}

// profiles counts the profiles, and the references of one.
func (s *stage) profiles(ctx context.Context, want int) error {
	resp, err := s.w.Images().ListSecurityProfiles(ctx, &cri.ListSecurityProfilesRequest{})
	if err == nil && (len(resp.Profiles) != want || want > 0 && len(resp.Profiles[0].Refs) != 1) {
		err = fmt.Errorf("want %d profiles, there are %v", want, resp.Profiles)
	}
	return err
}
