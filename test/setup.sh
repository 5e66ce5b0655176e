#!/usr/bin/env bash
# Prepares this machine for a target of the Makefile: installs the Debian packages
# that it needs, looks for Go, and arranges hybrid cgroups as crun requires.
# Does nothing if nothing is missing, and prints what it does.
#
#   test/setup.sh [SET|PACKAGE...]     default: test
#
#   demo-runc, demo-crun   for make demo, with that runtime
#   test                   for tests and measurements
#
# No installed package is removed, downgraded, or replaced by another version (except
# by an update of the same version that a dependency requires): if that would happen,
# nothing is done. An existing program counts, whatever package it is from.
set -euo pipefail

demo=(
	containernetworking-plugins # pod networks
	iptables nftables iproute2  # host ports, and looking at networks
	ca-certificates             # Go's modules
)
tests=(
	runc crun                             # the runtimes under test
	containerd                            # its shim, which is a runtime as well
	"${demo[@]}"
	skopeo golang-github-containers-common # another tool on the same images
	gcc libc6-dev                         # the race detector
	openssh-client                        # signatures of a release
	libseccomp-dev pkg-config             # building a current runc
	dpkg-dev patch xz-utils bzip2         # building busybox from Debian's source
	procps util-linux kmod                # looking at processes and mounts
	e2fsprogs strace                      # full disks, failing system calls
	groff-base                            # manual pages
	busybox-static                        # an image with a shell
	git make
)

# All programs for which a package is needed: the machine may have them from elsewhere. Tests
# need plugins in /usr/lib/cni, the demo in any directory.
plugins=(bandwidth bridge firewall host-local loopback portmap ptp tuning)
declare -A program=(
	[runc]=runc [crun]=crun [skopeo]=skopeo
	[containerd]="containerd containerd-shim-runc-v2"
	[iptables]=iptables-save [nftables]=nft [iproute2]=ip [conmon]=conmon
	[containernetworking-plugins]="${plugins[*]/#//usr/lib/cni/}"
)

die() {
	printf 'setup: %s\n' "$@" >&2
	exit 1
}

# present reports whether a package, or everything for which it is needed, is installed.
present() {
	local one
	[ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" != installed ] || return 0
	for one in ${program[$1]:-}; do
		command -v "$one" >/dev/null || return 1
	done
	[ -n "${program[$1]:-}" ]
}

# upstream prints a version without the distribution's revision.
upstream() { printf '%s\n' "${1%-*}"; }

# refuse exits with the effects of installing the packages on installed ones, if any.
refuse() {
	local plan=$1 line action name old new bad=()
	while read -r line; do
		read -r action name old new _ <<<"$line"
		case "$action $old" in
		'Remv '*) bad+=("  removes $name ${old//[\[\]]/}") ;;
		'Inst ['*)
			old=${old//[\[\]]/} new=${new#(}
			if dpkg --compare-versions "$new" lt "$old" || [ "$(upstream "$new")" != "$(upstream "$old")" ]; then
				bad+=("  replaces $name $old by $new")
			else
				echo "setup: updates $name $old to $new, which another package wants"
			fi
			;;
		esac
	done <<<"$plan"
	[ ${#bad[@]} -eq 0 ] || die "nothing was done: to install ${missing[*]} apt-get" "${bad[@]}" \
		"Use a machine that you can spare, or install by hand what provides these."
}

apt() { DEBIAN_FRONTEND=noninteractive apt-get "$@"; }

install_packages() {
	local missing=() package plan
	command -v dpkg-query >/dev/null || die "this is no Debian: install by hand what provides $*"
	for package; do
		present "$package" || missing+=("$package")
	done
	[ ${#missing[@]} -gt 0 ] || return 0
	[ "$(id -u)" = 0 ] || die "these packages are missing, and only root can install them: ${missing[*]}"
	plan=$(apt -s install --no-install-recommends --no-upgrade "${missing[@]}" 2>/dev/null) ||
		{ apt update -qq && plan=$(apt -s install --no-install-recommends --no-upgrade "${missing[@]}"); } ||
		die "apt-get cannot install ${missing[*]}: see above"
	refuse "$plan"
	echo "setup: installs ${missing[*]}"
	local install=(install -qq -y --no-install-recommends --no-upgrade --no-remove)
	apt "${install[@]}" "${missing[@]}" >/dev/null 2>&1 && return 0
	# The lists may be old; new ones may change the plan.
	apt update -qq && plan=$(apt -s install --no-install-recommends --no-upgrade "${missing[@]}") ||
		die "apt-get could not install ${missing[*]}: see above"
	refuse "$plan"
	apt "${install[@]}" "${missing[@]}" >/dev/null || die "apt-get could not install ${missing[*]}: see above"
}

# Go from 1.21 on downloads the toolchain that go.mod requires, unless GOTOOLCHAIN is local: make
# lifts that, whoever calls this script must.
check_go() {
	local version minor required
	command -v go >/dev/null || die "Go is missing, or not in PATH. Any Go from 1.21 on will do; Debian 12's own is older:" \
		"  apt-get install -t bookworm-backports golang-go   or   https://go.dev/dl"
	version=$(GOTOOLCHAIN=local go version | sed -E 's/^go version go([0-9.]+).*/\1/')
	minor=${version#1.}
	minor=${minor%%.*}
	[ "$minor" -ge 21 ] || die "Go $version is too old: any Go from 1.21 on will do, from bookworm-backports or https://go.dev/dl"
	required=$(sed -n 's/^go //p' "${0%/*}/../go.mod")
	required=${required%.*}
	[ "$minor" -ge "${required#1.}" ] || [ "$(go env GOTOOLCHAIN)" != local ] ||
		die "Go $version may not fetch Go $required, because GOTOOLCHAIN is local: go env -u GOTOOLCHAIN"
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

packages=()
crun=
for name in "${@:-test}"; do
	case $name in
	demo-runc | demo-crun)
		packages+=("${name#demo-}" "${demo[@]}")
		[ ! -e /opt/cni/bin/bridge ] || program[containernetworking-plugins]="${plugins[*]/#//opt/cni/bin/}"
		;;&
	demo-crun | test) crun=yes ;;&
	demo-runc | demo-crun) ;;
	test) packages+=("${tests[@]}") ;;
	*) packages+=("$name") ;;
	esac
done
install_packages "${packages[@]}"
check_go
[ -z "$crun" ] || settle_cgroups
