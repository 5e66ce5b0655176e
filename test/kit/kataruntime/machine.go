package main

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// errNoAnswer is what Kata gets from an agent whose machine is dead.
var errNoAnswer = errors.New("rpc error: code = Unavailable desc = transport is closing")

// machineDied reports whether the container's pod has had a machine that is dead.
func (c call) machineDied() bool {
	bundle, err := os.ReadFile(c.mapping())
	if err != nil {
		return false
	}
	text, err := os.ReadFile(filepath.Join(string(bundle), "config.json"))
	if err != nil {
		return false
	}
	var spec struct{ Annotations map[string]string }
	if err := json.Unmarshal(text, &spec); err != nil {
		return false
	}
	pod := call{id: podOf(spec.Annotations)}
	text, err = os.ReadFile(pod.sandbox(machineProgram))
	if err != nil {
		return false
	}
	stat, err := os.ReadFile(filepath.Join("/proc", string(text), "stat"))
	return err != nil || strings.Contains(string(stat), ") Z ")
}

// withoutMachine does what Kata does for a container whose machine is dead. It
// takes the container for running as long as its kata-shim lives. Once that is
// dead as well Kata cannot even say how the container is, and a forced delete
// succeeds without having removed anything. Here the guest goes at least.
func (c call) withoutMachine() error {
	runs := c.shimRuns()
	switch {
	case c.verb == "state" && runs:
		return c.runc("state")
	case c.verb == "delete" && slices.Contains(c.args, "--force") && !runs:
		return errors.Join(exec.Command("runc", "--root", c.path("runc"), "delete", "--force", c.id).Run(), os.RemoveAll(c.path("bundles", c.id)))
	}
	return errNoAnswer
}

// shimRuns reports whether the kata-shim of the container is alive. Here that is
// the container's first process.
func (c call) shimRuns() bool {
	out, err := exec.Command("runc", "--root", c.path("runc"), "state", c.id).Output()
	var state struct {
		Status string
		PID    int
	}
	if err != nil || json.Unmarshal(out, &state) != nil || state.Status == "stopped" {
		return false
	}
	_, err = os.Stat(filepath.Join("/proc", strconv.Itoa(state.PID)))
	return err == nil
}
