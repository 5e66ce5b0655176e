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

// Text returns an error's text for people: if a sentinel was wrapped more than
// once, or in the middle of a sentence, it stands last in the result or not at
// all.
func Text(err error) string {
	text := ": " + err.Error()
	for _, sentinel := range []error{
		Invalid, NotFound, Exists, Precondition, Unavailable, Timeout, Exhausted, Denied, Unauthenticated, Internal, Unimplemented,
	} {
		if words := ": " + sentinel.Error(); errors.Is(err, sentinel) {
			for strings.Contains(text, words+": ") {
				text = strings.ReplaceAll(text, words+": ", ": ")
			}
		}
	}
	return strings.TrimPrefix(text, ": ")
}

// Plain returns an error's text for people who see no code of it, as on a terminal: without a sentinel
// at its end, if that is not all of it.
func Plain(err error) string {
	text := Text(err)
	for _, sentinel := range []error{Invalid, Precondition} { // the others say something
		if errors.Is(err, sentinel) {
			text = strings.TrimSuffix(text, ": "+sentinel.Error())
		}
	}
	return text
}

// Scarce reports whether a system call has failed because descriptors or memory
// are used up, which says nothing about its object.
func Scarce(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM)
}

// DiskFull reports whether a system call has failed because a disk, or a quota
// on it, is full.
func DiskFull(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }
