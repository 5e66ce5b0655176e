#!/usr/bin/env bash
# Builds the packages twice from the programs in BINDIR and checks them: the same
# bytes both times, the right files with the right modes, programs that run, a
# unit that systemd accepts, and scripts that start nothing. Then it installs,
# upgrades, downgrades and removes them on a copy of this machine's root.
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

build() { # DIR VERSION
	SOURCE_DATE_EPOCH=1700000000 contrib/packaging/build.sh "$2" "$(go env GOARCH)" "$bindir" "$1" >/dev/null
}

# tree DIR: mode and path of all files, for comparison with the list below.
tree() { (cd "$1" && find . -mindepth 1 ! -path './DEBIAN*' \( -type f -o -empty \) -printf '%m %P\n' | sort -k 2); }

common='644 etc/crius/crius.toml
755 etc/crius/crius.toml.d
755 usr/bin/crius
755 usr/bin/crius-conmon
755 usr/bin/crius-conmon-shim
755 usr/bin/crius-unpack
644 usr/lib/systemd/system/crius.service
644 usr/lib/tmpfiles.d/crius.conf
644 usr/share/bash-completion/completions/crius
644 usr/share/fish/vendor_completions.d/crius.fish
644 usr/share/man/man5/crius.toml.5.gz
644 usr/share/man/man8/crius-conmon-shim.8.gz
644 usr/share/man/man8/crius-conmon.8.gz
644 usr/share/man/man8/crius-unpack.8.gz
644 usr/share/man/man8/crius.8.gz
644 usr/share/selinux/packages/crius.cil'

