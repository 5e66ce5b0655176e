// Package diagnosis defines the findings of checks of a node.
package diagnosis

import "fmt"

// Finding is the result of a check for one object.
type Finding struct {
	Check  string `json:"check"`
	Status Status `json:"status"`
	Text   string `json:"text"`         // what was found
	Do     string `json:"do,omitempty"` // what to do about it
}

// Status is the severity of a finding.
type Status string

// The statuses.
const (
	StatusOK   Status = "ok"
	StatusWarn Status = "warn" // crius works, but a feature that pods may need does not
	StatusFail Status = "FAIL" // crius or all pods would not start, or the node differs from the records
)

// OK returns a finding for something that is as it should be.
func OK(format string, args ...any) Finding {
	return Finding{Status: StatusOK, Text: fmt.Sprintf(format, args...)}
}

// Warn returns a finding that does not keep crius from working.
func Warn(do, format string, args ...any) Finding {
	return Finding{Status: StatusWarn, Text: fmt.Sprintf(format, args...), Do: do}
}

// Fail returns a finding that keeps crius or pods from working.
func Fail(do, format string, args ...any) Finding {
	return Finding{Status: StatusFail, Text: fmt.Sprintf(format, args...), Do: do}
}
