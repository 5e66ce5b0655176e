package server

import (
	"context"
	"errors"

	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage"
)

// imageAPI is ImageService.
type imageAPI struct {
	engine   Engine
	images   Images
	handlers func(context.Context) []*cri.RuntimeHandler
}

func (s *imageAPI) ListImages(ctx context.Context, req *cri.ListImagesRequest) (*cri.ListImagesResponse, error) {
	images, err := s.list(ctx, req.GetFilter())
	return &cri.ListImagesResponse{Images: images}, err
}

func (s *imageAPI) StreamImages(req *cri.StreamImagesRequest, out grpc.ServerStreamingServer[cri.StreamImagesResponse]) error {
	images, err := s.list(out.Context(), req.GetFilter())
	if err != nil {
		return err
	}
	return inChunks(images, messageSize, func(chunk []*cri.Image) error {
		return out.Send(&cri.StreamImagesResponse{Images: chunk})
	})
}

// list looks up the one image that a filter names, or all of them without a
// filter.
func (s *imageAPI) list(ctx context.Context, filter *cri.ImageFilter) ([]*cri.Image, error) {
	if err := in("filter.image", checkImageFilter(filter.GetImage())); err != nil {
		return nil, err
	}
	if filter.GetImage().GetImage() == "" {
		images, err := s.images.Images(ctx)
		if err != nil {
			return nil, err
		}
		return translated(images, fillImage), nil
	}
	image, err := s.find(ctx, filter.GetImage().GetImage())
	if image == nil {
		return nil, err
	}
	return []*cri.Image{toImage(image)}, nil
}

// find returns nil without an error if there is no such image.
func (s *imageAPI) find(ctx context.Context, ref string) (*storage.Image, error) {
	image, err := s.images.LookUp(ctx, ref)
	if errors.Is(err, fault.NotFound) {
		return nil, nil
	}
	return image, err
}

// ImageStatus answers without an image if there is none: that is how CRI
// reports a missing one.
func (s *imageAPI) ImageStatus(ctx context.Context, req *cri.ImageStatusRequest) (*cri.ImageStatusResponse, error) {
	if err := in("image", checkImage(req.GetImage())); err != nil {
		return nil, err
	}
	image, err := s.find(ctx, req.GetImage().GetImage())
	if err != nil || image == nil {
		return &cri.ImageStatusResponse{}, err
	}
	resp := &cri.ImageStatusResponse{Image: toImage(image)}
	if len(image.Annotations) > 0 {
		resp.Image.Spec = &cri.ImageSpec{Annotations: image.Annotations}
	}
	if !req.GetVerbose() {
		return resp, nil
	}
	resp.Info, err = s.info(ctx, image)
	if errors.Is(err, fault.NotFound) { // removed in the meantime
		return &cri.ImageStatusResponse{}, nil
	}
	if err != nil {
		return nil, err
	}
	return resp, nil
}

func (s *imageAPI) info(ctx context.Context, image *storage.Image) (map[string]string, error) {
	verdicts, err := s.images.Verdicts(ctx, image)
	if err != nil {
		return nil, err
	}
	if len(image.Files) > 0 {
		return artifactInfo(image, verdicts)
	}
	spec, err := s.images.Spec(ctx, image)
	if err != nil {
		return nil, err
	}
	return imageInfo(spec, verdicts)
}

func (s *imageAPI) PullImage(ctx context.Context, req *cri.PullImageRequest) (*cri.PullImageResponse, error) {
	if err := s.checkPullImage(ctx, req); err != nil {
		return nil, err
	}
	image, err := s.engine.PullImage(ctx, storage.PullRequest{
		Image:     req.GetImage().GetImage(),
		Auth:      req.GetAuth(),
		Namespace: req.GetSandboxConfig().GetMetadata().GetNamespace(),
		Cgroup:    req.GetSandboxConfig().GetLinux().GetCgroupParent(),
	})
	if err != nil {
		return nil, pullFault(err)
	}
	return &cri.PullImageResponse{ImageRef: image.ID}, nil
}

func (s *imageAPI) RemoveImage(ctx context.Context, req *cri.RemoveImageRequest) (*cri.RemoveImageResponse, error) {
	if err := in("image", checkImage(req.GetImage())); err != nil {
		return nil, err
	}
	if err := s.engine.RemoveImage(ctx, req.GetImage().GetImage()); err != nil {
		return nil, err
	}
	return &cri.RemoveImageResponse{}, nil
}

func (s *imageAPI) ImageFsInfo(ctx context.Context, _ *cri.ImageFsInfoRequest) (*cri.ImageFsInfoResponse, error) {
	images, containers, err := s.images.FsInfo(ctx)
	if err != nil {
		return nil, err
	}
	return &cri.ImageFsInfoResponse{
		ImageFilesystems:     []*cri.FilesystemUsage{fsUsage(images)},
		ContainerFilesystems: []*cri.FilesystemUsage{fsUsage(containers)},
	}, nil
}
