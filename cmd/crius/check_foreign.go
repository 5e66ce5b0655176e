package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/storage/foreign"
)

// checkForeign lists the pods that CRI-O has left in the image store. Only an operator
// removes those.
func (n *node) checkForeign(ctx context.Context) []finding {
	if os.Geteuid() != 0 {
		return nil // checkPrivileges reports it
	}
	list, err := asked(ctx, func(ctx context.Context) (list []foreign.Container, err error) {
		who, release, err := findLooker(ctx, n.config.Config)
		if err != nil {
			return nil, err
		}
		defer closing(&err, release)
		return who.Foreign(ctx, false)
	})
	if err != nil {
		return []finding{warn("", "cannot look for containers of other runtimes in the image store: %v", err)}
	}
	return foreignFindings(list)
}

func foreignFindings(list []foreign.Container) []finding {
	list = slices.DeleteFunc(list, func(c foreign.Container) bool { return c.Runtime != foreign.CRIO })
	if len(list) == 0 {
		return []finding{ok("CRI-O has no containers in the image store")}
	}
	var pods []finding
	for first := 0; first < len(list); { // sorted by pod
		next := first + 1
		for next < len(list) && list[next].PodID == list[first].PodID {
			next++
		}
		pods = append(pods, foreignPod(list[first:next]))
		first = next
	}
	has := fmt.Sprintf("CRI-O has %s of %s in the image store", counted(len(list), "container", "containers"), counted(len(pods), "pod", "pods"))
	summary := ok("%s, all in use", has)
	if slices.ContainsFunc(pods, func(f finding) bool { return f.Status != statusOK }) {
		summary = warn("crius wipe foreign removes those that are not in use, if CRI-O is not to come back",
			"%s, which take space and keep their images from being removed", has)
	}
	return append([]finding{summary}, pods...)
}

// foreignPod returns the finding for a pod of CRI-O with its containers, oldest first.
func foreignPod(containers []foreign.Container) finding {
	var names []string
	kept := ""
	for _, c := range containers {
		names = append(names, c.Name)
		if c.Kept != "" {
			kept = c.Kept
		}
	}
	text := fmt.Sprintf("pod %s (%.13s), created %s ago: %s", containers[0].Pod, containers[0].PodID, cli.Brief(time.Since(containers[0].Created)), strings.Join(names, ", "))
	if kept != "" {
		return ok("%s; in use: %s", text, kept)
	}
	return warn("", "%s", text)
}
