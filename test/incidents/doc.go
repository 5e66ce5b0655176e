// Package incidents breaks a node in the ways that docs/troubleshoot.md is about, and
// compares what people can see: the event of the pod, which has the error of the CRI call or the
// message of the container's status, crius status, crius check, and the log from warning on. For
// each incident one of them, read alone, names the cause: that is the one step to it.
package incidents
