package server

import (
	"context"
	"fmt"
	"net"

	"google.golang.org/grpc"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/server/caller"
	"github.com/crius-run/crius/server/trail"
)

// minMessageSize is what a single large pod may need.
const minMessageSize = 4 << 20

// Services are the dependencies of the CRI server.
type Services struct {
	Engine Engine
	Status Status
	Usage  Usage
	Images Images
	// PodMetrics returns the configured kinds of pod metrics, of PodMetricKinds or
	// AllPodMetrics, whenever metrics are asked for. It may be nil.
	PodMetrics func() []string
	// Sessions serves exec, attach and port-forward.
	Sessions Sessions
	// Info returns JSON documents by name (config, network) for the verbose
	// Status; nil if there are none.
	Info func(context.Context) map[string]string
	// Trail records who does what in containers. It may be nil.
	Trail *trail.Trail
	// Trace observes every call except streams, whose errors are already gRPC's.
	// It may be nil.
	Trace *trace.Tracer
	// Version of the program, as set by its build.
	Version string
}

// Server answers CRI on a listener.
type Server struct {
	grpc   *grpc.Server
	engine Engine
	images Images
}

// New returns a server that is ready for Serve.
func New(cfg Config, s Services) (*Server, error) {
	if cfg.MaxMessageSize < minMessageSize {
		return nil, fmt.Errorf("api.max_message_size = %d: give at least %d: %w", cfg.MaxMessageSize, minMessageSize, fault.Invalid)
	}
	runtime, err := newRuntimeService(cfg, s)
	if err != nil {
		return nil, err
	}
	unknown := new(unknownGuard)
	srv := grpc.NewServer(
		grpc.Creds(caller.Credentials()),
		grpc.ForceServerCodecV2(newCodec()),
		grpc.MaxRecvMsgSize(cfg.MaxMessageSize),
		grpc.MaxSendMsgSize(cfg.MaxMessageSize),
		grpc.UnaryInterceptor(guardUnary(s.Trace, s.Engine, unknown)),
		grpc.StreamInterceptor(unknown.guardStream),
	)
	registerCRI(srv, runtime, newImageService(s))
	healthpb.RegisterHealthServer(srv, &health{services: srv.GetServiceInfo()})
	return &Server{grpc: srv, engine: s.Engine, images: s.Images}, nil
}

// Serve answers on l, which it closes, until Shutdown is complete, and returns
// nil then. It may be called for several listeners at once.
func (s *Server) Serve(l net.Listener) error {
	if err := s.grpc.Serve(l); err != nil {
		return fmt.Errorf("serve CRI: %w", err)
	}
	return nil
}

// Shutdown accepts no more calls, disconnects clients that listen for events,
// unless they do not even read, and waits for the calls under way. When ctx
// ends first, Shutdown cancels their contexts and returns ctx's error at once:
// the work itself outlives its callers, so only answers are lost. A handler
// that ignores its context is left behind.
func (s *Server) Shutdown(ctx context.Context) error {
	s.engine.StopEvents()
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		s.grpc.GracefulStop()
	}()
	select {
	case <-drained:
		return nil
	case <-ctx.Done():
		s.grpc.Stop()
		return fmt.Errorf("drain CRI calls: %w", ctx.Err())
	}
}

// health reports that the server serves. It does not offer Watch: such a stream
// would delay every Shutdown.
type health struct {
	healthpb.UnimplementedHealthServer
	services map[string]grpc.ServiceInfo
}

func (h *health) Check(_ context.Context, req *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	if _, ok := h.services[req.GetService()]; !ok && req.GetService() != "" {
		return nil, fmt.Errorf("service %s %w", brief(req.GetService()), fault.NotFound)
	}
	return &healthpb.HealthCheckResponse{Status: healthpb.HealthCheckResponse_SERVING}, nil
}
