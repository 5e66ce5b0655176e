#!/usr/bin/env bash
# Builds the programs for other processors, vets all packages for them, and runs the
# tests for which qemu's emulation of a process is enough. 386, for which there are no
# packages, represents 32 bits on a real kernel: an amd64 machine runs it natively,
# including real monitors and cgroups.
#
#   test/arch.sh GOARCH...
set -euo pipefail
cd "$(dirname "$0")/.."
export CGO_ENABLED=0 GOARM=7
tags=containers_image_openpgp,exclude_graphdriver_btrfs,nri_no_wasm

# Rules, formats and arithmetic, which word size and byte order could break.
emulated=(
	./cmd/crius/config/... ./conmon/wire ./internal/capture ./internal/guarded ./internal/ids ./internal/lsm
	./internal/record ./internal/selinux ./network/hostport ./oci/annotation ./oci/classes ./oci/hooks ./oci/tuning
	./oci/version ./pod/usage ./pod/view ./server/stream ./server/tlsfile ./storage/durable ./storage/pull/progress
	./storage/pull/pullerror ./storage/registry/source ./storage/registry/trust
)
started=TestKilledWriter # fails with qemu: it starts the test program itself
# Packages that use kernel objects.
native=(
	./cmd/crius-conmon ./conmon/... ./internal/... ./nri/... ./server/...
)

test_packages() {
	if [ "$1" = 386 ]; then
		go test -vet=off -tags $tags "${emulated[@]}" "${native[@]}"
		return
	fi
	local qemu=qemu-$1-static
	case $1 in
	amd64) qemu=qemu-x86_64-static ;;
	arm64) qemu=qemu-aarch64-static ;;
	esac
	go test -vet=off -tags $tags -skip "$started" -exec "$qemu" "${emulated[@]}"
	# The content of the monitors' filter; qemu's emulation of a process has no filters.
	go test -vet=off -tags $tags -run '^TestFilter' -exec "$qemu" ./conmon/monitor
}

for arch; do
	export GOARCH=$arch
	began=$SECONDS
	bin=$(mktemp -d)
	trap 'rm -rf "$bin"' EXIT
	go build -trimpath -tags $tags -ldflags "-s -w" -o "$bin/" ./cmd/...
	rm -rf "$bin"
	go vet -tags $tags ./...
	test_packages "$arch"
	echo "ok    $arch ($((SECONDS - began)) s)"
done
