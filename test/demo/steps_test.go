package main

import (
	"testing"

	"github.com/crius-run/crius/test/kit/node"
)

// The remains of a pod count, except for what the next one uses again.
func TestWhatStandsIsNotLeftOver(t *testing.T) {
	d := demo{node: &node.Node{ID: "x", Dir: "/tmp/x"}}
	for line, want := range map[string]bool{
		"file: /tmp/x/r/runtime/crun (d---------)":                            true,
		"file: /tmp/x/r/runtime/crun/.cache/seccomp/0123abcd (----------)":    true,
		"file: /tmp/x/r/runtime/crun/0123abcd/status (----------)":            false,
		"file: /tmp/x/r/runtime/runc/.cache/seccomp/0123abcd (----------)":    false,
		"cgroup: /sys/fs/cgroup/x/pods":                                       true,
		"cgroup: /sys/fs/cgroup/x/pods/0123abcd":                              false,
		"mount: /tmp/x/r/runtime/crun/.cache/seccomp/0123abcd (tmpfs, tmpfs)": false,
	} {
		if got := d.standing(line); got != want {
			t.Errorf("%s: got %v, want %v", line, got, want)
		}
	}
}
