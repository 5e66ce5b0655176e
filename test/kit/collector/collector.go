// Package collector is an OpenTelemetry collector that shows received traces to
// a test.
package collector

import (
	"context"
	"encoding/hex"
	"net"
	"sync"

	service "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	otlp "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
)

// Span is a received span, ids in hexadecimal.
type Span struct {
	Name, Trace, ID, Parent string
	Failed                  bool
	Attributes              map[string]string // string attributes only
	Resource                map[string]string
}

// Collector holds the received spans.
type Collector struct {
	service.UnimplementedTraceServiceServer
	server *grpc.Server

	mu    sync.Mutex
	spans []Span
}

// Serve receives traces on l until Close.
func Serve(l net.Listener, options ...grpc.ServerOption) *Collector {
	c := &Collector{server: grpc.NewServer(options...)}
	service.RegisterTraceServiceServer(c.server, c)
	go func() { _ = c.server.Serve(l) }()
	return c
}

// Close stops receiving.
func (c *Collector) Close() { c.server.Stop() }

// Spans returns all received spans.
func (c *Collector) Spans() []Span {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]Span(nil), c.spans...)
}

// Export implements OTLP's service.
func (c *Collector) Export(_ context.Context, req *service.ExportTraceServiceRequest) (*service.ExportTraceServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range req.ResourceSpans {
		resource := map[string]string{}
		for _, a := range r.Resource.GetAttributes() {
			resource[a.Key] = a.Value.GetStringValue()
		}
		for _, s := range r.ScopeSpans {
			for _, span := range s.Spans {
				c.spans = append(c.spans, taken(span, resource))
			}
		}
	}
	return &service.ExportTraceServiceResponse{}, nil
}

func taken(s *otlp.Span, resource map[string]string) Span {
	attributes := map[string]string{}
	for _, a := range s.Attributes {
		attributes[a.Key] = a.Value.GetStringValue()
	}
	return Span{
		Name: s.Name, Trace: hex.EncodeToString(s.TraceId), ID: hex.EncodeToString(s.SpanId), Parent: hex.EncodeToString(s.ParentSpanId),
		Failed:     s.Status.GetCode() == otlp.Status_STATUS_CODE_ERROR,
		Attributes: attributes, Resource: resource,
	}
}
