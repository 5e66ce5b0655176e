package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"time"
)

// uml is user-mode Linux from Debian's package.
type uml struct{ xstate string }

const (
	umlProgram = "/usr/bin/linux.uml"
	umlModules = "/usr/lib/uml/modules"
)

func (*uml) name() string { return "user-mode Linux" }

func (*uml) arch() string { return runtime.GOARCH }

func (*uml) patience() time.Duration { return 80 * time.Minute }

func (*uml) processors() int { return 1 }

func (u *uml) prepare(ctx context.Context, repo, cache string) error {
	for _, path := range []string{umlProgram, umlModules} {
		if _, err := os.Stat(path); err != nil {
			return fmt.Errorf("%w: install Debian's user-mode-linux", err)
		}
	}
	u.xstate = filepath.Join(cache, "xstate.so")
	return command(ctx, repo, "gcc", "-O2", "-Wall", "-shared", "-fPIC", "-o", u.xstate, "test/node/amx/xstate.c")
}

func (u *uml) adapt(r *recipe) {
	u.boots(r)
	appArmor(r)
}

// appArmor adds what loads profiles into a kernel with AppArmor.
func appArmor(r *recipe) {
	r.Packages = append(r.Packages, "apparmor", "sudo")  // critest calls sudo apparmor_parser
	r.Files["/etc/hosts"] = "127.0.0.1 localhost node\n" // otherwise sudo complains, which critest takes for a failure
}

// boots makes the root file system boot on that kernel.
func (*uml) boots(r *recipe) {
	r.Modules = umlModules
	r.Files["/etc/bench/input"], r.Files["/etc/bench/output"] = "ubdb", "ubdc"
	versions, _ := filepath.Glob(umlModules + "/*") // so that another kernel gets another image
	r.Files["/etc/bench/kernel"] = fmt.Sprintln(versions)
	for _, family := range []string{"iptables", "ip6tables"} { // Debian's UML has no NAT for nftables
		r.Links["/etc/alternatives/"+family] = "/usr/sbin/" + family + "-legacy"
		for _, program := range []string{"-save", "-restore"} {
			r.Links["/etc/alternatives/"+family+program] = "/usr/sbin/" + family + "-legacy" + program
		}
	}
}

func (u *uml) argv(d disks) (argv, env []string) { return u.command(d, "security=apparmor") }

// command returns the kernel's command line, with further options.
func (u *uml) command(d disks, options ...string) (argv, env []string) {
	return append([]string{
		umlProgram, "mem=4096M", "uml_dir=./", "umid=uml",
		"ubd0=" + overlay + "," + d.base, "ubd1r=" + d.input, "ubd2=" + d.output, "root=/dev/ubda", "rw",
		"con=null", "con0=null,fd:1", "quiet", "systemd.show_status=no",
	}, options...), []string{"LD_PRELOAD=" + u.xstate, "TMPDIR=/dev/shm"}
}
