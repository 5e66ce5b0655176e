#!/usr/bin/env bash
# Prints the version of COMMIT, or of the work tree, in the form of `git describe`: the last
# tag, the number of commits since, and the hash. Before the first tag it counts all commits
# after v0.0.0, so that a later commit is a newer version; a shallow clone, where they cannot be
# counted, has none of them. Changes that are not committed add the time of the latest one, in UTC.
#
#   contrib/packaging/version.sh [COMMIT]
set -euo pipefail

commit=$(git rev-parse --verify --quiet "${1:-HEAD}^{commit}") || { echo unknown; exit; }
if ! version=$(git describe --tags "$commit" 2>/dev/null); then
	count=$(git rev-list --count "$commit")
	if [ "$(git rev-parse --is-shallow-repository)" = true ]; then
		echo "version.sh: the clone is shallow, so that packages of this commit are no upgrades: run git fetch --unshallow --tags" >&2
		count=0
	fi
	version=v0.0.0-$count-g$(git rev-parse --short "$commit")
fi
if [ $# -eq 0 ] && [ -n "$(git status --porcelain)" ]; then
	latest=$({ git diff --name-only -z HEAD; git ls-files -z --others --exclude-standard; } |
		xargs -0 stat -c %Y 2>/dev/null | sort -n | tail -1) || true # stat misses deleted files
	version+=-dirty.$(date -u -d "@${latest:-0}" +%Y%m%d%H%M%S)
fi
echo "$version"
