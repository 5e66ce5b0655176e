#!/usr/bin/env bash
# Prints the version of COMMIT, or of the work tree, in the form of `git describe`: the last
# tag, the number of commits since, and the hash. Before the first tag it counts all commits
# after v0.0.0, so that a later commit is a newer version. Changes that are not committed
# add the time of the latest one, in UTC.
#
#   contrib/packaging/version.sh [COMMIT]
set -euo pipefail

commit=$(git rev-parse --verify --quiet "${1:-HEAD}^{commit}") || { echo unknown; exit; }
version=$(git describe --tags "$commit" 2>/dev/null) ||
	version=v0.0.0-$(git rev-list --count "$commit")-g$(git rev-parse --short "$commit")
if [ $# -eq 0 ] && [ -n "$(git status --porcelain)" ]; then
	latest=$({ git diff --name-only -z HEAD; git ls-files -z --others --exclude-standard; } |
		xargs -0 stat -c %Y 2>/dev/null | sort -n | tail -1) || true # stat misses deleted files
	version+=-dirty.$(date -u -d "@${latest:-0}" +%Y%m%d%H%M%S)
fi
echo "$version"
