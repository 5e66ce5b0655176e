package server

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"syscall"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	crierrors "k8s.io/cri-api/pkg/errors"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/storage"
)

// faultCodes maps an error to the status code of the first cause found in it.
// Sentinels come before errnos, because they are the judgement of code that
// knew the context.
var faultCodes = []struct {
	cause error
	code  codes.Code
}{
	{fault.Internal, codes.Internal},
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
}

// codeOf returns Unknown for an unclassified error, as other runtimes do:
// Internal is reserved for bugs of crius.
func codeOf(err error) codes.Code {
	for _, f := range faultCodes {
		if errors.Is(err, f.cause) {
			return f.code
		}
	}
	return codes.Unknown
}

// statusOf converts any error to one that gRPC can send. It returns an error
// that is already a status (of an unimplemented RPC, or from pullFault)
// unchanged.
func statusOf(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := err.(interface{ GRPCStatus() *status.Status }); ok {
		return err
	}
	return status.Error(codeOf(err), clip(fault.Text(err)))
}

// createFault is statusOf for CreateContainer and RunPodSandbox: the kubelet counts the failures
// of image volumes by the first word of the message, and users know a refused
// signature by the word that PullImage uses.
func createFault(err error) error {
	volume, signature := errors.Is(err, pod.ErrImageVolume), errors.Is(err, storage.ErrSignature)
	if !volume && !signature {
		return err
	}
	text, code := fault.Text(err), codeOf(err)
	if signature {
		text, code = crierrors.ErrSignatureValidationFailed.Error()+": "+text, codes.Unknown
	}
	if volume {
		text = crierrors.ErrImageVolumeMountFailed.Error() + ": " + text
	}
	return status.Error(code, clip(text))
}

// profileFault is statusOf for PullSecurityProfile: like pullFault, and the
// kubelet does not retry what is wrong with the request or the artifact.
func profileFault(err error) error {
	if known := pullFault(err); known != err { //nolint:errorlint // it returns others as they are
		return known
	}
	if codeOf(err) != codes.InvalidArgument {
		return err
	}
	return status.Error(codes.InvalidArgument, clip(crierrors.ErrSecurityProfileInvalid.Error()+": "+fault.Text(err)))
}

// pullFault is statusOf for PullImage. The kubelet recognises two causes by the
// first word of the message, and looks for it only in errors of code Unknown
// (k8s.io/cri-api/pkg/errors). An error because the pull worker died is not an
// unavailable registry.
func pullFault(err error) error {
	if errors.Is(err, storage.ErrWorkerDied) {
		return err
	}
	for _, known := range []struct{ cause, reason error }{
		{storage.ErrSignature, crierrors.ErrSignatureValidationFailed},
		{fault.Unavailable, crierrors.ErrRegistryUnavailable},
	} {
		if errors.Is(err, known.cause) {
			return status.Error(codes.Unknown, clip(known.reason.Error()+": "+fault.Text(err)))
		}
	}
	return err
}

// levelOf returns the log level of an RPC that ended with code: a client's
// mistake or impatience is not news for the operator, a node that cannot work
// is. Kubelets try unimplemented RPCs over and over. What a pull lacks is part
// of the node's configuration, and Unknown is what pullFault makes of a
// registry that fails.
func levelOf(method string, code codes.Code) slog.Level {
	if (method == "PullImage" || method == "PullSecurityProfile") && (code == codes.FailedPrecondition || code == codes.Unknown) {
		return slog.LevelWarn
	}
	switch code {
	case codes.OK, codes.Unimplemented:
		return slog.LevelDebug
	case codes.Internal, codes.Unknown, codes.ResourceExhausted:
		return slog.LevelError
	case codes.Unavailable, codes.PermissionDenied, codes.Unauthenticated:
		return slog.LevelWarn
	default:
		return slog.LevelInfo
	}
}

// maxText bounds error and status texts, in bytes: they may quote the output of
// a runtime, plugin or registry, and travel in HTTP/2 headers and events.
const maxText = 8 << 10

// clip makes text fit for a message: valid UTF-8 of at most maxText bytes. It
// drops the middle, because the failed step is named at the beginning and the
// output of the failed program is quoted at the end.
func clip(text string) string {
	text = valid(text)
	if len(text) <= maxText {
		return text
	}
	const gap = " [...] "
	half := (maxText - len(gap)) / 2
	return strings.ToValidUTF8(text[:half]+gap+text[len(text)-half:], "?") // replace truncated runes
}

// valid replaces invalid UTF-8, which protobuf refuses to encode.
func valid(text string) string {
	return strings.ToValidUTF8(text, "\uFFFD")
}
