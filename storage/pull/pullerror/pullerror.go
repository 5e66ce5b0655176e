// Package pullerror turns failures of pulls into texts that are safe to show, and errors of
// containers/image into sentinels.
package pullerror

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"reflect"
	"regexp"
	"strings"
	"unicode"

	"github.com/docker/distribution/registry/api/errcode"
	registryv2 "github.com/docker/distribution/registry/api/v2"
	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/signature"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/registry/trust"
)

// ErrWorkerDied is in the error of a pull whose worker ended before its work.
var ErrWorkerDied = errors.New("pull worker died")

// ErrThrottled is in the error of a pull that a registry has asked to wait for longer than it may take.
var ErrThrottled = errors.New("longer than image.progress_timeout")

// Explained marks an error whose text says what to do.
func Explained(err error) error { return explainedError{err} }

type explainedError struct{ error }

func (e explainedError) Unwrap() error { return e.error }

// Shown returns an error with a text that is safe to show and the kinds of err. It is for errors of
// anything but a pull.
func Shown(text string, err error) error {
	return &pullError{text: Cut(Redact(text)), kinds: Kinds(err)}
}

// pullError is the failure of a pull, with a text that is safe to show. It wraps the sentinels by
// which callers decide, not the library's error, which may contain secrets.
type pullError struct {
	text  string
	kinds []error
}

func (e *pullError) Error() string   { return e.text }
func (e *pullError) Unwrap() []error { return e.kinds }

// Failed describes a pull that has failed.
type Failed struct {
	Name    reference.Named
	Secrets []string // what its error must not show
	Login   string   // which credentials were sent, and what to do if these are refused
}

// New returns the failure of a pull, with the kinds of err, what to do about it, and without the
// secrets in its text.
func New(pull Failed, err error) error {
	text := Cut(Hide(Redact(fault.Text(err)), pull.Secrets)) // in this order: half a secret would not be found
	failure := &pullError{kinds: Kinds(err)}
	if advice := advice(reference.Domain(pull.Name), err, failure.kinds, pull.Login); advice != "" {
		text += "; " + Hide(advice, pull.Secrets)
	}
	failure.text = fmt.Sprintf("pull %s: %s", pull.Name, text)
	return failure
}

// Hide replaces secrets in a text.
func Hide(text string, secrets []string) string {
	for _, secret := range secrets {
		if len(secret) > 2 { // else the text would be unreadable, and no secret kept
			text = strings.ReplaceAll(text, secret, "<redacted>")
		}
	}
	return text
}

// Kinds returns the sentinels of err. The library's own types decide; only errors that already
// carry a fault keep it.
func Kinds(err error) []error {
	for _, known := range []error{
		context.Canceled, fault.Invalid, fault.NotFound, fault.Timeout, fault.Precondition,
		fault.Denied, fault.Unavailable, fault.Exhausted,
	} {
		if errors.Is(err, known) {
			return append([]error{known}, besides(err)...)
		}
	}
	var refused signature.PolicyRequirementError
	var unauthorized docker.ErrUnauthorizedForCredentials
	var coded errcode.ErrorCoder
	switch {
	case errors.As(err, &refused):
		return []error{fault.Denied, trust.ErrSignature}
	case errors.As(err, &unauthorized):
		return []error{fault.Unauthenticated}
	case errors.As(err, &coded):
		return codeKind(coded)
	case errors.Is(err, docker.ErrTooManyRequests), errors.Is(err, gzip.ErrHeader): // of an answer: layers are decompressed elsewhere
		return []error{fault.Unavailable}
	case fault.DiskFull(err):
		return append([]error{fault.Exhausted}, besides(err)...)
	}
	if status := StatusOf(err); status != 0 {
		return statusKind(status)
	}
	if unreachable(err) {
		return []error{fault.Unavailable}
	}
	return nil
}

// besides returns the errors by which callers decide in addition to a fault.
func besides(err error) (kinds []error) {
	for _, kind := range []error{trust.ErrSignature, ErrWorkerDied, unix.ENOSPC, unix.EDQUOT} {
		if errors.Is(err, kind) {
			kinds = append(kinds, kind)
		}
	}
	return kinds
}

// codeKind decides by the error codes of the distribution specification, and for other codes by the
// HTTP status of the code.
func codeKind(coded errcode.ErrorCoder) []error {
	switch code := coded.ErrorCode(); {
	case code == registryv2.ErrorCodeManifestUnknown, code == registryv2.ErrorCodeNameUnknown, code == registryv2.ErrorCodeBlobUnknown:
		return []error{fault.NotFound}
	case code == registryv2.ErrorCodeNameInvalid, code == registryv2.ErrorCodeTagInvalid:
		return []error{fault.Invalid}
	case code == errcode.ErrorCodeUnauthorized:
		return []error{fault.Unauthenticated}
	case code == errcode.ErrorCodeDenied:
		return []error{fault.Denied}
	case uncoded(coded) && strings.Contains(strings.ToLower(fmt.Sprint(coded)), "not found"): // Harbor and others say so only in words
		return []error{fault.NotFound}
	case uncoded(coded):
		return []error{fault.Denied}
	default:
		return statusKind(code.Descriptor().HTTPStatusCode)
	}
}

// uncoded reports whether a registry has refused a request with a code that the distribution specification does not
// have, or with none. The library reads codes only from answers with status 4xx, and does not keep the status.
func uncoded(coded errcode.ErrorCoder) bool {
	return coded.ErrorCode().Descriptor().Code == errcode.ErrorCodeUnknown
}

