package server

import cri "k8s.io/cri-api/pkg/apis/runtime/v1"

// runtimeService is the RuntimeService composed of small APIs. A method that
// one of them has hides the unimplemented one, which is embedded a level
// deeper.
type runtimeService struct {
	unimplementedRuntime
	*sandboxAPI
	*containerAPI
	*streamAPI
	*eventAPI
	*statsAPI
	*liveMetricsAPI
	*nodeAPI
}

type unimplementedRuntime struct {
	cri.UnimplementedRuntimeServiceServer
}

func newRuntimeService(cfg Config, s Services) (*runtimeService, error) {
	metrics, err := newLiveMetricsAPI(s.Usage, s.PodMetrics)
	if err != nil {
		return nil, err
	}
	name, version := cfg.Identity(s.Version)
	return &runtimeService{
		sandboxAPI:     &sandboxAPI{engine: s.Engine},
		containerAPI:   &containerAPI{engine: s.Engine, trail: s.Trail, maxExecOutput: min(cfg.MaxMessageSize, clientMessageSize) - messageOverhead},
		streamAPI:      &streamAPI{engine: s.Engine, sessions: s.Sessions, trail: s.Trail},
		eventAPI:       &eventAPI{engine: s.Engine},
		statsAPI:       &statsAPI{engine: s.Engine, usage: s.Usage},
		liveMetricsAPI: metrics,
		nodeAPI:        &nodeAPI{engine: s.Engine, status: s.Status, info: s.Info, name: name, version: version},
	}, nil
}

// imageService is the ImageService, composed in the same way.
type imageService struct {
	unimplementedImages
	*imageAPI
	*profileAPI
}

type unimplementedImages struct {
	cri.UnimplementedImageServiceServer
}

func newImageService(s Services) *imageService {
	return &imageService{
		imageAPI:   &imageAPI{engine: s.Engine, images: s.Images, handlers: s.Status.Handlers},
		profileAPI: &profileAPI{engine: s.Engine, handlers: s.Status.Handlers},
	}
}
