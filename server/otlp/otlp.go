// Package otlp exports OpenTelemetry traces to a collector: a span for each CRI
// call, below it one for the operation that the call started, and below that
// one for each step. A caller may pass its own trace context (W3C Trace Context
// in the gRPC metadata, as kubelets do); the call is then part of that trace.
//
// An operation may outlive the call that started it, and so may its span. A
// call that only joins an operation has no spans below it.
package otlp

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	oteltrace "go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
)

// Config configures the export of traces.
type Config struct {
	Endpoint     string `toml:"endpoint" apply:"restart: the connection to the collector is set up at the start" form:"collector or empty" help:"URL of an OTLP collector over gRPC: http://127.0.0.1:4317, or https:// for TLS; empty: no tracing"`
	CAFile       string `toml:"ca_file" apply:"restart: the connection to the collector is set up at the start" form:"path or empty" input:"yes" help:"PEM file of CA certificates used to verify the collector; empty: the system's CA certificates"`
	SamplingRate int    `toml:"sampling_rate_per_million" apply:"restart: the connection to the collector is set up at the start" help:"number of calls per million that are traced if the caller passes no trace context; otherwise the caller decides"`
}

// PerMillion is the sampling rate at which everything is traced.
const PerMillion = 1_000_000

// exportTime bounds an attempt to send spans, and the extra time that a server
// takes to stop when its collector is dead.
var exportTime = 3 * time.Second

// Traces sends what it observes to a collector. It is a trace.Observer. It
// drops what the collector does not accept in time: it keeps at most some
// thousand spans.
type Traces struct {
	tracer oteltrace.Tracer
	sdk    *sdk.TracerProvider
	conn   *grpc.ClientConn
}

// New returns Traces; the collector need not be reachable yet. It returns nil
// if there is no endpoint.
func New(ctx context.Context, cfg Config, version string) (*Traces, error) {
	if cfg.Endpoint == "" {
		return nil, nil
	}
	conn, err := connect(cfg)
	if err != nil {
		return nil, fmt.Errorf("tracing: %w", err)
	}
	client, err := otlptracegrpc.New(ctx, otlptracegrpc.WithGRPCConn(conn), otlptracegrpc.WithTimeout(exportTime))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("tracing: %w", err), conn.Close())
	}
	host, _ := os.Hostname() // without a name the collector knows the node by its address
	provider := sdk.NewTracerProvider(
		sdk.WithBatcher(&exporter{SpanExporter: client, endpoint: cfg.Endpoint}),
		sdk.WithSampler(sdk.ParentBased(sdk.TraceIDRatioBased(float64(cfg.SamplingRate)/PerMillion))),
		sdk.WithResource(resource.NewSchemaless(
			attribute.String("service.name", "crius"),
			attribute.String("service.version", version),
			attribute.String("host.name", host),
		)),
	)
	return &Traces{tracer: provider.Tracer("github.com/crius-run/crius"), sdk: provider, conn: conn}, nil
}

// SplitEndpoint parses an endpoint.
func SplitEndpoint(text string) (address string, secure, ok bool) {
	scheme, address, ok := strings.Cut(text, "://")
	_, port, err := net.SplitHostPort(address)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	return address, scheme == "https", ok && err == nil && (scheme == "http" || scheme == "https")
}

func connect(cfg Config) (*grpc.ClientConn, error) {
	address, encrypted, ok := SplitEndpoint(cfg.Endpoint)
	if !ok {
		return nil, fmt.Errorf("endpoint %q is not of the form http://HOST:PORT or https://HOST:PORT: %w", cfg.Endpoint, fault.Invalid)
	}
	secure := insecure.NewCredentials()
	if encrypted {
		authorities, err := authorities(cfg.CAFile)
		if err != nil {
			return nil, err
		}
		secure = credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS12, RootCAs: authorities})
	} else if cfg.CAFile != "" {
		return nil, fmt.Errorf("ca_file has no effect with %s: use https:// or remove tracing.ca_file: %w", cfg.Endpoint, fault.Invalid)
	}
	return grpc.NewClient(address, grpc.WithTransportCredentials(secure))
}

// authorities returns the certificates in file; nil, which means those of the
// system, without a file.
func authorities(file string) (*x509.CertPool, error) {
	if file == "" {
		return nil, nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("ca_file: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("ca_file %s has no PEM certificate: %w", file, fault.Invalid)
	}
	return pool, nil
}

// Close sends the remaining spans, as far as the collector accepts them.
func (t *Traces) Close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, exportTime)
	defer cancel()
	err := t.sdk.Shutdown(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		slog.WarnContext(ctx, "trace collector too slow, dropping spans", "waited", exportTime)
		err = nil
	}
	return errors.Join(err, t.conn.Close())
}

// Begin starts a span (trace.Observer).
func (t *Traces) Begin(ctx context.Context, kind trace.Kind, name, object string) (context.Context, func(error)) {
	var options []oteltrace.SpanStartOption
	switch kind {
	case trace.RPC:
		ctx = passedOn(ctx)
		options = append(options, oteltrace.WithSpanKind(oteltrace.SpanKindServer), oteltrace.WithAttributes(attribute.String("rpc.system", "grpc")))
	case trace.Operation:
		options = append(options, oteltrace.WithAttributes(attribute.String("crius.object", object)))
	}
	ctx, span := t.tracer.Start(ctx, name, options...)
	return ctx, func(err error) {
		if err != nil {
			span.SetStatus(codes.Error, err.Error())
		}
		if kind == trace.RPC {
			span.SetAttributes(attribute.Int("rpc.grpc.status_code", int(status.Code(err))))
		}
		span.End()
	}
}

// passedOn returns a context with the trace that the caller has put into the
// metadata, if any.
func passedOn(ctx context.Context) context.Context {
	md, _ := metadata.FromIncomingContext(ctx)
	return propagation.TraceContext{}.Extract(ctx, carrier(md))
}

// carrier adapts metadata to a propagator.
type carrier metadata.MD

func (c carrier) Get(key string) string {
	if values := metadata.MD(c).Get(key); len(values) > 0 {
		return values[0]
	}
	return ""
}

func (c carrier) Set(key, value string) { metadata.MD(c).Set(key, value) }

func (c carrier) Keys() []string {
	keys := make([]string, 0, len(c))
	for key := range c {
		keys = append(keys, key)
	}
	return keys
}

// exporter logs once when a collector stops accepting spans, and once when it
// accepts them again.
type exporter struct {
	sdk.SpanExporter
	endpoint string

	mu      sync.Mutex
	failing bool
}

func (e *exporter) ExportSpans(ctx context.Context, spans []sdk.ReadOnlySpan) error {
	err := e.SpanExporter.ExportSpans(ctx, spans)
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case err != nil && !e.failing:
		slog.WarnContext(ctx, "trace collector unavailable, dropping spans", "endpoint", e.endpoint, "err", err)
	case err == nil && e.failing:
		slog.InfoContext(ctx, "trace collector available again", "endpoint", e.endpoint)
	}
	e.failing = err != nil
	return nil
}