# documented: the paths in the list of docs/install.md, and those of samples on any page.
documented() {
	{ grep '^| `/' docs/install.md | cut -d '|' -f 2; cat README.md docs/*.md; } |
		grep -oE '/(usr/(bin|lib)/[a-z./-]*crius[a-z.-]*|etc/crius/crius\.toml(\.d)?|usr/share/doc/crius[A-Za-z0-9./_-]*)' | sort -u
}

check_tree() { # DIR FURTHER-FILES
	diff <(printf '%s\n%s\n' "$common" "$2" | sort -k 2) <(tree "$1" | grep -v ' usr/share/doc/crius/\(README\|SECURITY\|RELEASES\|CHANGELOG\|CONTRIBUTING\|docs\|examples\|sbom\)') ||
		fail "$1 does not hold what it should"
	cmp -s "$1/usr/bin/crius" "$bindir/crius" || fail "$1: the program was changed on its way"
	"$1/usr/bin/crius" --config "$1/etc/crius/crius.toml" config >/dev/null || fail "$1: its configuration is refused"
	for path in $(documented); do
		[ -e "$1$path" ] || fail "$1 lacks $path, which the documents name"
	done
	zcat "$1"/usr/share/*/crius/third-party-licences.gz | grep 'Apache License' >/dev/null || fail "$1: licences of modules are missing"
}

# ascend: the versions of later commits, tags and changes are newer in both formats.
ascend() {
	local of versions=() version=$PWD/contrib/packaging/version.sh
	eval "$(sed -n '/^package_version()/,/^}/p' contrib/packaging/build.sh)"
	git init -q "$work/sources"
	commit() { git -C "$work/sources" -c user.name=n -c user.email=e commit -q --allow-empty -m c; }
	note() { versions+=("$(cd "$work/sources" && package_version "$("$version")")"); }
	for of in {1..10}; do
		commit
		note
	done
	for of in first second; do
		echo $of >"$work/sources/file"
		touch -d "2026-01-02 03:04:0$((${#versions[@]} - 9))" "$work/sources/file"
		note
	done
	commit
	note
	git -C "$work/sources" -c tag.gpgSign=false tag v0.1.0-rc.1
	commit
	rm "$work/sources/file"
	note
	git -C "$work/sources" -c tag.gpgSign=false tag v0.1.0
	note
	for of in $(seq ${#versions[@]}); do
		[ "$of" -lt ${#versions[@]} ] || break
		dpkg --compare-versions "${versions[of - 1]}" lt "${versions[of]}" || fail "${versions[of]} is not newer than ${versions[of - 1]}"
		[ "$(command rpm --eval "%{lua:print(rpm.vercmp('${versions[of - 1]}', '${versions[of]}'))}")" = -1 ] ||
			fail "RPM: ${versions[of]} is not newer than ${versions[of - 1]}"
	done
	echo "ok    versions ascend"
}
ascend

version_script=$PWD/contrib/packaging/version.sh
# In a shallow clone commits cannot be counted: one of them must not look newer than it is.
git clone -q --no-tags --depth 2 "file://$work/sources" "$work/shallow" 2>/dev/null
[[ $(cd "$work/shallow" && "$version_script" 2>"$work/said") = v0.0.0-0-g* ]] ||
	fail "the version in a shallow clone"
grep -q unshallow "$work/said" || fail "a shallow clone is not named as the cause" "$(cat "$work/said")"
echo "ok    version of a shallow clone"

# Formats whose tool is missing are left out, unless they are asked for.
formats() {
	local tool small=$work/small
	mkdir "$work/tools" "$small"
	for tool in /usr/bin/* /bin/* "$(command -v go)"; do ln -sf "$tool" "$work/tools/"; done
	rm -f "$work"/tools/{dpkg-deb,rpmbuild}
	for tool in crius crius-unpack crius-conmon crius-conmon-shim; do cp "$bindir/crius-conmon" "$small/$tool"; done
	pack() { PATH=$work/tools SOURCE_DATE_EPOCH=1 contrib/packaging/build.sh v1 "$(go env GOARCH)" "$small" "$1" >/dev/null 2>"$work/said"; }
	pack "$work/any"
	! FORMATS='rpm archive' pack "$work/strict" || fail "a format that was asked for is missing, and nobody says so"
	grep -q 'FORMATS names rpm: rpmbuild is missing' "$work/said" || fail "the missing format is not named" "$(cat "$work/said")"
	FORMATS=archive pack "$work/one-format"
	for tool in any one-format; do # with the list of modules
		[ "$(find "$work/$tool" -type f | wc -l)" = 2 ] || fail "$(ls "$work/$tool")"
	done
	echo "ok    formats without their tools"
}
formats

# calls RUNNER...: the systemctl calls of a maintainer script, with a systemd
# that appears to be running. The script gets its own /run.
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

build "$work/one" v1.2.3-4-gabcdef0
build "$work/two" v1.2.3-4-gabcdef0
diff -r "$work/one" "$work/two" || fail "two builds differ"
deb=$(ls "$work"/one/crius_1.2.3+4.gabcdef0_*.deb)
rpm=$(ls "$work"/one/crius-1.2.3+4.gabcdef0-1.*.rpm)
tar=$(ls "$work"/one/crius-1.2.3+4.gabcdef0-linux-*.tar.gz)
echo "ok    reproducible: $(basename "$deb"), $(basename "$rpm"), $(basename "$tar")"

dpkg-deb -R "$deb" "$work/deb"
check_tree "$work/deb" '644 usr/share/doc/crius/changelog.gz
644 usr/share/doc/crius/copyright
644 usr/share/doc/crius/third-party-licences.gz
644 usr/share/lintian/overrides/crius
644 usr/share/zsh/vendor-completions/_crius'
expect "changelog of the DEB" "crius (1.2.3+4.gabcdef0) unstable; urgency=medium" "$(zcat "$work/deb/usr/share/doc/crius/changelog.gz" | head -1)"
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

# If SELinux is enabled, the policy module is loaded first, and removed last.
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

# The list of modules is complete according to the programs.
jq -r '.packages[] | .name + " " + .versionInfo' "$work/deb/usr/share/doc/crius/sbom.spdx.json" | sort >"$work/listed"
{
	echo "crius 1.2.3+4.gabcdef0"
	go version "$bindir/crius" | sed 's/.*: go/stdlib /'
	go version -m "$bindir/crius" | awk '$1 == "dep" { print $2, $3 }'
} | sort >"$work/linked"
expect "modules linked and not listed" "" "$(comm -23 "$work/linked" "$work/listed")"
expect "relations of the list" "$(wc -l <"$work/listed")" "$(jq '.relationships | length' "$work/deb/usr/share/doc/crius/sbom.spdx.json")"
echo "ok    $(wc -l <"$work/listed") modules listed"

mkdir "$work/archive"
tar -xzf "$tar" -C "$work/archive" --strip-components=1
for prefix in /usr /usr/local /opt/crius; do
	rm -rf "$work/installed"
	to=$work/installed$prefix searched=$to/lib
	[ $prefix != /opt/crius ] || searched=$work/installed/etc # systemd does not look into /opt
	by_archive() { DESTDIR=$work/installed PREFIX=$prefix "$work/archive/install.sh" "$@" >/dev/null; }
	by_archive
	cmp -s "$to/bin/crius" "$bindir/crius" || fail "archive: no program in $prefix"
	expect "archive: programs of the unit" "$prefix/bin/crius" \
		"$(sed -nE 's/^Exec(Start|Reload)=([^ ]*crius) .*/\2/p' "$searched/systemd/system/crius.service" | sort -u)"
	[ -e "$searched/tmpfiles.d/crius.conf" ] || fail "archive: no tmpfiles.d where systemd looks, for $prefix"
	echo '# mine' >"$work/installed/etc/crius/crius.toml"
	by_archive install
	by_archive uninstall
	expect "archive: what an uninstall leaves" etc/crius/crius.toml "$(cd "$work/installed" && find . -type f -printf '%P\n')"
	expect "archive: the configuration" '# mine' "$(cat "$work/installed/etc/crius/crius.toml")"
done
mkdir -p "$work/installed/etc/systemd/system"
echo 'ExecStart=/usr/bin/crius serve' >"$work/installed/etc/systemd/system/crius.service"
if by_archive 2>/dev/null || by_archive uninstall 2>/dev/null; then fail "archive: took the unit of another crius"; fi
expect "archive: the unit of another crius" 'ExecStart=/usr/bin/crius serve' "$(cat "$work/installed/etc/systemd/system/crius.service")"
rm "$work/installed/etc/systemd/system/crius.service"
status=0
by_archive help 2>/dev/null || status=$?
expect "archive: exit code of an unknown verb" 2 $status
echo "ok    archive installed and removed"

# life is the life of a node on which packages are installed and removed, with functions for one format.
# shellcheck disable=SC2016
life='
list() { find /usr /etc /opt /var/lib/crius /run/crius ! -type d 2>/dev/null | grep -v "^/usr/lib/sysimage/" | sort; }
wrong() { echo "$@" >&2; exit 1; }
list >/tmp/before
install /tmp/old
version 1.2.3+4.gabcdef0 || wrong "not installed"
mkdir -p /run/crius /var/lib/crius
chmod 711 /run/crius
chmod 700 /var/lib/crius
touch /run/crius/socket /var/lib/crius/record
echo "# mine" >>/etc/crius/crius.toml
exec 3</usr/bin/crius-conmon # like a running monitor
install /tmp/new
version 1.2.4 || wrong "not upgraded"
install /tmp/old
version 1.2.3+4.gabcdef0 || wrong "not downgraded"
[ "$(tail -1 /etc/crius/crius.toml)" = "# mine" ] || wrong "the configuration is not what it was"
[ "$(stat -c %a /run/crius /var/lib/crius | xargs)" = "711 700" ] || wrong "modes of directories have changed"
[ "$(stat -Lc %i /dev/fd/3)" != "$(stat -c %i /usr/bin/crius-conmon)" ] || wrong "a program that runs was written to"
remove
[ ! -e /usr/bin/crius ] || wrong "not removed"
[ -e /run/crius/socket ] && [ -e /var/lib/crius/record ] || wrong "what containers need is gone"
purge
rm -r /run/crius /var/lib/crius
list | diff /tmp/before - >&2 || wrong "something is left"
[ ! -e /etc/crius ] || wrong "/etc/crius is left"
'
deb_life='
install() { dpkg --force-depends --force-downgrade --force-confold -i "$1"/*.deb; }
version() { dpkg-query -W -f "\${Version}\n" crius | grep -qxF "$1"; }
remove() { dpkg --remove crius; }
purge() { dpkg --purge crius; }
'
rpm_life='
install() { rpm -U --oldpackage --nodeps --ignorearch --dbpath /tmp/rpmdb "$1"/*.rpm; }
version() { rpm -q --qf "%{VERSION}\n" --dbpath /tmp/rpmdb crius | grep -qxF "$1"; }
remove() { rpm -e --nodeps --dbpath /tmp/rpmdb crius; }
purge() { rm -rf /etc/crius; } # RPM keeps what was changed as .rpmsave
'

# live FUNCTIONS: life, on a copy of the root of this machine that has no crius.
live() {
	rm -rf "$work/copy"
	mkdir "$work/copy"
	# shellcheck disable=SC2016
	unshare --mount bash -ec 'copy=$1 root=$1/root
		mount -t tmpfs tmpfs "$copy"
		mkdir "$copy"/{upper,work,root}
		mount -t overlay -o "lowerdir=/,upperdir=$copy/upper,workdir=$copy/work" overlay "$root"
		mount -t tmpfs tmpfs "$root/run"
		mount -t tmpfs tmpfs "$root/tmp"
		mount --bind /proc "$root/proc"
		mount --bind /dev "$root/dev"
		mkdir "$root/tmp/old" "$root/tmp/new"
		mount --bind "$2" "$root/tmp/old"
		mount --bind "$3" "$root/tmp/new"
		rm -rf "$root/etc/crius" "$root/var/lib/crius" "$root"/usr/bin/crius{,-unpack,-conmon,-conmon-shim} "$root/usr/share/doc/crius"
		exec chroot "$root" bash -euc "$4"' bash "$work/copy" "$work/one" "$work/later" "$1$life" >"$work/said" 2>&1 ||
		fail "installed, upgraded, downgraded and removed: $(tail -20 "$work/said")"
}

build "$work/later" v1.2.4
live "$deb_life"
live "$rpm_life"
echo "ok    DEB and RPM installed, upgraded, downgraded and removed"

# The unit is verified below a separate root, where its programs exist.
install -D /bin/true "$work/deb/sbin/modprobe"
install -D /bin/true "$work/deb/bin/kill"
complaints=$(systemd-analyze verify --root="$work/deb" --man=no --recursive-errors=no crius.service 2>&1) || fail "unit: $complaints"
expect "what systemd says of the unit" "" "$complaints"
for shell in bash zsh fish; do
	command -v $shell >/dev/null || continue
	$shell -n completions/*crius"$(case $shell in bash | fish) echo .$shell ;; esac)" || fail "$shell completion"
done
echo "ok    unit and completions"
