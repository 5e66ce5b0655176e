package main

import "strings"

// A knownFailure is a spec that fails here for a reason that is not crius's, or that crius
// has not mended.
type knownFailure struct {
	spec string // a part of its name
	why  string
	peer bool // containerd fails it as well
}

// knownFailures are all of them. A spec that fails and is not here ends a run with exit
// code 1.
var knownFailures = []knownFailure{
	{"PrivilegedPod should enable privileged commands", "it makes an interface of the type dummy, which not every kernel has", true},
}

// whyKnown is why a spec is known to fail with a runtime, "" if it is not.
func whyKnown(name, runtime string) string {
	for _, k := range knownFailures {
		if strings.Contains(name, k.spec) && (k.peer || runtime == withCrius) {
			return k.why
		}
	}
	return ""
}
