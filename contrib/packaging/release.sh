#!/usr/bin/env bash
# Makes the files of a release of the tag that is checked out:
#
#   contrib/packaging/release.sh [all]          everything, into bin/release/VERSION
#   contrib/packaging/release.sh notes VERSION  prints the release notes, from CHANGELOG.md
#   contrib/packaging/release.sh seal DIR       writes and signs the checksums of the files in DIR
#
# KEY signs SHA256SUMS: the file of an SSH key, or the name of a key of gpg. Without it nothing is
# signed, and the script says so. ARCHS lists the processors.
set -euo pipefail
cd "$(dirname "$0")/../.."

die() { echo "release: $*" >&2; exit 1; }

# notes prints the section of a version, without its heading.
notes() {
	local text
	text=$(awk -v heading="## ${1#v}" -v tagged="## $1" '
		/^## / { inside = ($0 == heading || $0 == tagged || index($0, heading " ") == 1 || index($0, tagged " ") == 1); next }
		inside' CHANGELOG.md)
	[ -n "${text//[[:space:]]/}" ] || die "CHANGELOG.md has no section $1: rename Unreleased"
	printf '%s\n' "$text" | sed '1{/^$/d}'
}

# provenance prints where the files of a release come from.
provenance() {
	cat <<-END
	{
	  "version": "$1",
	  "commit": "$(git rev-parse HEAD)",
	  "sourceDate": "$(git log -1 --format=%cI)",
	  "go": "$(go env GOVERSION)",
	  "modules": "$(sha256sum go.sum | cut -d' ' -f1)",
	  "builder": "make release",
	  "reproduce": "git checkout $1 && make packages ARCH=..."
	}
	END
}

seal() {
	local dir=$1
	(cd "$dir" && find . -maxdepth 1 -type f ! -name 'SHA256SUMS*' -printf '%P\n' | LC_ALL=C sort | xargs sha256sum -- >SHA256SUMS)
	if [ -z "${KEY:-}" ]; then
		echo "release: SHA256SUMS is not signed: set KEY" >&2
	elif [ -f "$KEY" ]; then
		rm -f "$dir/SHA256SUMS.sig"
		ssh-keygen -q -Y sign -f "$KEY" -n file "$dir/SHA256SUMS"
	else
		gpg --batch --yes --local-user "$KEY" --armor --detach-sign "$dir/SHA256SUMS"
	fi
}

all() {
	local version dir arch
	[ -z "$(git status --porcelain)" ] || die "the work tree has changes"
	version=$(git describe --tags --exact-match 2>/dev/null) || die "no tag on this commit: git tag -s vMAJOR.MINOR.PATCH"
	dir=bin/release/$version
	mkdir -p "$dir"
	notes "$version" >"$dir/NOTES.md"
	for arch in ${ARCHS:-amd64 arm64 arm ppc64le riscv64 s390x}; do
		rm -rf bin/"$arch"/packages # of other versions
		make --no-print-directory packages ARCH="$arch" VERSION="$version"
		cp bin/"$arch"/packages/* "$dir"
	done
	provenance "$version" >"$dir/provenance.json"
	seal "$dir"
	(cd "$dir" && sha256sum --quiet -c SHA256SUMS)
	echo "$dir"
}

case ${1:-all} in
all) all ;;
notes) notes "${2:?VERSION is missing}" ;;
seal) seal "${2:?DIR is missing}" ;;
*) sed -n '2,/^set/s/^# \{0,1\}//p' contrib/packaging/release.sh >&2; exit 2 ;;
esac
