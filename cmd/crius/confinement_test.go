package main

import "testing"

func TestConfinementIsReported(t *testing.T) {
	t.Parallel()
	const appArmor, enforce, seccomp = "sys/module/apparmor/parameters/enabled", "sys/fs/selinux/enforce", "proc/sys/kernel/seccomp/actions_avail"
	for want, c := range map[string]struct {
		toml  string
		files map[string]string
	}{
		"SELinux not enabled on this node; AppArmor not enabled on this node; seccomp missing in the kernel":  {"", nil},
		"SELinux enforcing; AppArmor not enabled on this node; seccomp on, crius's default profile":           {"", map[string]string{enforce: "1", seccomp: ""}},
		"SELinux permissive; AppArmor on, default profile crius-default; seccomp on, crius's default profile": {"", map[string]string{enforce: "0", appArmor: "Y\n", seccomp: ""}},
		"SELinux not used (pod.selinux = false); AppArmor on, no default profile (pod.apparmor_profile); seccomp missing in the kernel": {
			"pod.selinux = false\npod.apparmor_profile = ''", map[string]string{enforce: "1", appArmor: "Y\n"}},
	} {
		n := testNode(t, c.toml, c.files)
		if got := n.checkConfinement(t.Context())[0].Text; got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
