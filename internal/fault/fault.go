// Package fault names the ways in which an operation can fail, independent of
// any transport.
//
// Packages below the server wrap one of these sentinels with %w, add the noun
// of the step that failed and, where an operator can do something about it,
// what to do. Callers decide with errors.Is, never by text. Only
// server/faults.go knows which gRPC code each becomes.
package fault

import "errors"

var (
	// Invalid: the request itself is wrong and will stay wrong.
	Invalid = errors.New("invalid argument")
	// NotFound: no object of that name or id.
	NotFound = errors.New("not found")
	// Exists: the name is taken by a different object.
	Exists = errors.New("already exists")
	// Precondition: the object is in a state that does not allow this verb.
	Precondition = errors.New("failed precondition")
	// Unavailable: something crius depends on is not there now; a retry may do.
	Unavailable = errors.New("unavailable")
	// Timeout: a time limit ended the work.
	Timeout = errors.New("deadline exceeded")
	// Exhausted: a limit or a resource (disk, memory, ids) is used up.
	Exhausted = errors.New("resource exhausted")
	// Denied: a policy or a credential forbids it.
	Denied = errors.New("permission denied")
	// Unauthenticated: a registry wants (other) credentials.
	Unauthenticated = errors.New("unauthenticated")
	// Unimplemented: crius, or the handler asked for, cannot do this.
	Unimplemented = errors.New("unimplemented")
)
