package config

import (
	"slices"
	"testing"
)

func TestReloaded(t *testing.T) {
	n := newNode(t)
	n.write(n.file, "log_level = 'warn'\n[pod]\nnamespaces_dir = '/run/a'\n[runtime.handlers.old]\n[runtime.handlers.runc]\nmin_memory = 5")
	before, err := n.load()
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "differences of equals", len(Differences(before, before)), 0)
	n.write(n.file, "[pod]\nnamespaces_dir = '/run/b'\n[runtime]\ndefault_handler = 'new'\n[runtime.handlers.new]\n[runtime.handlers.runc]\nmin_memory = 6")
	wanted, err := n.load()
	if err != nil {
		t.Fatal(err)
	}
	next := before.Reloaded(wanted)
	equal(t, "what waits", Differences(next, wanted), []string{"pod.namespaces_dir"})
	changed := Differences(before, next)
	for _, key := range []string{"log_level", "runtime.default_handler", "runtime.handlers.new", "runtime.handlers.old", "runtime.handlers.runc.min_memory"} {
		if !slices.Contains(changed, key) {
			t.Errorf("%s is not among %v", key, changed)
		}
	}
	for _, key := range []string{"runtime.handlers.runc.path", "runtime.handlers.runc", "runtime.handlers.new.path"} {
		if slices.Contains(changed, key) {
			t.Errorf("%s is among %v", key, changed)
		}
	}
	equal(t, "origin of what waits", next.Origin("pod.namespaces_dir"), before.Origin("pod.namespaces_dir"))
	equal(t, "origin of what has changed", next.Origin("runtime.default_handler"), wanted.Origin("runtime.default_handler"))
	equal(t, "origin of what is gone", next.Origin("log_level"), "default")
}

// A check is of the configuration that the running server has, whose flags no file has.
func TestFlagsOfARunningServer(t *testing.T) {
	t.Parallel()
	server := &Loaded{Config: Default(), origin: map[string]origin{"runtime.cgroup_driver": {"flag", "--runtime-cgroup-driver"}, "log_level": {"flag", "--log-level"}, "pod.pids_limit": {"file", "f:1"}}}
	server.Config.Runtime.CgroupDriver, server.Config.LogLevel, server.Config.Pod.PidsLimit = "cgroupfs", "debug", 7
	ours := &Loaded{Config: Default(), origin: map[string]origin{"log_level": {"flag", "--log-level"}}}
	ours.Config.LogLevel = "error"
	with, flags := ours.WithFlags(server, server.Settings())
	if got := with.Config.Runtime.CgroupDriver; got != "cgroupfs" || with.Origin("runtime.cgroup_driver") != "flag --runtime-cgroup-driver" {
		t.Errorf("the cgroup driver is %s, of %s", got, with.Origin("runtime.cgroup_driver"))
	}
	if with.Config.LogLevel != "error" || with.Config.Pod.PidsLimit != Default().Pod.PidsLimit || ours.Config.Runtime.CgroupDriver != "systemd" {
		t.Errorf("log level %s, pids limit %d; before, %s", with.Config.LogLevel, with.Config.Pod.PidsLimit, ours.Config.Runtime.CgroupDriver)
	}
	if want := []string{`--runtime-cgroup-driver "cgroupfs"`}; !slices.Equal(flags, want) {
		t.Errorf("flags %q, want %q", flags, want)
	}
}
