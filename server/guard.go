package server

import (
	"context"
	"log/slog"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/internal/trace"
)

// guardUnary also lets tracer observe each call, by the name of its method.
func guardUnary(tracer *trace.Tracer, engine Engine, unknown *unknownGuard) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
		err = tracer.Call(ctx, path.Base(info.FullMethod), func(ctx context.Context) error {
			return guard(ctx, req, engine, func() (err error) {
				if err := unknown.check(ctx, req); err != nil {
					return err
				}
				resp, err = handler(ctx, req)
				return err
			})
		})
		return resp, err
	}
}

func (g *unknownGuard) guardStream(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	return guard(ss.Context(), nil, nil, func() error { return handler(srv, decodedStream{ss, g}) })
}

// guard surrounds every RPC: log(translate(recover(call))).
func guard(ctx context.Context, req any, engine Engine, call func() error) error {
	start := time.Now()
	method, _ := grpc.Method(ctx)
	err := withNames(statusOf(panics.Do(ctx, path.Base(method), call)), engine)
	attrs := subject(req)
	if err != nil {
		attrs = append(attrs, names(req, engine)...)
	}
	logCall(ctx, attrs, time.Since(start), err)
	return err
}

func logCall(ctx context.Context, attrs []slog.Attr, took time.Duration, err error) {
	method, _ := grpc.Method(ctx)
	level := levelOf(path.Base(method), status.Code(err))
	if !slog.Default().Enabled(ctx, level) {
		return
	}
	message := "CRI call"
	attrs = append(attrs, slog.String("method", method), slog.Duration("took", took))
	if err != nil {
		message = inWords(path.Base(method)) + " failed"
		attrs = append(attrs, slog.String("code", status.Code(err).String()), slog.String("err", status.Convert(err).Message()))
	}
	slog.LogAttrs(ctx, level, message, attrs...) //nolint:sloglint // a word to search for per method
}

// inWords returns the name of a method as used in a sentence: PullImage is
// "pull image".
func inWords(method string) string {
	var b strings.Builder
	for i, r := range method {
		if unicode.IsUpper(r) && i > 0 {
			b.WriteByte(' ')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}

// names returns the names of the pod and the container whose id a request has,
// if they exist: the log of the kubelet and the API use these names.
func names(req any, engine Engine) []slog.Attr {
	if engine == nil {
		return nil
	}
	var attrs []slog.Attr
	podID := ""
	if r, ok := req.(interface{ GetPodSandboxId() string }); ok {
		podID = r.GetPodSandboxId()
	}
	if r, ok := req.(interface{ GetContainerId() string }); ok && r.GetContainerId() != "" {
		if c, err := engine.Container(r.GetContainerId()); err == nil && c != nil {
			podID = c.SandboxID
			attrs = append(attrs, slog.String("container_name", brief(c.Config.GetMetadata().GetName())))
		}
	}
	if podID == "" {
		return attrs
	}
	if p, err := engine.Sandbox(podID); err == nil && p != nil {
		m := p.Config.GetMetadata()
		attrs = append(attrs, slog.String("pod_name", brief(m.GetNamespace()+"/"+m.GetName())))
	}
	return attrs
}

// wholeID matches the id of a pod or container.
var wholeID = regexp.MustCompile(`\b[0-9a-f]{64}\b`)

// withNames adds to each id in the text of a status the name of the pod or container that has it:
// whoever reads the text, on a terminal or as an event, knows the names only.
func withNames(err error, engine Engine) error {
	if err == nil || engine == nil {
		return err
	}
	answer := status.Convert(err).Proto()
	text := withNamesIn(answer.GetMessage(), engine)
	if text == answer.GetMessage() {
		return err
	}
	answer.Message = clip(text)
	return status.ErrorProto(answer)
}

// TextFor returns a function for the texts of errors that do not pass through this package: they name
// pods and containers as those of calls do.
func TextFor(engine Engine) func(err error) string {
	return func(err error) string { return clip(withNamesIn(fault.Text(err), engine)) }
}

// withNamesIn returns a text with the name of the pod or container after each id.
func withNamesIn(rest string, engine Engine) string {
	text, at := strings.Builder{}, 0
	var done []string
	for _, found := range wholeID.FindAllStringIndex(rest, -1) {
		text.WriteString(rest[at:found[1]])
		at = found[1]
		id := rest[found[0]:at]
		if slices.Contains(done, id) || strings.HasPrefix(rest[at:], " (") {
			continue
		}
		if name := nameOf(id, engine); name != "" {
			text.WriteString(" (" + name + ")")
		}
		done = append(done, id)
	}
	return text.String() + rest[at:]
}

// nameOf returns NAMESPACE/POD or NAMESPACE/POD/CONTAINER; empty: nothing has the id.
func nameOf(id string, engine Engine) string {
	ofPod := func(id string) string {
		p, err := engine.Sandbox(id)
		if err != nil || p == nil {
			return ""
		}
		return brief(p.Config.GetMetadata().GetNamespace() + "/" + p.Config.GetMetadata().GetName())
	}
	if c, err := engine.Container(id); err == nil && c != nil {
		return ofPod(c.SandboxID) + "/" + brief(c.Config.GetMetadata().GetName())
	}
	return ofPod(id)
}

// subject returns the names of a request's object.
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
		add("pod_name", m.GetNamespace()+"/"+m.GetName())
	case *cri.CreateContainerRequest:
		add("container_name", r.GetConfig().GetMetadata().GetName())
	case *cri.PullImageRequest:
		if m := r.GetSandboxConfig().GetMetadata(); m != nil {
			add("pod_name", m.GetNamespace()+"/"+m.GetName())
		}
	}
	return attrs
}
