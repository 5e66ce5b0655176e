#!/usr/bin/env bash
# Packs the programs of BINDIR as DEB, RPM and archive into OUTDIR, and lists the modules
# linked into them, in the format of SPDX.
#
#   contrib/packaging/build.sh VERSION GOARCH BINDIR OUTDIR
#
# VERSION is the output of version.sh. The same inputs and SOURCE_DATE_EPOCH give the same
# packages, byte by byte. Needs go, which finds the licences of linked modules, dpkg-deb for the
# DEB and rpmbuild for the RPM; a format without its tool is left out. With FORMATS, such as "deb rpm
# archive", these are built and no others, and a missing tool is an error.
set -euo pipefail

[ $# -eq 4 ] || { sed -n '2,/^$/s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$4"
version=$1 goarch=$2 bindir=$(realpath "$3") outdir=$(realpath "$4")
cd "$(dirname "$0")/../.."
here=contrib/packaging
: "${SOURCE_DATE_EPOCH:=$(git log -1 --format=%ct)}"
export SOURCE_DATE_EPOCH
umask 022
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

command -v go >/dev/null || { echo "build.sh: go is missing: it finds the licences of linked modules" >&2; exit 1; }

# package_version turns v0.2.0-rc.1-3-gabc1234-dirty.20260102030405 into
# 0.2.0~rc.1+3.gabc1234.dirty.20260102030405, which sorts as intended in both formats.
package_version() {
	case $1 in
	v[0-9]*) echo "${1#v}" ;;
	*) echo "0.0.0-0-g$1" ;; # the sources are not a checkout
	esac | sed -E 's/-dirty/.dirty/; s/-([0-9]+)-g([0-9a-f]+)/+\1.g\2/; s/-/~/g'
}

# with TOOL PACKAGE FORMAT calls the function FORMAT, which needs TOOL, if the format is wanted.
with() {
	[[ " ${FORMATS:-$3} " = *" $3 "* ]] || return 0
	if command -v "$1" >/dev/null; then
		"$3"
	elif [ -n "${FORMATS:-}" ]; then
		echo "build.sh: FORMATS names $3: $1 is missing (package $2)" >&2
		exit 1
	else
		echo "build.sh: no package of the format $3: $1 is missing (package $2)" >&2
	fi
}

# licences prints those of all modules linked into the programs.
licences() {
	GOFLAGS=-tags=containers_image_openpgp,exclude_graphdriver_btrfs,nri_no_wasm CGO_ENABLED=0 GOARCH=$goarch \
		go list -deps -f '{{with .Module}}{{if not .Main}}{{.Path}} {{.Version}} {{.Dir}}{{end}}{{end}}' ./cmd/... |
		sort -u | while read -r module at dir; do
		find "$dir" -maxdepth 1 -type f \( -iname 'licen[cs]e*' -o -iname 'notice*' -o -iname 'copying*' \) | sort |
			while read -r file; do
				printf '======== %s %s: %s\n\n' "$module" "$at" "$(basename "$file")"
				cat "$file"
				printf '\n'
			done
	done
}

# linked prints name and version of Go and of all modules that the programs list as
# linked.
linked() {
	go version -m "$bindir"/crius "$bindir"/crius-unpack "$bindir"/crius-conmon "$bindir"/crius-conmon-shim | awk '
		$1 ~ /:$/ { print "stdlib", substr($2, 3) }
		$1 == "dep" || $1 == "mod" || $1 == "build" { if (module != "") print module; module = "" }
		$1 == "dep" || $1 == "=>" { module = $2 " " $3 }' | sort -u
}

