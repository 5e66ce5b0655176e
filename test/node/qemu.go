package main

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"
)

// qemu is Debian's usual kernel on an emulated processor: five to fifteen times
// slower than user-mode Linux, but with cpuset and hugetlb.
type qemu struct{}

const qemuProgram = "qemu-system-x86_64"

func (qemu) name() string { return "Debian's kernel under emulation" }

func (qemu) processors() int { return 2 }

func (qemu) patience() time.Duration { return 80 * time.Minute }

func (qemu) prepare(context.Context, string, string) error {
	if runtime.GOARCH != "amd64" {
		return fmt.Errorf("the emulated machine is amd64, and cannot run what is built here for %s", runtime.GOARCH)
	}
	if _, err := exec.LookPath(qemuProgram); err != nil {
		return fmt.Errorf("%w: install Debian's qemu-system-x86", err)
	}
	return nil
}

func (qemu) adapt(r *recipe) {
	appArmor(r)
	r.Boots = true
	// The cloud kernel has what a virtual machine needs, and its initrd what
	// mounts the root file system: unpacking more takes time at each boot.
	r.Packages = append(r.Packages, "linux-image-cloud-amd64")
	r.Hooks = []string{`cd "$1" && mkdir -p etc/initramfs-tools/conf.d usr/share/initramfs-tools/modules.d &&
		echo MODULES=list >etc/initramfs-tools/conf.d/bench &&
		printf '%s\n' virtio_pci virtio_blk ext4 >usr/share/initramfs-tools/modules.d/bench`}
	r.Masked = append(r.Masked, "serial-getty@ttyS0.service")
	r.Files["/etc/bench/input"], r.Files["/etc/bench/output"] = "vdb", "vdc"
}

func (qemu) argv(d disks) (argv, env []string) {
	drive := func(file, options string) string {
		return "format=raw,if=virtio,cache=unsafe,file=" + strings.ReplaceAll(file, ",", ",,") + options
	}
	return []string{
		qemuProgram, "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "4096", "-no-reboot",
		"-nodefaults", "-display", "none", "-nic", "none", "-serial", "stdio",
		"-drive", drive(d.base, ",snapshot=on"), "-drive", drive(d.input, ",readonly=on"), "-drive", drive(d.output, ""),
		"-kernel", d.base + kernelSuffix, "-initrd", d.base + initrdSuffix,
		// Page tables are switched at each system call otherwise, which is slow here.
		"-append", "root=/dev/vda rw console=ttyS0 panic=-1 mitigations=off quiet systemd.show_status=no",
	}, []string{"TMPDIR=" + filepath.Dir(d.input)} // for the layer above the root file system, removed by qemu at once
}
