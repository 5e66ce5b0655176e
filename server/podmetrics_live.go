package server

import (
	"context"
	"slices"
	"sync"

	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// liveMetricsAPI is metricsAPI with the kinds of metrics that are configured at the time of a call.
type liveMetricsAPI struct {
	usage  Usage
	wanted func() []string

	mu    sync.Mutex
	kinds []string    // of now
	now   *metricsAPI // never changes
}

func newLiveMetricsAPI(usage Usage, kinds func() []string) (*liveMetricsAPI, error) {
	if kinds == nil {
		kinds = func() []string { return nil }
	}
	l := &liveMetricsAPI{usage: usage, wanted: kinds, kinds: kinds()}
	var err error
	l.now, err = newMetricsAPI(usage, l.kinds)
	return l, err
}

// current keeps the earlier kinds if there is an unknown one among the new.
func (l *liveMetricsAPI) current() *metricsAPI {
	kinds := l.wanted()
	l.mu.Lock()
	defer l.mu.Unlock()
	if !slices.Equal(kinds, l.kinds) {
		if next, err := newMetricsAPI(l.usage, kinds); err == nil {
			l.kinds, l.now = kinds, next
		}
	}
	return l.now
}

func (l *liveMetricsAPI) ListMetricDescriptors(ctx context.Context, req *cri.ListMetricDescriptorsRequest) (*cri.ListMetricDescriptorsResponse, error) {
	return l.current().ListMetricDescriptors(ctx, req)
}

func (l *liveMetricsAPI) ListPodSandboxMetrics(ctx context.Context, req *cri.ListPodSandboxMetricsRequest) (*cri.ListPodSandboxMetricsResponse, error) {
	return l.current().ListPodSandboxMetrics(ctx, req)
}

func (l *liveMetricsAPI) StreamPodSandboxMetrics(req *cri.StreamPodSandboxMetricsRequest, out grpc.ServerStreamingServer[cri.StreamPodSandboxMetricsResponse]) error {
	return l.current().StreamPodSandboxMetrics(req, out)
}
