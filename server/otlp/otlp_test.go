package otlp

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/logx"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/test/kit/collector"
	"github.com/crius-run/crius/test/kit/refusing"
	"github.com/crius-run/crius/test/kit/wait"
)

const (
	traceID = "0af7651916cd43dd8448eb211c80319c"
	spanID  = "b7ad6b7169203331"
)

// calledBy returns the context of a call whose caller passes traceparent.
func calledBy(t *testing.T, traceparent string) context.Context {
	return metadata.NewIncomingContext(t.Context(), metadata.Pairs("traceparent", traceparent))
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// answer is a call that runs a pod in one step, which fails.
func answer(ctx context.Context, tracer *trace.Tracer) {
	_ = tracer.Call(ctx, "RunPodSandbox", func(ctx context.Context) error {
		return tracer.Do(ctx, "run pod", "a pod", func(ctx context.Context) error {
			return trace.Do(ctx, "attach network", func(context.Context) error { return errors.New("broken") })
		})
	})
}

// The environment of the tests must not decide about tracing.
func TestMain(m *testing.M) {
	for _, variable := range os.Environ() {
		if name, _, _ := strings.Cut(variable, "="); strings.HasPrefix(name, "OTEL_") {
			_ = os.Unsetenv(name)
		}
	}
	m.Run()
}

func start(t *testing.T, cfg Config) (*Traces, *trace.Tracer) {
	t.Helper()
	traces, err := New(t.Context(), cfg, "1.2.3")
	if err != nil {
		t.Fatal(err)
	}
	return traces, trace.New(traces)
}

// patient gives spans time to arrive on a busy machine. A test that calls it must not be
// parallel.
func patient(t *testing.T) {
	usual := exportTime
	exportTime = wait.Limit
	t.Cleanup(func() { exportTime = usual })
}

func TestSpans(t *testing.T) {
	patient(t)
	l := listen(t)
	c := collector.Serve(l)
	defer c.Close()
	traces, tracer := start(t, Config{Endpoint: "http://" + l.Addr().String()})
	answer(calledBy(t, "00-"+traceID+"-"+spanID+"-01"), tracer)
	answer(calledBy(t, "00-"+traceID+"-"+spanID+"-00"), tracer) // its caller does not trace it
	answer(calledBy(t, "nonsense"), tracer)
	answer(t.Context(), tracer) // and at rate 0 nothing else does
	if err := traces.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	spans := map[string]collector.Span{}
	for _, s := range c.Spans() {
		spans[s.Name] = s
		if s.Trace != traceID || !s.Failed {
			t.Errorf("%+v", s)
		}
	}
	call, pod, step := spans["RunPodSandbox"], spans["run pod"], spans["attach network"]
	if len(c.Spans()) != 3 || call.Parent != spanID || pod.Parent != call.ID || step.Parent != pod.ID {
		t.Errorf("spans: %+v", c.Spans())
	}
	if pod.Attributes["crius.object"] != "a pod" || pod.Resource["service.name"] != "crius" || pod.Resource["service.version"] != "1.2.3" {
		t.Errorf("operation: %+v", pod)
	}
}

func TestSamplingRate(t *testing.T) {
	patient(t)
	l := listen(t)
	c := collector.Serve(l)
	defer c.Close()
	traces, tracer := start(t, Config{Endpoint: "http://" + l.Addr().String(), SamplingRate: PerMillion})
	answer(t.Context(), tracer)
	if err := traces.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if spans := c.Spans(); len(spans) != 3 {
		t.Errorf("spans: %+v", spans)
	}
}

// An unreachable collector loses spans, and does not keep the server from
// ending.
func TestNoCollector(t *testing.T) {
	endpoint := fmt.Sprint("http://127.0.0.1:", refusing.Port(t))
	traces, tracer := start(t, Config{Endpoint: endpoint, SamplingRate: PerMillion})
	for range 10_000 {
		answer(t.Context(), tracer)
	}
	if err := traces.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestTLS(t *testing.T) {
	l := listen(t)
	certificate, file := selfSigned(t)
	c := collector.Serve(l, grpc.Creds(credentials.NewServerTLSFromCert(&certificate)))
	defer c.Close()
	usual := exportTime
	t.Cleanup(func() { exportTime = usual })
	for name, cfg := range map[string]struct {
		Config
		spans int
	}{
		"trusted":   {Config{CAFile: file}, 3},
		"untrusted": {Config{}, 0},
	} {
		before := len(c.Spans())
		if exportTime = usual; cfg.spans > 0 {
			exportTime = wait.Limit
		}
		cfg.Endpoint, cfg.SamplingRate = "https://"+l.Addr().String(), PerMillion
		traces, tracer := start(t, cfg.Config)
		answer(t.Context(), tracer)
		if err := traces.Close(t.Context()); err != nil {
			t.Error(name, err)
		}
		if got := len(c.Spans()) - before; got != cfg.spans {
			t.Errorf("%s: %d spans, want %d", name, got, cfg.spans)
		}
	}
}

func selfSigned(t *testing.T) (tls.Certificate, string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, file
}

func TestSpansOverHTTP(t *testing.T) {
	patient(t)
	certificate, file := selfSigned(t)
	for name, c := range map[string]struct {
		scheme, path, want string
		config             Config
	}{
		"usual path":   {"http://", "", "/v1/traces", Config{}},
		"another path": {"http://", "/otlp/traces/", "/otlp/traces", Config{}},
		"TLS":          {"https://", "", "/v1/traces", Config{CAFile: file}},
	} {
		l := listen(t)
		address := l.Addr().String()
		if c.scheme == "https://" {
			l = tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12})
		}
		from := collector.ServeHTTP(l)
		c.config.Endpoint, c.config.Protocol, c.config.SamplingRate = c.scheme+address+c.path, OverHTTP, PerMillion
		traces, tracer := start(t, c.config)
		answer(t.Context(), tracer)
		if err := traces.Close(t.Context()); err != nil {
			t.Error(name, err)
		}
		if path, _ := from.LastRequest(); len(from.Spans()) != 3 || path != c.want {
			t.Errorf("%s: %d spans at %s", name, len(from.Spans()), path)
		}
		from.Close()
	}
}

