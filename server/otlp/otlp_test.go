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
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"

	"github.com/crius-run/crius/internal/fault"
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