# bom prints them as an SPDX document.
bom() {
	linked | awk -v version="$version" -v arch="$goarch" -v created="$(date -u -d "@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)" '
		function package(id, name, version, source, licence, purl) {
			return sprintf("{\"SPDXID\": \"SPDXRef-%s\", \"name\": \"%s\", \"versionInfo\": \"%s\", \"downloadLocation\": \"%s\", " \
				"\"filesAnalyzed\": false, \"licenseConcluded\": \"%s\", \"licenseDeclared\": \"%s\", \"copyrightText\": \"NOASSERTION\", " \
				"\"externalRefs\": [{\"referenceCategory\": \"PACKAGE-MANAGER\", \"referenceType\": \"purl\", \"referenceLocator\": \"pkg:%s\"}]}",
				id, name, version, source, licence, licence, purl)
		}
		function relation(from, type, to) {
			return sprintf("{\"spdxElementId\": \"SPDXRef-%s\", \"relationshipType\": \"%s\", \"relatedSpdxElement\": \"SPDXRef-%s\"}", from, type, to)
		}
		BEGIN {
			home = "github.com/crius-run/crius"
			packages = package("crius", "crius", version, "https://" home, "Apache-2.0", "golang/" home "@" version)
			relations = relation("DOCUMENT", "DESCRIBES", "crius")
		}
		{
			packages = packages ",\n    " package("module-" NR, $1, $2, "NOASSERTION", "NOASSERTION", "golang/" $1 "@" $2)
			relations = relations ",\n    " relation("crius", "DEPENDS_ON", "module-" NR)
		}
		END {
			printf "{\n  \"spdxVersion\": \"SPDX-2.3\",\n  \"dataLicense\": \"CC0-1.0\",\n  \"SPDXID\": \"SPDXRef-DOCUMENT\",\n" \
				"  \"name\": \"crius %s for %s\",\n  \"documentNamespace\": \"https://%s/sbom/%s/%s\",\n" \
				"  \"creationInfo\": {\"created\": \"%s\", \"creators\": [\"Organization: crius\"]},\n" \
				"  \"packages\": [\n    %s\n  ],\n  \"relationships\": [\n    %s\n  ]\n}\n",
				version, arch, home, version, arch, created, packages, relations
		}'
}

