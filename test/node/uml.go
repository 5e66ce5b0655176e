package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// uml is user-mode Linux from Debian's package.
type uml struct{ xstate string }

const (
	umlProgram = "/usr/bin/linux.uml"
	umlModules = "/usr/lib/uml/modules"
)

func (*uml) name() string { return "user-mode Linux" }

func (*uml) patience() time.Duration { return 40 * time.Minute }

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

func (*uml) adapt(r *recipe) {
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

func (u *uml) argv(d disks) (argv, env []string) {
	return []string{
		umlProgram, "mem=4096M", "uml_dir=./", "umid=uml",
		"ubd0=" + overlay + "," + d.base, "ubd1r=" + d.input, "ubd2=" + d.output, "root=/dev/ubda", "rw",
		"con=null", "con0=null,fd:1", "quiet", "systemd.show_status=no",
	}, []string{"LD_PRELOAD=" + u.xstate, "TMPDIR=/dev/shm"}
}
