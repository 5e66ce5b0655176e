# Unpacks criu $2 and its libraries, from Debian's unstable distribution, into the directory $1, and makes $1/criu.
# apt works on directories of its own, beside this machine's settings (proxies), and asks for one list and these packages.
# The exit code is 75 if no archive has answered: the next time one may.
set -euo pipefail
at=$1 version=$2
apt=$(mktemp -d)
trap 'rm -rf "$apt"' EXIT
mkdir -p "$apt"/parts "$at"
touch "$apt/status"
cat >"$apt/apt.conf" <<CONF
Dir::Etc::sourcelist "$apt/sources.list"; Dir::Etc::sourceparts "$apt/parts";
Dir::Etc::preferences "$apt/preferences"; Dir::Etc::preferencesparts "$apt/parts";
Dir::State "$apt"; Dir::State::lists "$apt/lists"; Dir::State::status "$apt/status";
Dir::Cache "$apt"; Dir::Cache::archives "$apt/archives"; Dir::Log "$apt";
APT::Sandbox::User "root"; APT::Install-Recommends "false"; Acquire::Languages "none"; Debug::NoLocking "true";
Acquire::http::Timeout "30";
CONF
export APT_CONFIG="$apt/apt.conf"

# fetch ARCHIVE PACKAGE: what of an earlier attempt is left may not fit.
fetch() {
	rm -rf "$apt/lists" "$apt/archives" "$apt"/*.bin
	mkdir -p "$apt"/lists/partial "$apt"/archives/partial
	echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg check-valid-until=no] $1 sid main" >"$apt/sources.list"
	apt-get -qq --error-on=any update && apt-get -qq -y --download-only install "$2"
}

# Debian keeps one version in sid, and all of them, with the libraries of the same day, in its archive of snapshots. A newer criu is
# better than none.
fetchAny() {
	fetch http://deb.debian.org/debian "criu=$version-*" ||
		fetch http://snapshot.debian.org/archive/debian/20261127T000000Z "criu=$version-*" ||
		fetch http://deb.debian.org/debian criu
}

tries=3
until fetchAny; do
	tries=$((tries - 1))
	if [ $tries -eq 0 ]; then
		echo "no archive of Debian has criu $version, or none can be reached" >&2
		exit 75
	fi
	sleep 5
done
mkdir -p "$at/files"
for package in "$apt"/archives/*.deb; do
	dpkg-deb -x "$package" "$at/files"
done
# The loader of that libc, because criu needs newer libraries than this machine has.
cat >"$at/criu" <<'CRIU'
#!/bin/sh
files=$(dirname "$0")/files
libraries=$(dirname "$files"/usr/lib/*/libprotobuf-c.so.1)
exec "$libraries"/ld-linux-*.so.* --library-path "$libraries" "$files/usr/sbin/criu" "$@"
CRIU
chmod 755 "$at/criu"
"$at/criu" --version
