// Package fault names the ways in which an operation can fail, independent of
// any transport.
//
// Packages below the server wrap one of these sentinels with %w, add the noun
// of the step that failed and, if an operator can do something about it, what
// to do. Callers decide with errors.Is, never by text. Only server/faults.go
// knows the gRPC code for each.
package fault

import (
	"errors"
	"strings"

	"golang.org/x/sys/unix"
)

var (
	// Invalid means that the request itself is wrong and will stay wrong.
	Invalid = errors.New("invalid argument")
	// NotFound means that there is no object of that name or id.
	NotFound = errors.New("not found")
	// Exists means that the name is taken by a different object.
	Exists = errors.New("already exists")
	// Precondition means that the object is in a state that does not allow this verb.
	Precondition = errors.New("failed precondition")
	// Unavailable means that something on which crius depends is not there now; a
	// retry may succeed.
	Unavailable = errors.New("unavailable")
	// Timeout means that a time limit ended the work.
	Timeout = errors.New("deadline exceeded")
	// Exhausted means that a limit or a resource (disk, memory, ids) is used up.
	Exhausted = errors.New("resource exhausted")
	// Denied means that a policy or a credential forbids it.
	Denied = errors.New("permission denied")
	// Unauthenticated means that a registry requires (other) credentials.
	Unauthenticated = errors.New("unauthenticated")
	// Internal means a bug in crius; it comes from a recovered panic.
	Internal = errors.New("internal error (panic); stack trace in the log")
	// Unimplemented means that crius, or the requested handler, cannot do this.
	Unimplemented = errors.New("unimplemented")
)

// kinds are the sentinels whose words say nothing that the error around them does not.
var kinds = []error{Invalid, NotFound, Exists, Precondition, Unavailable, Timeout, Exhausted, Denied, Unauthenticated, Unimplemented}

// Text returns an error's text for people: without the words of the sentinels that are wrapped in it,
// unless they are all of it, since the rest says what is wrong. Callers get the kind by other means,
// such as a gRPC code.
func Text(err error) string {
	text := ": " + err.Error()
	for _, kind := range kinds {
		for range count(err, kind) {
			text = cut(text, ": "+kind.Error())
		}
	}
	return strings.TrimPrefix(text, ": ")
}

// count returns how often kind is wrapped in err.
func count(err, kind error) (n int) {
	if err == kind { //nolint:errorlint // errors.Is does not count
		return 1
	}
	switch wrapper := err.(type) { //nolint:errorlint // errors.As finds one
	case interface{ Unwrap() error }:
		return count(wrapper.Unwrap(), kind)
	case interface{ Unwrap() []error }:
		for _, part := range wrapper.Unwrap() {
			n += count(part, kind)
		}
	}
	return n
}

// cut removes the last occurrence of words that ends a part of text, unless it is all of the text. Texts of
// others, which may have the same words, come earlier.
func cut(text, words string) string {
	for at := len(text); ; {
		at = strings.LastIndex(text[:at], words)
		if at < 0 || at == 0 && len(words) == len(text) {
			return text
		}
		if rest := text[at+len(words):]; rest == "" || strings.HasPrefix(rest, ": ") || rest[0] == '\n' {
			return text[:at] + rest
		}
	}
}

// Scarce reports whether a system call has failed because descriptors or memory
// are used up, which says nothing about its object.
func Scarce(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM)
}

// DiskFull reports whether a system call has failed because a disk, or a quota
// on it, is full.
func DiskFull(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }
