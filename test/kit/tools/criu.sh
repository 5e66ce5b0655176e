# Unpacks criu and its libraries from Debian's unstable distribution into the directory $1, and makes $1/criu.
# apt works on directories of its own, beside this machine's settings (proxies), and asks for one list and these packages.
set -euo pipefail
at=$1
apt=$(mktemp -d)
trap 'rm -rf "$apt"' EXIT
mkdir -p "$apt"/lists/partial "$apt"/archives/partial "$apt"/parts "$at/files"
touch "$apt/status"
echo 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian sid main' >"$apt/sources.list"
cat >"$apt/apt.conf" <<CONF
Dir::Etc::sourcelist "$apt/sources.list"; Dir::Etc::sourceparts "$apt/parts";
Dir::Etc::preferences "$apt/preferences"; Dir::Etc::preferencesparts "$apt/parts";
Dir::State "$apt"; Dir::State::lists "$apt/lists"; Dir::State::status "$apt/status";
Dir::Cache "$apt"; Dir::Cache::archives "$apt/archives"; Dir::Log "$apt";
APT::Sandbox::User "root"; APT::Install-Recommends "false"; Acquire::Languages "none"; Debug::NoLocking "true"; Acquire::Retries "3";
CONF
export APT_CONFIG="$apt/apt.conf"
apt-get -qq update
apt-get -qq -y --download-only install criu
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
