// Package collector is an OpenTelemetry collector that shows received traces to
// a test.
package collector

import (
	"context"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	service "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	otlp "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
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
	end func()

	mu      sync.Mutex
	spans   []Span
	headers http.Header // of the last request over HTTP
	path    string      // the same
}

// Serve receives traces on l until Close.
func Serve(l net.Listener, options ...grpc.ServerOption) *Collector {
	server := grpc.NewServer(options...)
	c := &Collector{end: server.Stop}
	service.RegisterTraceServiceServer(server, c)
	go func() { _ = server.Serve(l) }()
	return c
}

// ServeHTTP receives traces by HTTP on l, which may be one of TLS, until Close.
func ServeHTTP(l net.Listener) *Collector {
	c := &Collector{}
	server := &http.Server{Handler: http.HandlerFunc(c.receive), ReadHeaderTimeout: time.Minute}
	c.end = func() { _ = server.Close() }
	go func() { _ = server.Serve(l) }()
	return c
}

func (c *Collector) receive(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	var req service.ExportTraceServiceRequest
	if err = errors.Join(err, proto.Unmarshal(body, &req)); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	c.mu.Lock()
	c.headers, c.path = r.Header, r.URL.Path
	c.mu.Unlock()
	_, _ = c.Export(r.Context(), &req)
	w.Header().Set("Content-Type", "application/x-protobuf")
}

// LastRequest returns path and headers of the last request by HTTP.
func (c *Collector) LastRequest() (path string, headers http.Header) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.path, c.headers
}

// Close stops receiving.
func (c *Collector) Close() { c.end() }

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
