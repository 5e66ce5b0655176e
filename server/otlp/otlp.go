// Package otlp exports OpenTelemetry traces to a collector: a span for each CRI
// call, below it one for the operation that the call started, and below that
// one for each step. A caller may pass its own trace context (W3C Trace Context
// in the gRPC metadata, as kubelets do); the call is then part of that trace.
//
// An operation may outlive the call that started it, and so may its span. A
// call that only joins an operation has no spans below it.
package otlp

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
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
	"github.com/crius-run/crius/internal/logx"
	"github.com/crius-run/crius/internal/trace"
)

// Config configures the export of traces.
type Config struct {
	Endpoint     string `toml:"endpoint" apply:"restart: the connection to the collector is set up at the start" form:"collector or empty" help:"URL of an OTLP collector: http://127.0.0.1:4317, or https:// for TLS; empty: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT of the server's environment, else no tracing"`
	Protocol     string `toml:"protocol" apply:"restart: the connection to the collector is set up at the start" choices:"auto,grpc,http/protobuf" help:"protocol of the collector: grpc, or http/protobuf, which usually has port 4318, and the path /v1/traces unless endpoint has another; auto: OTEL_EXPORTER_OTLP_TRACES_PROTOCOL or OTEL_EXPORTER_OTLP_PROTOCOL of the server's environment, else http/protobuf for port 4318 and grpc for others"`
	CAFile       string `toml:"ca_file" apply:"restart: the connection to the collector is set up at the start" form:"path or empty" input:"yes" help:"PEM file of CA certificates used to verify the collector; empty: the system's CA certificates"`
	SamplingRate int    `toml:"sampling_rate_per_million" apply:"restart: the connection to the collector is set up at the start" help:"number of calls per million that are traced if the caller passes no trace context; otherwise the caller decides; 0: as OTEL_TRACES_SAMPLER of the server's environment says, else none"`
}

// DefaultConfig returns the meaning of an empty configuration file.
func DefaultConfig() Config { return Config{Protocol: "auto"} }

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
	close  func() error // of the connection to the collector
}

// New returns Traces; the collector need not be reachable yet. Environment says what cfg leaves empty.
// It returns nil if there is no endpoint, or OTEL_SDK_DISABLED is true.
func New(ctx context.Context, cfg Config, version string) (*Traces, error) {
	cfg = cfg.orEnvironment(os.Getenv)
	if disabled, _ := strconv.ParseBool(os.Getenv("OTEL_SDK_DISABLED")); disabled || cfg.Endpoint == "" {
		return nil, nil
	}
	client, closeClient, err := connect(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("tracing: %w", err)
	}
	host, _ := os.Hostname() // without a name the collector knows the node by its address
	options := []sdk.TracerProviderOption{
		sdk.WithBatcher(&exporter{SpanExporter: client, endpoint: cfg.Endpoint}),
		sdk.WithResource(resource.NewSchemaless(
			attribute.String("service.name", cmp.Or(os.Getenv("OTEL_SERVICE_NAME"), "crius")),
			attribute.String("service.version", version),
			attribute.String("host.name", host),
		)),
	}
	if cfg.SamplingRate > 0 || os.Getenv("OTEL_TRACES_SAMPLER") == "" { // the SDK reads the variable
		options = append(options, sdk.WithSampler(sdk.ParentBased(sdk.TraceIDRatioBased(float64(cfg.SamplingRate)/PerMillion))))
	}
	provider := sdk.NewTracerProvider(options...)
	return &Traces{tracer: provider.Tracer("github.com/crius-run/crius"), sdk: provider, close: closeClient}, nil
}

// OverHTTP is the protocol of collectors that get spans by HTTP.
const OverHTTP = "http/protobuf"

// Collector is where an endpoint leads.
type Collector struct {
	Address string // HOST:PORT
	Path    string // empty, or begins with a slash
	Secure  bool   // by TLS
}

// ParseEndpoint parses an endpoint.
func ParseEndpoint(text string) (c Collector, ok bool) {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return Collector{}, false
	}
	_, port, err := net.SplitHostPort(u.Host)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	return Collector{u.Host, strings.TrimSuffix(u.Path, "/"), u.Scheme == "https"}, err == nil
}

// connect returns a client of the collector, and what closes its connection.
func connect(ctx context.Context, cfg Config) (sdk.SpanExporter, func() error, error) {
	c, ok := ParseEndpoint(cfg.Endpoint)
	if !ok || c.Path != "" && cfg.Protocol != OverHTTP {
		return nil, nil, fmt.Errorf("endpoint %q is not of the form http://HOST:PORT or https://HOST:PORT, with a path only for %s: %w", cfg.Endpoint, OverHTTP, fault.Invalid)
	}
	var secure *tls.Config
	if c.Secure {
		authorities, err := authorities(cfg.CAFile)
		if err != nil {
			return nil, nil, err
		}
		secure = &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: authorities}
	} else if cfg.CAFile != "" {
		return nil, nil, fmt.Errorf("ca_file has no effect with %s: use https:// or remove tracing.ca_file: %w", cfg.Endpoint, fault.Invalid)
	}
	switch cfg.Protocol {
	case OverHTTP:
		return overHTTP(ctx, c, secure)
	case "", "grpc":
		return overGRPC(ctx, c, secure)
	}
	return nil, nil, fmt.Errorf("protocol %q is not grpc or %s: %w", cfg.Protocol, OverHTTP, fault.Invalid)
}

func overGRPC(ctx context.Context, c Collector, secure *tls.Config) (sdk.SpanExporter, func() error, error) {
	identity := insecure.NewCredentials()
	if secure != nil {
		identity = credentials.NewTLS(secure)
	}
	conn, err := grpc.NewClient(c.Address, grpc.WithTransportCredentials(identity))
	if err != nil {
		return nil, nil, err
	}
	client, err := otlptracegrpc.New(ctx, otlptracegrpc.WithGRPCConn(conn), otlptracegrpc.WithTimeout(exportTime))
	if err != nil {
		return nil, nil, errors.Join(err, conn.Close())
	}
	return client, conn.Close, nil
}

func overHTTP(ctx context.Context, c Collector, secure *tls.Config) (sdk.SpanExporter, func() error, error) {
	options := []otlptracehttp.Option{
		otlptracehttp.WithEndpoint(c.Address), otlptracehttp.WithURLPath(cmp.Or(c.Path, "/v1/traces")), otlptracehttp.WithTimeout(exportTime),
	}
	if secure != nil {
		options = append(options, otlptracehttp.WithTLSClientConfig(secure))
	} else {
		options = append(options, otlptracehttp.WithInsecure())
	}
	client, err := otlptracehttp.New(ctx, options...)
	return client, func() error { return nil }, err
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
	return errors.Join(err, t.close())
}

// Begin starts a span (trace.Observer). What a call that is traced logs has the trace's id.
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
	if id := span.SpanContext(); kind == trace.RPC && id.IsSampled() {
		ctx = logx.With(ctx, "trace_id", id.TraceID().String())
	}
	return ctx, func(err error) {
		if err != nil {
			span.SetStatus(codes.Error, fault.Text(err))
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
