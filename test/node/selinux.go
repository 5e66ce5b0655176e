package main

// selinux is the machine of user-mode Linux with SELinux in place of AppArmor:
// enforcing from the boot on, with Debian's policy, and all files labelled.
type selinux struct{ uml }

const seLinuxConfig = "SELINUX=enforcing\nSELINUXTYPE=default\n"

// label gives all files the policy's labels, even on a machine without SELinux.
// The file system's image keeps them.
const label = `chroot "$1" setfiles -m -F /etc/selinux/default/contexts/files/file_contexts /`

func (*selinux) name() string { return "user-mode Linux with SELinux" }

func (s *selinux) adapt(r *recipe) {
	s.boots(r)
	// auditd records what the kernel denies.
	r.Packages = append(r.Packages, "selinux-policy-default", "policycoreutils", "auditd")
	r.Files["/etc/selinux/config"] = seLinuxConfig
	r.Last = append(r.Last, label)
}

func (s *selinux) argv(d disks) (argv, env []string) {
	return s.command(d, "security=selinux", "enforcing=1")
}
