// Package diagnosis is what the checks of a node have to say.
package diagnosis

import "fmt"

// Finding is what a check has to say about one object.
type Finding struct {
	Check  string `json:"check"`
	Status Status `json:"status"`
	Text   string `json:"text"`         // what is the case
	Do     string `json:"do,omitempty"` // what to do about it
}

// Status is how bad it is.
type Status string

// The statuses.
const (
	StatusOK   Status = "ok"
	StatusWarn Status = "warn" // crius works, something that pods may want does not
	StatusFail Status = "FAIL" // crius does not start, no pod does, or something is not as recorded
)

// OK is a finding with which nothing is wrong.
func OK(format string, args ...any) Finding {
	return Finding{Status: StatusOK, Text: fmt.Sprintf(format, args...)}
}

// Warn is a finding with which crius works.
func Warn(do, format string, args ...any) Finding {
	return Finding{Status: StatusWarn, Text: fmt.Sprintf(format, args...), Do: do}
}

// Fail is a finding with which crius or pods do not work.
func Fail(do, format string, args ...any) Finding {
	return Finding{Status: StatusFail, Text: fmt.Sprintf(format, args...), Do: do}
}
