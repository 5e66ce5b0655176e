#!/bin/sh
# Installs crius from this archive, or removes it again:
#
#   ./install.sh [install|uninstall|help]
#
# PREFIX (/usr/local) is the directory for programs, unit, manual pages and completions,
# DESTDIR (none) a directory that stands for /. With a PREFIX that systemd does not search,
# unit and tmpfiles.d go to /etc. The configuration goes to /etc/crius, unless it exists.
# Nothing is enabled or started; what is running continues. Uninstalling stops the server,
# if it is this one, and leaves containers, /etc/crius and /var/lib/crius.
set -eu
prefix=${PREFIX:-/usr/local} dest=${DESTDIR:-}
cd "$(dirname "$0")"

usage() { sed -n '2,/^set/s/^# \{0,1\}//p' install.sh; }
case ${1:-install} in
install | uninstall) ;;
help | -h | --help) usage; exit ;;
*) echo "install.sh: unknown command $1" >&2; usage >&2; exit 2 ;;
esac

case $prefix in
/usr | /usr/local) units=$prefix/lib/systemd/system tmpfiles=$prefix/lib/tmpfiles.d ;;
/*) units=/etc/systemd/system tmpfiles=/etc/tmpfiles.d ;;
*) echo "install.sh: PREFIX must be an absolute path, not $prefix" >&2; exit 2 ;;
esac
unit=$dest$units/crius.service
if [ -e "$unit" ] && ! grep -q "^ExecStart=$prefix/bin/crius " "$unit"; then
	echo "install.sh: $unit is not of the crius in $prefix: remove it first, or set the PREFIX that it names" >&2
	exit 1
fi

# files lists the installed files, without the leading usr/.
files() { find usr -type f | sed 's|^usr/||'; }

# place prints the destination of a file.
place() {
	case $1 in
	lib/systemd/system/*) echo "$dest$units/${1##*/}" ;;
	lib/tmpfiles.d/*) echo "$dest$tmpfiles/${1##*/}" ;;
	*) echo "$dest$prefix/$1" ;;
	esac
}

systemd() { [ -z "$dest" ] && [ -d /run/systemd/system ]; }

case ${1:-install} in
install)
	files | while read -r file; do
		mode=644
		[ ! -x "usr/$file" ] || mode=755
		to=$(place "$file")
		mkdir -p "$(dirname "$to")"
		# Renamed over the old file: running programs keep theirs.
		install -m $mode "usr/$file" "$to.new"
		case $file in
		lib/systemd/*) sed -i "s|/usr/bin/crius|$prefix/bin/crius|" "$to.new" ;;
		esac
		mv "$to.new" "$to"
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
	# Another crius, for example from a package, keeps running.
	loaded=
	if systemd; then loaded=$(systemctl show --property=FragmentPath --value crius.service || true); fi
	if [ -n "$loaded" ] && [ "$(readlink -f "$loaded")" = "$(readlink -f "$unit")" ]; then
		systemctl --no-reload disable crius.service || true
		systemctl stop crius.service || true
		# Remove its AppArmor profile, unless it confines a running container.
		unload=/sys/kernel/security/apparmor/.remove
		if [ -e $unload ]; then
			confined=
			for task in /proc/[0-9]*/attr/current; do
				{ read -r label <"$task"; } 2>/dev/null || continue
				case $label in *crius-default*) confined=$task ;; esac
			done
			[ -n "$confined" ] || { printf crius-default >$unload; } 2>/dev/null || true
		fi
	fi
	files | while read -r file; do rm -f "$(place "$file")"; done
	rm -rf "$dest$prefix/share/doc/crius"
	if systemd; then systemctl daemon-reload; fi
	;;
esac
