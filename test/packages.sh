#!/usr/bin/env bash
# Builds the packages twice from the programs in BINDIR and looks into them: the
# same bytes both times, the right files with the right modes, programs that
# run, a unit that systemd takes, and scripts that start nothing.
#
#   test/packages.sh BINDIR
set -euo pipefail
bindir=$(realpath "$1")
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
	printf 'FAIL  %s\n' "$@" >&2
	exit 1
}

build() {
	SOURCE_DATE_EPOCH=1700000000 contrib/packaging/build.sh v1.2.3-4-gabcdef0 "$(go env GOARCH)" "$bindir" "$1" >/dev/null
}

# tree DIR: mode and path of all files, for comparison with the list below.
tree() { (cd "$1" && find . -mindepth 1 ! -path './DEBIAN*' \( -type f -o -empty \) -printf '%m %P\n' | sort -k 2); }

common='644 etc/crius/crius.toml
755 etc/crius/crius.toml.d
755 usr/bin/crius
755 usr/bin/crius-conmon
755 usr/bin/crius-conmon-shim
644 usr/lib/systemd/system/crius.service
644 usr/lib/tmpfiles.d/crius.conf
644 usr/share/bash-completion/completions/crius
644 usr/share/fish/vendor_completions.d/crius.fish
644 usr/share/man/man5/crius.toml.5.gz
644 usr/share/man/man8/crius.8.gz
644 usr/share/selinux/packages/crius.cil'