// statusKind decides by an HTTP status that is no answer to the request. Those below 400 come from something that is
// not a registry, or is broken.
func statusKind(status int) []error {
	switch status {
	case http.StatusNotFound, http.StatusGone:
		return []error{fault.NotFound}
	case http.StatusUnauthorized:
		return []error{fault.Unauthenticated}
	case http.StatusProxyAuthRequired, http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests:
		return []error{fault.Unavailable}
	}
	if status < http.StatusBadRequest || status >= http.StatusInternalServerError {
		return []error{fault.Unavailable}
	}
	return []error{fault.Denied}
}

// StatusOf returns the HTTP status in an error's chain, or 0. One of the two types that have it is
// not exported, so its field is read by reflection.
func StatusOf(err error) int {
	if field := fieldOf(err, "StatusCode"); field.IsValid() && field.CanInt() {
		return int(field.Int())
	}
	return 0
}

// responseOf returns the body of an answer with an HTTP status that is an error, if that is not what the
// distribution specification wants. Its type is not exported either.
func responseOf(err error) []byte {
	if field := fieldOf(err, "Response"); field.IsValid() && field.Kind() == reflect.Slice && field.Type().Elem().Kind() == reflect.Uint8 {
		return field.Bytes()
	}
	return nil
}

// fieldOf returns a field of the first struct in an error's chain that has it.
func fieldOf(err error, name string) (field reflect.Value) {
	for ; err != nil && !field.IsValid(); err = errors.Unwrap(err) {
		if v := reflect.Indirect(reflect.ValueOf(err)); v.Kind() == reflect.Struct {
			field = v.FieldByName(name)
		}
	}
	return field
}

func unreachable(err error) bool {
	var network net.Error // dial, DNS, TLS and broken connections, which all come in a *url.Error
	found := errors.As(err, &network)
	_, anyCall := network.(unix.Errno) // has the methods of a net.Error whatever has failed: a disk, for instance
	return found && !anyCall ||
		errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, unix.ECONNRESET)
}

const maxText = 4096 // bytes; a registry writes part of it

var (
	// quotedURL ends with its quotes, whatever its query has in it. It may have no scheme, and without a host it has a
	// query.
	quotedURL = regexp.MustCompile(`(?:^|[^"\\])"(?:(?:[a-zA-Z][a-zA-Z0-9+.-]*:)?//|/(?:[^"\\?]|\\.)*\?)(?:[^"\\]|\\.)*"`)
	// anyURL may have backslashes before slashes, as in JSON.
	anyURL  = regexp.MustCompile(`[a-zA-Z][a-zA-Z0-9+.-]*:\\*/\\*/[^\s"<>]*[^\s"<>\\]`)
	slashes = regexp.MustCompile(`\\+/`)
	// queries are those of other addresses, such as Location: /login?next=%2F.
	queries = regexp.MustCompile(`\?[^\s"<>?=]*=[^\s"<>]*`)
	// heuristics is what the library adds to a broken connection for its developers.
	heuristics = regexp.MustCompile(`\(heuristic tuning data: [^()]*\): `)
	// samples are beginnings of answers that the library quotes: one that it cannot parse may have a token.
	samples = regexp.MustCompile(`(body start )"(?:[^"\\]|\\.)*token(?:[^"\\]|\\.)*"`)
	bearers = regexp.MustCompile(`(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}`)
)

// Redact makes a text safe to show: without users and queries in URLs, which may be tokens and
// signatures, without values of Authorization, and without anything that would confuse a terminal
// or protobuf.
func Redact(text string) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	text = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, text)
	text = quotedURL.ReplaceAllStringFunc(text, func(found string) string {
		before, quoted, _ := strings.Cut(found, `"`)
		return before + `"` + redactURL(strings.TrimSuffix(quoted, `"`)) + `"`
	})
	text = anyURL.ReplaceAllStringFunc(text, redactURL)
	text = queries.ReplaceAllString(text, "?<redacted>")
	text = heuristics.ReplaceAllString(text, "")
	text = samples.ReplaceAllString(text, `$1"<redacted>"`)
	return bearers.ReplaceAllString(text, "$1 <redacted>")
}

// Cut shortens a text to the length that is shown.
func Cut(text string) string {
	if len(text) > maxText {
		text = strings.ToValidUTF8(text[:maxText], "") + "..."
	}
	return text
}

// Warning makes the text of a registry for users safe to show, on one line of bounded length.
func Warning(text string, secrets []string) string {
	const looked, shown = 8 << 10, 256 // bytes
	if len(text) > looked {
		text = text[:looked]
	}
	text = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, Hide(Redact(text), secrets))
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > shown {
		text = strings.ToValidUTF8(text[:shown], "") + "..."
	}
	return text
}

func redactURL(raw string) string {
	if path, _, _ := strings.Cut(raw, "?"); strings.HasPrefix(raw, "/") && !strings.HasPrefix(raw, "//") {
		return path + "?<redacted>"
	}
	u, err := url.Parse(slashes.ReplaceAllString(raw, "/"))
	if err != nil {
		return "<redacted URL>"
	}
	u.User = nil
	u.Fragment = ""
	if u.RawQuery != "" {
		u.RawQuery = "<redacted>"
	}
	return strings.ReplaceAll(u.String(), "%3Credacted%3E", "<redacted>")
}
