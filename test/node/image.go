package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"
)

// recipe is the input for a root file system.
type recipe struct {
	Suite    string
	Arch     string // the processor
	Packages []string
	Modules  string            // directory with the modules of an external kernel
	Boots    bool              // has its own kernel, which is kept beside the image
	Hooks    []string          // shell scripts that run before Packages are installed; $1 is the root
	Last     []string          // shell scripts that run once everything is there; $1 is the root
	Files    map[string]string // to write, by path
	Links    map[string]string // symbolic links to make, by path
	Masked   []string          // units that only cost time
}

// Size of the disk. Only used blocks take space.
const diskSize = 10 << 30

// unit starts the guest's program as soon as the machine is up, and powers the
// machine off when the program has ended in any way.
const unit = `[Unit]
Description=the test that this machine is for
After=dbus.service systemd-user-sessions.service
SuccessAction=poweroff-force
FailureAction=poweroff-force
[Service]
Type=oneshot
TimeoutStartSec=infinity
WorkingDirectory=/bench
ExecStart=/bin/sh -c 'tar -xf /dev/$$(cat /etc/bench/input) && ./guest; tar -cf /dev/$$(cat /etc/bench/output) --exclude=critest --exclude=tmp out; sync'
StandardOutput=journal+console
StandardError=journal+console
`

func (b *bench) recipe() recipe {
	r := recipe{
		Suite: b.suite, Arch: b.machine.arch(),
		Packages: []string{
			"systemd", "systemd-sysv", "dbus", "udev",
			"iproute2", "iptables", "nftables", "conntrack", "kmod", "procps", "util-linux",
			"runc", "crun", "containernetworking-plugins", "golang-github-containers-common", "ca-certificates",
		},
		Files: map[string]string{
			"/etc/systemd/system/bench.service": unit,
			"/etc/fstab":                        "",
			"/etc/hostname":                     "node\n",
			"/bench/.keep":                      "",
		},
		Links: map[string]string{
			"/etc/systemd/system/multi-user.target.wants/bench.service": "../bench.service",
			"/etc/systemd/system/default.target":                        "/lib/systemd/system/multi-user.target",
		},
		Masked: []string{
			"getty@tty1.service", "systemd-udev-trigger.service", "systemd-hwdb-update.service", "ldconfig.service", "systemd-journal-catalog-update.service",
			"systemd-update-done.service", "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "fstrim.timer", "e2scrub_all.timer",
		},
	}
	if b.suite != "bookworm" {
		r.Packages = append(r.Packages, "util-linux-extra") // ipcmk, which critest needs
	}
	if b.mode == "bench" {
		r.Packages = append(r.Packages, "conmon", "containerd")
		r.Masked = append(r.Masked, "containerd.service")
	}
	b.machine.adapt(&r)
	return r
}

// baseImage returns the disk image of a recipe, made once and then kept.
// Machines write to a layer above it.
func baseImage(ctx context.Context, cache string, r recipe) (_ string, err error) {
	key := fmt.Sprintf("%x", sha256.Sum256(fmt.Appendf(nil, "%v", r)))[:12]
	path := filepath.Join(cache, "base-"+key+".img")
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	fmt.Println("builds the machine's root file system, which takes some minutes, but only once")
	if err := runPrograms(ctx, cache, r.Arch); err != nil {
		return "", err
	}
	root, err := os.MkdirTemp(cache, "root-")
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(root)) }()
	argv := []string{
		"env", "SYSTEMD_HWDB_UPDATE_BYPASS=1", // minutes under emulation, for hardware that the machine lacks
		"mmdebstrap", "--quiet", "--variant=minbase", "--architectures=" + r.Arch, "--include=" + strings.Join(r.Packages, ","),
		"--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/locale/*",
		"--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-include=/usr/share/doc/crius/*",
	}
	for _, hook := range r.Hooks {
		argv = append(argv, "--essential-hook="+hook)
	}
	if err := command(ctx, cache, append(argv, r.Suite, root)...); err != nil {
		return "", fmt.Errorf("%w\nwhere %s cannot be had, SUITE=bookworm may", err, r.Suite)
	}
	if err := furnish(ctx, root, r); err != nil {
		return "", err
	}
	for _, script := range r.Last {
		if err := command(ctx, cache, "sh", "-ec", script, "sh", root); err != nil {
			return "", err
		}
	}
	if r.Boots {
		if err := keepKernel(root, path); err != nil {
			return "", err
		}
	}
	partial := path + ".partial"
	_ = os.Remove(partial)
	if err := errors.Join(os.WriteFile(partial, nil, 0o644), os.Truncate(partial, diskSize)); err != nil {
		return "", err
	}
	if err := command(ctx, cache, "mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=1", "-d", root, partial); err != nil {
		return "", err
	}
	return path, os.Rename(partial, path)
}

// emulations are binfmt-support's names for qemu's emulation of programs, by
// processor.
var emulations = map[string]string{"amd64": "qemu-x86_64", "arm64": "qemu-aarch64"}

// runPrograms makes this machine's kernel run programs for a processor, for
// packages of the machine's root file system when they are installed. Debian
// does that when its services start.
func runPrograms(ctx context.Context, dir, arch string) error {
	if arch == runtime.GOARCH {
		return nil
	}
	return command(ctx, dir, "update-binfmts", "--enable", emulations[arch])
}

// Files from which an image boots are beside it, under its name with these
// endings.
const (
	kernelSuffix = ".kernel"
	initrdSuffix = ".initrd"
)

// keepKernel copies what is needed outside to boot the image.
func keepKernel(root, image string) error {
	for pattern, suffix := range map[string]string{"vmlinuz-*": kernelSuffix, "initrd.img-*": initrdSuffix} {
		file, err := newest(filepath.Join(root, "boot", pattern))
		if err != nil {
			return err
		}
		data, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if err := os.WriteFile(image+suffix, data, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// furnish turns an installed system into the test machine.
func furnish(ctx context.Context, root string, r recipe) error {
	for name, text := range r.Files {
		path := filepath.Join(root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			return err
		}
	}
	for _, unit := range r.Masked {
		r.Links["/etc/systemd/system/"+unit] = "/dev/null"
	}
	for name, to := range r.Links {
		path := filepath.Join(root, name)
		_ = os.Remove(path) // there may be none
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.Symlink(to, path)); err != nil {
			return err
		}
	}
	if r.Modules == "" {
		return nil
	}
	target := filepath.Join(root, "usr/lib/modules")
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	return command(ctx, root, "cp", "-a", r.Modules+"/.", target)
}

// command runs a program in a directory; the error of a failure contains its
// output.
func command(ctx context.Context, dir string, argv ...string) error {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	cmd.WaitDelay = 10 * time.Second
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, out)
	}
	return nil
}
