package server

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crius-run/crius/internal/fault"
)

func TestCodes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err  error
		want codes.Code
	}{
		{nil, codes.OK},
		{fault.Invalid, codes.InvalidArgument},
		{fault.NotFound, codes.NotFound},
		{fault.Exists, codes.AlreadyExists},
		{fault.Precondition, codes.FailedPrecondition},
		{fault.Unavailable, codes.Unavailable},
		{fault.Timeout, codes.DeadlineExceeded},
		{fault.Exhausted, codes.ResourceExhausted},
		{fault.Denied, codes.PermissionDenied},
		{fault.Unauthenticated, codes.Unauthenticated},
		{fault.Unimplemented, codes.Unimplemented},
		{context.DeadlineExceeded, codes.DeadlineExceeded},
		{context.Canceled, codes.Canceled},
		{syscall.ENOSPC, codes.ResourceExhausted},
		{syscall.EDQUOT, codes.ResourceExhausted},
		{syscall.ENOMEM, codes.ResourceExhausted},
		{syscall.EMFILE, codes.ResourceExhausted},
		{syscall.ENFILE, codes.ResourceExhausted},
		{syscall.EUSERS, codes.ResourceExhausted},
		{fault.Internal, codes.Internal},
		{errors.New("unheard of"), codes.Unknown},
		{syscall.EIO, codes.Unknown},
		{&badField{"config", "is missing"}, codes.InvalidArgument},
		{&fs.PathError{Op: "write", Path: "/f", Err: syscall.ENOSPC}, codes.ResourceExhausted},
		// The layer that judged an errno or a context knew better.
		{fmt.Errorf("image: %w: %w", fault.NotFound, syscall.ENOSPC), codes.NotFound},
		{fmt.Errorf("stop: %w: %w", fault.Timeout, context.Canceled), codes.DeadlineExceeded},
		{errors.Join(errors.New("first"), fmt.Errorf("second: %w", fault.Denied)), codes.PermissionDenied},
		{status.Error(codes.Aborted, "as it is"), codes.Aborted},
	} {
		for i, err := range []error{c.err, wrapped(c.err)} {
			if _, isStatus := c.err.(interface{ GRPCStatus() *status.Status }); isStatus && i > 0 {
				continue
			}
			if got := status.Code(statusOf(err)); got != c.want {
				t.Errorf("%v: %v, want %v", err, got, c.want)
			}
		}
	}
}

func wrapped(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("outer: %w", fmt.Errorf("inner: %w", err))
}

func TestStatusText(t *testing.T) {
	t.Parallel()
	err := statusOf(fmt.Errorf("runc create: %s: %w", "\xff"+strings.Repeat("noise ", 1<<20), os.ErrPermission))
	text := status.Convert(err).Message()
	if len(text) > maxText || !strings.HasPrefix(text, "runc create: \uFFFD") || !strings.HasSuffix(text, ": permission denied") {
		t.Errorf("%d bytes: %.40q ... %q", len(text), text, text[len(text)-40:])
	}
}

func TestLevels(t *testing.T) {
	t.Parallel()
	for code := codes.OK; code <= codes.Unauthenticated; code++ {
		want := slog.LevelInfo
		switch code {
		case codes.OK, codes.Unimplemented:
			want = slog.LevelDebug
		case codes.Internal, codes.Unknown, codes.ResourceExhausted:
			want = slog.LevelError
		case codes.Unavailable, codes.PermissionDenied, codes.Unauthenticated:
			want = slog.LevelWarn
		}
		if got := levelOf("RunPodSandbox", code); got != want {
			t.Errorf("%v is logged as %v, want %v", code, got, want)
		}
	}
	if got := levelOf("PullImage", codes.Unknown); got != slog.LevelWarn { // a registry that fails, not crius
		t.Errorf("a registry that cannot be used is logged at %s", got)
	}
	if got := levelOf("PullImage", codes.FailedPrecondition); got != slog.LevelWarn {
		t.Errorf("a pull that the node's configuration fails is logged as %v", got)
	}
}
