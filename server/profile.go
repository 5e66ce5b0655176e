package server

import (
	"cmp"
	"context"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/storage"
)

// profileAPI is the part of ImageService for security profiles of registries.
type profileAPI struct {
	engine   Engine
	handlers func(context.Context) []*cri.RuntimeHandler
}

func (s *profileAPI) PullSecurityProfile(ctx context.Context, req *cri.PullSecurityProfileRequest) (*cri.PullSecurityProfileResponse, error) {
	if err := s.checkPull(ctx, req); err != nil {
		return nil, profileFault(err)
	}
	cached, err := s.engine.PullSecurityProfile(ctx, storage.PullRequest{
		Image:     req.GetImage().GetImage(),
		Auth:      req.GetAuth(),
		Namespace: req.GetSandboxConfig().GetMetadata().GetNamespace(),
	})
	if err != nil {
		return nil, profileFault(err)
	}
	return &cri.PullSecurityProfileResponse{Cached: cached}, nil
}

func (s *profileAPI) checkPull(ctx context.Context, req *cri.PullSecurityProfileRequest) error {
	if err := cmp.Or(wellFormed(req), in("image", checkImage(req.GetImage()))); err != nil {
		return err
	}
	if kind := req.GetProfileKind(); kind != cri.SecurityProfileKind_Seccomp {
		return in("profile_kind", bad("is %s; only Seccomp is supported", kind))
	}
	return checkHandler(ctx, req.GetImage(), s.handlers)
}

func (s *profileAPI) ListSecurityProfiles(context.Context, *cri.ListSecurityProfilesRequest) (*cri.ListSecurityProfilesResponse, error) {
	resp := &cri.ListSecurityProfilesResponse{}
	for _, p := range s.engine.SecurityProfiles() {
		resp.Profiles = append(resp.Profiles, &cri.SecurityProfileInfo{Digest: p.Digest, Refs: p.Refs, Size: p.Size})
	}
	return resp, nil
}

func (s *profileAPI) RemoveSecurityProfile(ctx context.Context, req *cri.RemoveSecurityProfileRequest) (*cri.RemoveSecurityProfileResponse, error) {
	if err := cmp.Or(wellFormed(req), in("digest", checkReference(req.GetDigest()))); err != nil {
		return nil, err
	}
	if err := s.engine.RemoveSecurityProfile(ctx, req.GetDigest()); err != nil {
		return nil, err
	}
	return &cri.RemoveSecurityProfileResponse{}, nil
}
