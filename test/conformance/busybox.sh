#!/usr/bin/env bash
# Builds a static busybox from Debian's source package, for the images of the
# conformance suite. Debian's own busybox-static is unsuitable: its shell runs
# applets by itself, so a masked /bin/ls would work, and it lacks ipcs and pgrep.
#
#   busybox.sh FILE     where the program goes
#
# With CROSS_COMPILE=aarch64-linux-gnu- and the like it is built for another processor.
# The exit code is 75 if no archive has answered: the next time one may.
set -euo pipefail

out=$(realpath -m "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

failed=75 # until an archive has answered
quietly() {
	"$@" >"$work/log" 2>&1 || {
		cat "$work/log" >&2
		echo "busybox.sh: failed: $*" >&2
		exit $failed
	}
}

# The machine's own package lists stay as they are.
. /etc/os-release
mkdir -p "$work"/{lists,cache,source}/partial
# Sources come from the machine's own package archives.
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "Release: $VERSION_CODENAME" | head -n 1)
echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $VERSION_CODENAME main" >"$work/sources.list"
apt=(apt-get -qq -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=/dev/null
	-o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root)
cd "$work/source"
quietly "${apt[@]}" --error-on=any update
failed=1
quietly "${apt[@]}" source busybox
cd busybox-*/

config() { # NAME y|n
	sed -i -E "/^(# )?CONFIG_$1[ =]/d" .config
	echo "CONFIG_$1=$2" >>.config
}
quietly make defconfig
config STATIC y
config FEATURE_SH_STANDALONE n
config FEATURE_PREFER_APPLETS n
config FEATURE_SH_NOFORK n
config FEATURE_DI_ENV_HACK y # programs get variables whose names are not identifiers, as with other busybox builds
config TC n # does not build with every kernel's headers
quietly make oldconfig < <(yes '')
quietly make -j"$(nproc)" busybox
mkdir -p "$(dirname "$out")"
mv busybox "$out"