# stage ROOT ZSH lays out the files that all formats share.
stage() {
	local root=$1 zsh=$2 doc=$1/usr/share/doc/crius page
	install -D -m 755 -t "$root/usr/bin" "$bindir/crius" "$bindir/crius-unpack" "$bindir/crius-conmon" "$bindir/crius-conmon-shim"
	install -D -m 644 -t "$root/usr/lib/systemd/system" contrib/systemd/crius.service
	install -D -m 644 contrib/tmpfiles.d/crius.conf "$root/usr/lib/tmpfiles.d/crius.conf"
	install -D -m 644 -t "$root/etc/crius" contrib/crius.toml
	install -d -m 755 "$root/etc/crius/crius.toml.d"
	install -D -m 644 -t "$root/usr/share/selinux/packages" contrib/selinux/crius.cil
	install -D -m 644 completions/crius.bash "$root/usr/share/bash-completion/completions/crius"
	install -D -m 644 completions/_crius "$root/$zsh/_crius"
	install -D -m 644 -t "$root/usr/share/fish/vendor_completions.d" completions/crius.fish
	for page in docs/man/*.[1-8]; do
		install -D -m 644 -t "$root/usr/share/man/man${page##*.}" "$page"
		gzip -9n "$root/usr/share/man/man${page##*.}/${page##*/}"
	done
	install -D -m 644 -t "$doc" README.md SECURITY.md RELEASES.md CHANGELOG.md CONTRIBUTING.md
	install -D -m 644 -t "$doc/docs" docs/*.md
	install -D -m 644 -t "$doc/docs/decisions" docs/decisions/*.md
	install -D -m 644 -t "$doc/docs/performance" docs/performance/*
	install -m 644 "$work/bom" "$doc/sbom.spdx.json"
	install -D -m 644 -t "$doc/examples" contrib/crictl.yaml contrib/policy.json contrib/registries.conf
	install -D -m 644 -t "$doc/examples" contrib/grafana/crius.json contrib/prometheus/crius.rules.yaml
	install -D -m 644 contrib/sysctl.d/99-crius.conf "$doc/examples/sysctl.conf"
	install -D -m 644 contrib/modules-load.d/crius.conf "$doc/examples/modules-load.conf"
	if [ -d contrib/cni ]; then
		install -D -m 644 -t "$doc/examples/cni" contrib/cni/*
	fi
}

# age sets the time of all files to that of the source.
age() { find "$1" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +; }

# changelog is required by Debian; the changes are in CHANGELOG.md.
changelog() {
	printf 'crius (%s) unstable; urgency=medium\n\n  * See CHANGELOG.md beside this file.\n\n -- %s  %s\n' \
		"$version" "$(sed -n 's/^Maintainer: //p' $here/deb/control)" "$(date -uRd "@$SOURCE_DATE_EPOCH")"
}

deb() {
	local root=$work/deb arch script
	case $goarch in
	arm) arch=armhf ;;
	ppc64le) arch=ppc64el ;;
	*) arch=$goarch ;;
	esac
	stage "$root" usr/share/zsh/vendor-completions
	install -D -m 644 -t "$root/usr/share/doc/crius" $here/deb/copyright
	gzip -9nc "$work/licences" >"$root/usr/share/doc/crius/third-party-licences.gz"
	changelog | gzip -9n >"$root/usr/share/doc/crius/changelog.gz"
	install -D -m 644 $here/deb/lintian-overrides "$root/usr/share/lintian/overrides/crius"
	install -d "$root/DEBIAN"
	install -m 644 $here/deb/conffiles "$root/DEBIAN"
	for script in postinst prerm postrm; do
		install -m 755 $here/deb/$script "$root/DEBIAN"
	done
	(cd "$root" && find . -path ./DEBIAN -prune -o -type f -printf '%P\0' | sort -z | xargs -0 md5sum) >"$root/DEBIAN/md5sums"
	sed -e "s/@VERSION@/$version/" -e "s/@ARCH@/$arch/" \
		-e "s/@SIZE@/$(find "$root" -type f -printf '%s\n' | awk '{ n += int($1 / 1024) + 1 } END { print n }')/" $here/deb/control >"$root/DEBIAN/control"
	age "$root"
	dpkg-deb --root-owner-group -Zxz --threads-max=1 --build "$root" "$outdir/crius_${version}_$arch.deb"
}

rpm() {
	local root=$work/rpm arch
	case $goarch in
	amd64) arch=x86_64 ;;
	arm64) arch=aarch64 ;;
	arm) arch=armv7hl ;;
	*) arch=$goarch ;;
	esac
	stage "$root" usr/share/zsh/site-functions
	install -D -m 644 -t "$root/usr/share/licenses/crius" LICENSE
	gzip -9nc "$work/licences" >"$root/usr/share/licenses/crius/third-party-licences.gz"
	age "$root"
	rpmbuild --quiet -bb --target "$arch-linux" \
		--define "_topdir $work/rpmbuild" --define "_rpmdir $outdir" --define "_rpmfilename %%{name}-%%{version}-%%{release}.%%{arch}.rpm" \
		--define "crius_version $version" --define "crius_stage $root" \
		--define "crius_date $(LC_ALL=C date -ud "@$SOURCE_DATE_EPOCH" '+%a %b %d %Y')" \
		--define "_buildhost localhost" --define "use_source_date_epoch_as_buildtime 1" --define "clamp_mtime_to_source_date_epoch 1" \
		--define "_binary_payload w6.xzdio" --define "_sysconfdir /etc" --define "_defaultlicensedir /usr/share/licenses" \
		$here/rpm/crius.spec
	echo "rpmbuild: $(ls "$outdir"/crius-"$version"-*."$arch".rpm)"
}

# archive packs the same files for machines without either format, with an install script.
archive() {
	local name=crius-$version-linux-$goarch root
	root=$work/archive/$name
	stage "$root" usr/share/zsh/site-functions
	install -m 755 $here/tar/install.sh "$root"
	install -m 644 LICENSE "$root"
	gzip -9nc "$work/licences" >"$root/third-party-licences.gz"
	age "$root"
	tar -C "$work/archive" --sort=name --owner=0 --group=0 --numeric-owner --format=gnu -c "$name" | gzip -9n >"$outdir/$name.tar.gz"
	echo "tar: $outdir/$name.tar.gz"
}

version=$(package_version "$version")
licences >"$work/licences"
bom >"$work/bom"
install -m 644 "$work/bom" "$outdir/crius-$version-linux-$goarch.spdx.json"
with dpkg-deb dpkg deb
with rpmbuild 'rpm on Debian, rpm-build elsewhere' rpm
with tar tar archive