// What the environment says serves if the configuration says nothing.
func TestSpansByEnvironment(t *testing.T) {
	patient(t)
	l := listen(t)
	c := collector.ServeHTTP(l)
	defer c.Close()
	for name, value := range map[string]string{
		"ENDPOINT": "http://" + l.Addr().String() + "/base", "PROTOCOL": OverHTTP, "HEADERS": "api-key=secret",
	} {
		t.Setenv("OTEL_EXPORTER_OTLP_"+name, value)
	}
	t.Setenv("OTEL_TRACES_SAMPLER", "always_on")
	t.Setenv("OTEL_SERVICE_NAME", "node-runtime")
	t.Setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test,service.version=9")
	traces, tracer := start(t, Config{})
	answer(t.Context(), tracer)
	if err := traces.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	path, headers := c.LastRequest()
	if len(c.Spans()) != 3 || path != "/base/v1/traces" || headers.Get("api-key") != "secret" {
		t.Fatalf("%d spans at %s with %v", len(c.Spans()), path, headers)
	}
	if r := c.Spans()[0].Resource; r["service.name"] != "node-runtime" || r["service.version"] != "1.2.3" || r["deployment.environment"] != "test" {
		t.Errorf("resource %v", r)
	}
	t.Setenv("OTEL_SDK_DISABLED", "true")
	if off, err := New(t.Context(), Config{}, ""); off != nil || err != nil {
		t.Errorf("disabled: %v, %v", off, err)
	}
}

