package main

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// qemu is Debian's usual kernel on an emulated processor: five to fifteen times
// slower than user-mode Linux, but with cpuset and hugetlb.
type qemu struct {
	processor string   // as named by Go and Debian
	program   string   // the emulator
	from      string   // Debian's package of the program
	board     []string // the program's options for the emulated machine
	console   string   // the kernel's name for the serial port
}

var (
	amd64 = qemu{"amd64", "qemu-system-x86_64", "qemu-system-x86", []string{"-cpu", "max"}, "ttyS0"}
	// The processor max signs pointers, which takes most of the time under
	// emulation.
	arm64 = qemu{"arm64", "qemu-system-aarch64", "qemu-system-arm", []string{"-machine", "virt", "-cpu", "neoverse-n1"}, "ttyAMA0"}
)

func (q qemu) name() string { return "Debian's kernel for " + q.processor + " under emulation" }

func (q qemu) arch() string { return q.processor }

func (qemu) processors() int { return 2 }

func (qemu) patience() time.Duration { return 80 * time.Minute }

func (q qemu) prepare(context.Context, string, string) error {
	if _, err := exec.LookPath(q.program); err != nil {
		return fmt.Errorf("%w: install Debian's %s", err, q.from)
	}
	return nil
}

func (q qemu) adapt(r *recipe) {
	appArmor(r)
	r.Boots = true
	// The cloud kernel has what a virtual machine needs, and its initrd what
	// mounts the root file system: unpacking more takes time at each boot.
	r.Packages = append(r.Packages, "linux-image-cloud-"+q.processor)
	r.Hooks = []string{`cd "$1" && mkdir -p etc/initramfs-tools/conf.d usr/share/initramfs-tools/modules.d &&
		echo MODULES=list >etc/initramfs-tools/conf.d/bench &&
		printf '%s\n' virtio_pci virtio_blk ext4 >usr/share/initramfs-tools/modules.d/bench`}
	r.Masked = append(r.Masked, "serial-getty@"+q.console+".service")
	r.Files["/etc/bench/input"], r.Files["/etc/bench/output"] = "vdb", "vdc"
}

func (q qemu) argv(d disks) (argv, env []string) {
	drive := func(file, options string) string {
		return "format=raw,if=virtio,cache=unsafe,file=" + strings.ReplaceAll(file, ",", ",,") + options
	}
	argv = append([]string{q.program}, q.board...)
	return append(argv,
		"-accel", "tcg,thread=multi", "-smp", "2", "-m", "4096", "-no-reboot",
		"-nodefaults", "-display", "none", "-nic", "none", "-serial", "stdio",
		"-drive", drive(d.base, ",snapshot=on"), "-drive", drive(d.input, ",readonly=on"), "-drive", drive(d.output, ""),
		"-kernel", d.base+kernelSuffix, "-initrd", d.base+initrdSuffix,
		// Otherwise page tables are switched at each system call, which is slow
		// here.
		"-append", "root=/dev/vda rw console="+q.console+" panic=-1 mitigations=off quiet systemd.show_status=no",
	), []string{"TMPDIR=" + filepath.Dir(d.input)} // for the layer above the root file system, removed by qemu at once
}
