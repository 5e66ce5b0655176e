#!/usr/bin/env bash
# Makes this machine fit for `make test` and `make demo`: installs the Debian
# packages that they need, looks for Go, and puts hybrid cgroups in the shape
# that crun wants. Does nothing where nothing is missing, and says what it does.
#
#   test/setup.sh [PACKAGE...]     further packages to install
set -euo pipefail

packages=(
	runc crun                             # the runtimes under test
	containerd                            # its shim, which is one as well
	containernetworking-plugins           # pod networks
	iptables nftables iproute2            # host ports, and looking at networks
	skopeo golang-github-containers-common # another tool on the same images
	gcc libc6-dev                         # the race detector
	libseccomp-dev pkg-config             # building a current runc
	dpkg-dev patch xz-utils bzip2         # building busybox from Debian's source
	procps util-linux kmod                # looking at processes and mounts
	e2fsprogs strace                      # disks that are full, system calls that fail
	groff-base                            # manual pages
	busybox-static                        # an image with a shell
	git make ca-certificates
	"$@"
)

die() {
	printf 'setup: %s\n' "$@" >&2
	exit 1
}

install_packages() {
	local missing=() package
	command -v dpkg-query >/dev/null || die "this is no Debian: install by hand what provides ${packages[*]}"
	for package in "${packages[@]}"; do
		[ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
	done
	[ ${#missing[@]} -gt 0 ] || return 0
	[ "$(id -u)" = 0 ] || die "these packages are missing, and only root can install them: ${missing[*]}"
	echo "setup: installs ${missing[*]}"
	export DEBIAN_FRONTEND=noninteractive
	apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null 2>&1 ||
		{ apt-get update -qq && apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null; } ||
		die "apt-get could not install ${missing[*]}: see above"
}

# Go from 1.21 on fetches the version that go.mod wants.
check_go() {
	local version minor
	command -v go >/dev/null || die "Go is missing, or not in PATH. Any Go from 1.21 on will do; Debian 12's own is older:" \
		"  apt-get install -t bookworm-backports golang-go   or   https://go.dev/dl"
	version=$(GOTOOLCHAIN=local go version | sed -E 's/^go version go([0-9.]+).*/\1/')
	minor=${version#1.}
	minor=${minor%%.*}
	[ "$minor" -ge 21 ] || die "Go $version is too old: any Go from 1.21 on will do, from bookworm-backports or https://go.dev/dl"
	[ "$minor" -ge 26 ] || [ "$(go env GOTOOLCHAIN)" != local ] ||
		die "Go $version may not fetch Go 1.26, because GOTOOLCHAIN is local: go env -u GOTOOLCHAIN"
}

# crun before 1.9 refuses cgroup v2 beside v1 while v2 still has controllers: give
# them a v1 hierarchy each.
settle_cgroups() {
	local controller controllers
	[ -f /sys/fs/cgroup/unified/cgroup.controllers ] || return 0
	read -ra controllers </sys/fs/cgroup/unified/cgroup.controllers || return 0 # none left
	for controller in "${controllers[@]}"; do
		[ "$controller" != io ] || controller=blkio
		[ "$(id -u)" = 0 ] || die "the v2 side of hybrid cgroups has the controller $controller, which crun refuses: run this as root"
		echo "setup: mounts a v1 hierarchy for $controller"
		mkdir -p "/sys/fs/cgroup/$controller"
		mount -t cgroup -o "$controller" cgroup "/sys/fs/cgroup/$controller"
	done
}

install_packages
check_go
settle_cgroups
