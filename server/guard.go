package server

import (
	"context"
	"log/slog"
	"path"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/internal/trace"
)

// guardUnary lets tracer observe each call as well, by the name of its method.
func guardUnary(tracer *trace.Tracer) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
		err = tracer.Call(ctx, path.Base(info.FullMethod), func(ctx context.Context) error {
			return guard(ctx, req, func() (err error) {
				resp, err = handler(ctx, req)
				return err
			})
		})
		return resp, err
	}
}

func guardStream(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	return guard(ss.Context(), nil, func() error { return handler(srv, decodedStream{ss}) })
}

// guard surrounds every RPC: log(translate(recover(call))).
func guard(ctx context.Context, req any, call func() error) error {
	start := time.Now()
	method, _ := grpc.Method(ctx)
	err := statusOf(panics.Do(ctx, path.Base(method), call))
	logCall(ctx, req, time.Since(start), err)
	return err
}

func logCall(ctx context.Context, req any, took time.Duration, err error) {
	level := levelOf(status.Code(err))
	if !slog.Default().Enabled(ctx, level) {
		return
	}
	method, _ := grpc.Method(ctx)
	attrs := append(subject(req), slog.String("method", method), slog.Duration("took", took))
	if err != nil {
		attrs = append(attrs, slog.String("code", status.Code(err).String()), slog.String("err", status.Convert(err).Message()))
	}
	slog.LogAttrs(ctx, level, "CRI call", attrs...)
}

// subject tells by name what a request is about.
func subject(req any) []slog.Attr {
	var attrs []slog.Attr
	add := func(key, value string) {
		if value != "" {
			attrs = append(attrs, slog.String(key, brief(value)))
		}
	}
	if r, ok := req.(interface{ GetPodSandboxId() string }); ok {
		add("pod", r.GetPodSandboxId())
	}
	if r, ok := req.(interface{ GetContainerId() string }); ok {
		add("container", r.GetContainerId())
	}
	if r, ok := req.(interface{ GetImage() *cri.ImageSpec }); ok {
		add("image", r.GetImage().GetImage())
	}
	switch r := req.(type) {
	case *cri.RunPodSandboxRequest:
		m := r.GetConfig().GetMetadata()
		add("name", m.GetNamespace()+"/"+m.GetName())
	case *cri.CreateContainerRequest:
		add("name", r.GetConfig().GetMetadata().GetName())
	}
	return attrs
}
