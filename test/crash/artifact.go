package main

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

func (s *stage) pullArtifact(ctx context.Context) error {
	_, err := s.w.Images().PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: artifact}})
	return err
}

func (s *stage) removeArtifact(ctx context.Context) error {
	_, err := s.w.Images().RemoveImage(ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: artifact}})
	return err
}

// wantsArtifact makes the artifact a volume of the next container.
func (s *stage) wantsArtifact(context.Context) error {
	s.container.Mounts = []*cri.Mount{{ContainerPath: "/model", Readonly: true, Image: &cri.ImageSpec{Image: artifact}}}
	return nil
}

// mountsArtifact makes a container that mounts it.
func (s *stage) mountsArtifact(ctx context.Context) error {
	return s.do(ctx, (*stage).pullArtifact, (*stage).wantsArtifact, (*stage).running)
}

// wantArtifact retries until the artifact is present, and reads it.
func (s *stage) wantArtifact(ctx context.Context) error {
	if err := s.pullArtifact(ctx); err != nil {
		return fmt.Errorf("PullImage again: %w", err)
	}
	if err := s.artifacts(ctx, 1); err != nil {
		return err
	}
	s.container.Args = scene.Steps("cat /model/config.json ; cat /model/weights/part-2")
	return s.do(ctx, (*stage).wantsArtifact, (*stage).runPod, (*stage).create, (*stage).start, (*stage).finish)
}

func (s *stage) wantNoArtifact(ctx context.Context) error {
	if err := s.removeArtifact(ctx); err != nil {
		return fmt.Errorf("RemoveImage again: %w", err)
	}
	return s.artifacts(ctx, 0)
}

// artifacts counts the artifacts of that name.
func (s *stage) artifacts(ctx context.Context, want int) error {
	resp, err := s.w.Images().ListImages(ctx, &cri.ListImagesRequest{Filter: &cri.ImageFilter{Image: &cri.ImageSpec{Image: artifact}}})
	if err == nil && len(resp.Images) != want {
		err = fmt.Errorf("want %d artifacts, there are %v", want, resp.Images)
	}
	return err
}

// removeImages removes the images and artifacts that stages have pulled. It asks again as long as
// one is in use: the files of a container are removed some time after RemoveContainer if that has
// failed at first.
func (s *stage) removeImages(ctx context.Context) error {
	var errs []error
	wait.Until(ctx, func() bool {
		errs = []error{s.removeImage(ctx), s.removeArtifact(ctx), s.removeProfile(ctx)}
		return !slices.ContainsFunc(errs, func(err error) bool { return status.Code(err) == codes.FailedPrecondition })
	})
	return errors.Join(errs...)
}