# documented: the paths in the list of docs/install.md, and those of samples on any page.
documented() {
	{ grep '^| `/' docs/install.md | cut -d '|' -f 2; cat README.md docs/*.md; } |
		grep -oE '/(usr/(bin|lib)/[a-z./-]*crius[a-z.-]*|etc/crius/crius\.toml(\.d)?|usr/share/doc/crius[A-Za-z0-9./_-]*)' | sort -u
}

check_tree() { # DIR FURTHER-FILES
	diff <(printf '%s\n%s\n' "$common" "$2" | sort -k 2) <(tree "$1" | grep -v ' usr/share/doc/crius/\(README\|SECURITY\|RELEASES\|CHANGELOG\|docs\|examples\)') ||
		fail "$1 does not hold what it should"
	cmp -s "$1/usr/bin/crius" "$bindir/crius" || fail "$1: the program was changed on its way"
	"$1/usr/bin/crius" --config "$1/etc/crius/crius.toml" config >/dev/null || fail "$1: its configuration is refused"
	for path in $(documented); do
		[ -e "$1$path" ] || fail "$1 lacks $path, which the documents name"
	done
	zcat "$1"/usr/share/*/crius/third-party-licences.gz | grep 'Apache License' >/dev/null || fail "$1: licences of modules are missing"
}

# calls RUNNER...: the systemctl calls of a maintainer script, with systemd
# seeming to run. It gets a /run of its own.
calls() {
	mkdir -p "$work/fake"
	# shellcheck disable=SC2016
	printf '#!/bin/sh\necho "${0##*/} $*" >>%s/calls\n' "$work" |
		tee "$work/fake"/{systemctl,semodule,restorecon} >"$work/fake/systemd-tmpfiles"
	printf '#!/bin/sh\nexit %d\n' "${without_selinux:-1}" >"$work/fake/selinuxenabled"
	chmod +x "$work/fake"/*
	: >"$work/calls"
	# shellcheck disable=SC2016
	unshare --mount sh -ec 'mount -t tmpfs tmpfs /run; mkdir -p /run/systemd/system; PATH=$1:$PATH; shift; "$@"' sh "$work/fake" "$@"
	cat "$work/calls"
}

expect() { # WHAT WANT GOT
	[ "$2" = "$3" ] || fail "$1: got" "$3" "want" "$2"
}

build "$work/one"
build "$work/two"
diff -r "$work/one" "$work/two" || fail "two builds differ"
deb=$(ls "$work"/one/crius_1.2.3+4.gabcdef0_*.deb)
rpm=$(ls "$work"/one/crius-1.2.3+4.gabcdef0-1.*.rpm)
echo "ok    reproducible: $(basename "$deb"), $(basename "$rpm")"

dpkg-deb -R "$deb" "$work/deb"
check_tree "$work/deb" '644 usr/share/doc/crius/copyright
644 usr/share/doc/crius/third-party-licences.gz
644 usr/share/zsh/vendor-completions/_crius'
(cd "$work/deb" && md5sum --quiet -c DEBIAN/md5sums) || fail "md5sums of the DEB"
expect "owners in the DEB" root/root "$(dpkg-deb -c "$deb" | awk '{print $2}' | sort -u)"
expect "conffiles" "$(cd "$work/deb" && find etc -type f -printf '/%p\n')" "$(cat "$work/deb/DEBIAN/conffiles")"
echo "ok    DEB: $(dpkg-deb -f "$deb" Package Version Architecture | tr '\n' ' ')"

mkdir "$work/rpm"
(cd "$work/rpm" && rpm2cpio "$rpm" | cpio -idm --quiet)
check_tree "$work/rpm" '644 usr/share/licenses/crius/LICENSE
644 usr/share/licenses/crius/third-party-licences.gz
644 usr/share/zsh/site-functions/_crius'
expect "owners in the RPM" root:root "$(rpm -qp --qf '[%{FILEUSERNAME}:%{FILEGROUPNAME}\n]' "$rpm" | sort -u)"
expect "configuration files of the RPM" /etc/crius/crius.toml "$(rpm -qpc "$rpm")"
echo "ok    RPM: $(rpm -qp --qf '%{NAME} %{VERSION} %{ARCH}' "$rpm")"

d=$work/deb/DEBIAN
reload='systemctl daemon-reload'
leave='systemctl --no-reload disable crius.service
systemctl stop crius.service'
expect "DEB, install or upgrade" "$reload
systemd-tmpfiles --create crius.conf" "$(calls "$d/postinst" configure)"
expect "DEB, before an upgrade" "" "$(calls "$d/prerm" upgrade 2.0)"
expect "DEB, before removal" "$leave" "$(calls "$d/prerm" remove)"
expect "DEB, after removal" "$reload" "$(calls "$d/postrm" remove)"
expect "DEB, purge" "" "$(calls "$d/postrm" purge)"
scriptlet() { rpm -qp --qf "%{$1}" "$rpm" >"$work/scriptlet"; }
scriptlet POSTIN
expect "RPM, install or upgrade" "$reload
systemd-tmpfiles --create crius.conf" "$(calls sh "$work/scriptlet" 1)"
scriptlet PREUN
expect "RPM, before an upgrade" "" "$(calls sh "$work/scriptlet" 1)"
expect "RPM, before removal" "$leave" "$(calls sh "$work/scriptlet" 0)"
scriptlet POSTUN
expect "RPM, after an upgrade" "" "$(calls sh "$work/scriptlet" 1)"
expect "RPM, after removal" "$reload" "$(calls sh "$work/scriptlet" 0)"
echo "ok    scripts start nothing"

# Where SELinux is on, the policy module comes first, and goes last.
without_selinux=0
scriptlet POSTIN
for installed in "$(calls "$d/postinst" configure)" "$(calls sh "$work/scriptlet" 1)"; do
	expect "with SELinux, install or upgrade" "semodule -X 200 -i /usr/share/selinux/packages/crius.cil" "$(head -1 <<<"$installed")"
	grep -q '^restorecon .*/usr/bin/crius-conmon' <<<"$installed" || fail "with SELinux, programs are not labelled: $installed"
done
scriptlet POSTUN
for removed in "$(calls "$d/postrm" remove)" "$(calls sh "$work/scriptlet" 0)"; do
	expect "with SELinux, after removal" "$reload
semodule -X 200 -r crius" "$removed"
done
expect "with SELinux, RPM, after an upgrade" "" "$(calls sh "$work/scriptlet" 1)"
echo "ok    SELinux module"

# The unit is verified below a root of its own, where its programs exist.
install -D /bin/true "$work/deb/sbin/modprobe"
install -D /bin/true "$work/deb/bin/kill"
complaints=$(systemd-analyze verify --root="$work/deb" --man=no --recursive-errors=no crius.service 2>&1) || fail "unit: $complaints"
expect "what systemd says of the unit" "" "$complaints"
for shell in bash zsh fish; do
	command -v $shell >/dev/null || continue
	$shell -n completions/*crius"$(case $shell in bash | fish) echo .$shell ;; esac)" || fail "$shell completion"
done
echo "ok    unit and completions"
