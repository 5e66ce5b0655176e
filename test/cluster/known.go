package main

import "strings"

// A knownFailure is a spec that fails here for a reason outside of crius, or
// that crius has not fixed.
type knownFailure struct {
	spec string // a part of its name
	says string // a part of its failure message
	why  string
	peer bool // containerd fails it as well
}

// knownFailures are all of them. A failed spec that is not here ends a run with
// exit code 1.
var knownFailures = []knownFailure{
	{"PrivilegedPod should enable privileged commands", "Operation not supported", "it makes an interface of the type dummy, which not every kernel has", true},
	{"Pod InPlace Resize", "oom_score_adj value 0 not equal to expected -99", "the machine lets nobody lower an OOM score (CAP_SYS_RESOURCE)", true},
}

// whyKnown returns why a spec is known to fail with a runtime, "" if it is not.
func whyKnown(s spec, runtime string) string {
	for _, k := range knownFailures {
		if strings.Contains(s.name, k.spec) && strings.Contains(s.output, k.says) && (k.peer || runtime == withCrius) {
			return k.why
		}
	}
	return ""
}