func TestEnvironment(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		config Config
		env    map[string]string
		want   Config
	}{
		"nothing":             {Config{Protocol: "auto"}, nil, Config{Protocol: "grpc"}},
		"configuration first": {Config{Endpoint: "http://a:1", Protocol: "grpc"}, map[string]string{"ENDPOINT": "http://b:2", "PROTOCOL": OverHTTP}, Config{Endpoint: "http://a:1", Protocol: "grpc"}},
		"general, grpc":       {Config{}, map[string]string{"ENDPOINT": "http://b"}, Config{Endpoint: "http://b:4317", Protocol: "grpc"}},
		"general, HTTP":       {Config{}, map[string]string{"ENDPOINT": "https://b/x/", "PROTOCOL": OverHTTP}, Config{Endpoint: "https://b:4318/x/v1/traces", Protocol: OverHTTP}},
		"port of HTTP":        {Config{Endpoint: "http://a:4318", Protocol: "auto"}, nil, Config{Endpoint: "http://a:4318", Protocol: OverHTTP}},
		"port of HTTP, grpc":  {Config{Endpoint: "http://a:4318", Protocol: "grpc"}, nil, Config{Endpoint: "http://a:4318", Protocol: "grpc"}},
		"of traces": {Config{}, map[string]string{"TRACES_ENDPOINT": "http://b:9/own", "ENDPOINT": "http://c", "TRACES_PROTOCOL": OverHTTP, "PROTOCOL": "grpc"},
			Config{Endpoint: "http://b:9/own", Protocol: OverHTTP}},
		"certificate":      {Config{}, map[string]string{"ENDPOINT": "https://[::1]", "CERTIFICATE": "/ca"}, Config{Endpoint: "https://[::1]:4317", Protocol: "grpc", CAFile: "/ca"}},
		"no TLS":           {Config{}, map[string]string{"ENDPOINT": "http://b:1", "CERTIFICATE": "/ca"}, Config{Endpoint: "http://b:1", Protocol: "grpc"}},
		"nonsense":         {Config{}, map[string]string{"ENDPOINT": "collector:4317"}, Config{Endpoint: "collector:4317", Protocol: "grpc"}},
		"unknown protocol": {Config{}, map[string]string{"ENDPOINT": "http://b:1", "PROTOCOL": "http/json"}, Config{Endpoint: "http://b:1", Protocol: "http/json"}},
	} {
		got := c.config.orEnvironment(func(name string) string { return c.env[strings.TrimPrefix(name, "OTEL_EXPORTER_OTLP_")] })
		if got != c.want {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
}

// The log of a call leads to its trace, if there is one.
func TestLogOfTracedCall(t *testing.T) {
	patient(t)
	l := listen(t)
	defer collector.Serve(l).Close()
	traces, tracer := start(t, Config{Endpoint: "http://" + l.Addr().String()})
	defer func() {
		if err := traces.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	var b strings.Builder
	log, err := logx.New(&b, "text", slog.LevelInfo)
	if err != nil {
		t.Fatal(err)
	}
	for flags, want := range map[string]bool{"01": true, "00": false} {
		b.Reset()
		_ = tracer.Call(calledBy(t, "00-"+traceID+"-"+spanID+"-"+flags), "RunPodSandbox", func(ctx context.Context) error {
			return tracer.Do(ctx, "run pod", "a pod", func(ctx context.Context) error {
				log.InfoContext(ctx, "pod started")
				return nil
			})
		})
		if has := strings.Contains(b.String(), "trace_id="+traceID); has != want {
			t.Errorf("flags %s: %s", flags, b.String())
		}
	}
}

func TestConfig(t *testing.T) {
	if traces, err := New(t.Context(), Config{}, ""); traces != nil || err != nil {
		t.Errorf("off: %v, %v", traces, err)
	}
	empty := filepath.Join(t.TempDir(), "empty.pem")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, cfg := range []Config{
		{Endpoint: "127.0.0.1:4317"},
		{Endpoint: "grpc://127.0.0.1:4317"},
		{Endpoint: "http://127.0.0.1"},
		{Endpoint: "http://127.0.0.1:4317/v1/traces"},
		{Endpoint: "http://user:password@127.0.0.1:4318", Protocol: OverHTTP},
		{Endpoint: "http://127.0.0.1:4318?key=1", Protocol: OverHTTP},
		{Endpoint: "http://127.0.0.1:4318", Protocol: "http/json"},
		{Endpoint: "http://127.0.0.1:4317", CAFile: empty},
		{Endpoint: "https://127.0.0.1:4317", CAFile: empty},
	} {
		if _, err := New(t.Context(), cfg, ""); !errors.Is(err, fault.Invalid) {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
	if _, err := New(t.Context(), Config{Endpoint: "https://127.0.0.1:4317", CAFile: "/no/such"}, ""); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
}
