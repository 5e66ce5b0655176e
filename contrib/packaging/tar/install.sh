#!/bin/sh
# Installs crius from this archive, or removes it again:
#
#   ./install.sh [install|uninstall]
#
# PREFIX (/usr/local) is where programs, unit, manual pages and completions go,
# DESTDIR (none) a directory that stands for /. The configuration goes to /etc/crius,
# unless there is one. Nothing is enabled or started; what runs goes on. Uninstalling
# stops the server and leaves containers, /etc/crius and /var/lib/crius.
set -eu
prefix=${PREFIX:-/usr/local} dest=${DESTDIR:-}
cd "$(dirname "$0")"

case $prefix in
/*) ;;
*) echo "install.sh: PREFIX must be an absolute path, not $prefix" >&2; exit 2 ;;
esac

# files lists what goes below the prefix.
files() { find usr -type f | sed 's|^usr/||'; }

systemd() { [ -z "$dest" ] && [ -d /run/systemd/system ]; }

case ${1:-install} in
install)
	files | while read -r file; do
		mode=644
		[ ! -x "usr/$file" ] || mode=755
		mkdir -p "$dest$prefix/$(dirname "$file")"
		# A new file takes the old one's name: programs that run keep theirs.
		install -m $mode "usr/$file" "$dest$prefix/$file.new"
		case $file in
		lib/systemd/*) sed -i "s|/usr/bin/crius|$prefix/bin/crius|" "$dest$prefix/$file.new" ;;
		esac
		mv "$dest$prefix/$file.new" "$dest$prefix/$file"
	done
	mkdir -p "$dest/etc/crius/crius.toml.d"
	[ -e "$dest/etc/crius/crius.toml" ] || install -m 644 etc/crius/crius.toml "$dest/etc/crius/crius.toml"
	if systemd; then
		systemctl daemon-reload
		systemd-tmpfiles --create crius.conf || true
	fi
	echo "crius is in $prefix. Next: $prefix/bin/crius check; systemctl enable --now crius"
	;;
uninstall)
	if systemd; then
		systemctl --no-reload disable crius.service || true
		systemctl stop crius.service || true
	fi
	files | while read -r file; do rm -f "$dest$prefix/$file"; done
	rm -rf "$dest$prefix/share/doc/crius"
	if systemd; then systemctl daemon-reload; fi
	;;
*)
	sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | sed '$d' >&2
	exit 2
	;;
esac
