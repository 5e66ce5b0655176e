# What can be made here: see `make help`.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build

VERSION ?= $(shell contrib/packaging/version.sh)
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 0)

TAGS := containers_image_openpgp,exclude_graphdriver_btrfs,nri_no_wasm
# The processor to build for, in Go's name; only build and packages use it. Programs for another
# processor have a directory of their own. The environment's ARCH is ignored: it may say x86_64.
ARCH =
BIN ?= bin$(if $(ARCH),/$(ARCH))
comma := ,
LINT_VERSION := $(shell sed -nE 's|.*/golangci-lint/v2 (v[^ ]+).*|\1|p' test/tools/lint/go.mod)

# A Go that is older than go.mod requires has to fetch the toolchain, even where it may not by
# default. One that suffices keeps GOTOOLCHAIN=local, and fetches nothing (docs/hacking.md).
ifeq ($(shell go env GOTOOLCHAIN 2>/dev/null),local)
ifneq ($(shell go list -m 2>/dev/null),github.com/crius-run/crius)
export GOTOOLCHAIN := auto
endif
endif

.PHONY: help
help: ## Say what can be made.
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

.PHONY: build
build: ## Build the programs of the product into bin/ (BIN). ARCH=arm64: for that processor, into bin/arm64/.
	CGO_ENABLED=0 $(if $(ARCH),GOARCH=$(ARCH) GOARM=7) go build -trimpath -tags $(TAGS) -ldflags "-s -w -X main.version=$(VERSION)" -o $(BIN)/ ./cmd/...

.PHONY: setup
setup: ## Install what tests need (Debian, as root). Removes and replaces no package.
	@test/setup.sh

.PHONY: tools
tools: setup ## Build what tests run: crius, its images, critest, crictl, busybox, runc, runsc.
	@echo "builds what the tests run; with empty caches this takes some minutes"
	@go run ./test/prebuild
	@$(if $(RACE),go run ./test/prebuild crius-race)

.PHONY: test
test: tools ## Run all tests. PACKAGES=./oci/... RUN=TestX: only those. RACE=1: with the race detector.
	@CRIUS_TEST_PREBUILT=1 go run ./test/runner $(if $(RACE),-race) -tags $(TAGS) -run '$(RUN)' $(PACKAGES)

.PHONY: crash
crash: setup ## Kill everything at every point of every verb. VERB=, HANDLER=, ACTION=, POINT=: only those; COUNT=n: a sample.
	CGO_ENABLED=0 go run -tags $(TAGS) ./test/crash $(if $(VERB),-verb '$(VERB)') $(if $(HANDLER),-handler '$(HANDLER)') \
		$(if $(ACTION),-action '$(ACTION)') $(if $(POINT),-point '$(POINT)') $(if $(COUNT),-count $(COUNT)) \
		$(if $(SEED),-seed $(SEED)) $(if $(WORKERS),-workers $(WORKERS))

.PHONY: crash-random
crash-random: setup ## Run COUNT (20000) containers of up to 50 ms while the server is killed at random.
	CGO_ENABLED=0 go run -tags $(TAGS) ./test/crash -random $(or $(COUNT),20000) $(if $(SEED),-seed $(SEED))

.PHONY: soak
soak: setup ## Let two nodes live for HOURS (1) and print the slope of everything that could grow. SEED= HANDLERS=shim-kata1,kata-runtime: with those.
	CGO_ENABLED=0 go run -tags $(TAGS) ./test/soak -hours $(or $(HOURS),1) $(if $(SEED),-seed $(SEED)) $(if $(HANDLERS),-handlers $(HANDLERS))

.PHONY: demo
demo: ## Show a real pod, a killed server and a clean node. HANDLER=crun: with that runtime.
	@test/setup.sh demo-$(or $(HANDLER),runc)
	@echo "builds crius and the demo; with empty caches this takes a minute or two"
	@go run ./test/prebuild crius probe demo
	@CRIUS_TEST_PREBUILT=1 .cache/testkit/demo -handler $(or $(HANDLER),runc)

.PHONY: differential
differential: ## Unpack some 620 images of all makers and shapes, and compare each file with what skopeo makes of them.
	@test/setup.sh test libarchive-tools
	@go run ./test/prebuild crius
	CGO_ENABLED=0 go test -count=1 -v -timeout 1h -tags $(TAGS),differential ./test/differential

.PHONY: conformance
conformance: ## Run critest with runc and with crun. HANDLER=crun, FOCUS=regexp: only those. HANDLER=runsc, shim-runsc or shim-runc: with that.
	@test/setup.sh
	CGO_ENABLED=0 go run -tags $(TAGS) ./test/conformance $(if $(FOCUS),-focus '$(FOCUS)') $(HANDLER)

.PHONY: kubelet
kubelet: setup ## Run real kubelets on crius; building them takes half an hour, once. KUBELET=v1.36.3 HANDLER=crun RUN=TestX: only those.
	@export CRIUS_TEST_KUBELET='$(KUBELET)' CRIUS_TEST_KUBELET_HANDLER='$(HANDLER)'; \
	go run ./test/prebuild crius probe criu kubelet && \
	CRIUS_TEST_PREBUILT=1 go run ./test/runner -v -tags $(TAGS),kubelet -run '$(RUN)' ./test/kubelet

.PHONY: cluster
cluster: ## Run Kubernetes' own end-to-end tests on a cluster of one node. SUITE=features or disk RUNTIME=containerd CLUSTER=v1.37.2 HANDLER= FOCUS= SKIP=
	@test/setup.sh test curl bash
	@CRIUS_TEST_CLUSTER='$(CLUSTER)' go run ./test/prebuild crius probe standin critest busybox cluster
	CRIUS_TEST_CLUSTER='$(CLUSTER)' CRIUS_TEST_PREBUILT=1 CGO_ENABLED=0 go run -tags $(TAGS) ./test/cluster \
		$(if $(RUNTIME),-runtime $(RUNTIME)) $(if $(HANDLER),-handler $(HANDLER)) $(if $(SUITE),-suite $(SUITE)) \
		$(if $(FOCUS),-focus '$(FOCUS)') $(if $(SKIP),-skip '$(SKIP)')

.PHONY: node
node: ## Run critest on a cgroup v2 systemd machine. DRIVER=systemd HANDLER=crun FOCUS=regexp: only those.
	@test/setup.sh test dpkg-dev patch xz-utils bzip2 rpm mmdebstrap user-mode-linux e2fsprogs
	@$(MAKE) --no-print-directory packages >/dev/null
	CGO_ENABLED=0 go run -tags $(TAGS) ./test/node -packages $(BIN)/packages $(if $(SUITE),-suite $(SUITE)) \
		$(if $(DRIVER),-driver $(DRIVER)) $(if $(HANDLER),-handler $(HANDLER)) $(if $(FOCUS),-focus '$(FOCUS)')

# Without a release yet, the oldest state whose records the current one promises to read.
PREVIOUS ?= $(shell git describe --tags --abbrev=0 HEAD^ 2>/dev/null || echo 9851b21)

.PHONY: node-packages
node-packages: # the packages of now and of PREVIOUS
	@test/setup.sh test dpkg-dev patch xz-utils bzip2 rpm mmdebstrap user-mode-linux e2fsprogs
	@$(MAKE) --no-print-directory packages >/dev/null
	rm -rf .cache/previous && mkdir -p .cache/previous
	git archive '$(PREVIOUS)' | tar -x -C .cache/previous
	@$(MAKE) --no-print-directory -C .cache/previous VERSION="$$(contrib/packaging/version.sh '$(PREVIOUS)')" packages >/dev/null

.PHONY: node-upgrade
node-upgrade: node-packages ## Upgrade the package of such a machine under running pods. PREVIOUS=commit: from that one; DRIVER= HANDLER=
	CGO_ENABLED=0 go run -tags $(TAGS) ./test/node -packages $(BIN)/packages -previous .cache/previous/bin/packages \
		$(if $(SUITE),-suite $(SUITE)) -driver $(or $(DRIVER),systemd) -handler $(or $(HANDLER),runc-current$(comma)crun)

.PHONY: node-install
node-install: PREVIOUS = HEAD^
node-install: node-packages ## Do on such a machine what an operator does, with a real kubelet: install, faults, CRI-O's configuration, downgrade, purge. PREVIOUS=commit
	CGO_ENABLED=0 go run -tags $(TAGS) ./test/node -install -packages $(BIN)/packages -previous .cache/previous/bin/packages \
		$(if $(SUITE),-suite $(SUITE)) -driver systemd -handler runc

.PHONY: node-bench
node-bench: ## Measure crius on such a machine, which has cgroup v2 and one processor. ROW=pods: only that
	@test/setup.sh test dpkg-dev patch xz-utils bzip2 rpm mmdebstrap user-mode-linux e2fsprogs
	@$(MAKE) --no-print-directory packages >/dev/null
	CGO_ENABLED=0 go run -tags $(TAGS) ./test/node -packages $(BIN)/packages $(if $(SUITE),-suite $(SUITE)) \
		-driver cgroupfs -handler runc -bench '$(or $(ROW),pods exec)'

.PHONY: node-qemu
node-qemu: ## The same, but slower, on Debian's usual kernel, with cpuset and hugetlb. DRIVER=, HANDLER=; FOCUS=.: all specs.
	@test/setup.sh test dpkg-dev patch xz-utils bzip2 rpm mmdebstrap qemu-system-x86 e2fsprogs
	@$(MAKE) --no-print-directory packages >/dev/null
	CGO_ENABLED=0 go run -tags $(TAGS) ./test/node -machine qemu -packages $(BIN)/packages $(if $(SUITE),-suite $(SUITE)) \
		-driver $(or $(DRIVER),systemd) -handler $(or $(HANDLER),runc) -focus '$(or $(FOCUS),AppArmor|Security Context)'

# Tests whose result can depend on the kernel, cgroups or AppArmor, rather than on files and requests, and which
# fit into the memory and speed of that machine.
NODE_CHECKPOINT = Checkpoint(Container|Pod)|DuringCheckpoint|RestorePod$$|TestRestored|HeldContainer

.PHONY: node-checkpoint
node-checkpoint: ## Checkpoint and restore on that kernel, which has cgroup v2. DRIVER=; RUN=regexp: only those tests.
	@test/setup.sh test dpkg-dev patch xz-utils bzip2 rpm mmdebstrap qemu-system-x86 e2fsprogs
	@$(MAKE) --no-print-directory packages >/dev/null
	CGO_ENABLED=0 go run -tags $(TAGS) ./test/node -machine qemu -packages $(BIN)/packages $(if $(SUITE),-suite $(SUITE)) \
		-driver $(or $(DRIVER),systemd) -handler $(or $(HANDLER),runc-current) -checkpoint '$(or $(RUN),$(NODE_CHECKPOINT))'

.PHONY: node-selinux
node-selinux: ## The same with SELinux enforcing: AVC denials, and what keeps pods apart. DRIVER= HANDLER= FOCUS=regexp: only those.
	@test/setup.sh test dpkg-dev patch xz-utils bzip2 rpm mmdebstrap user-mode-linux e2fsprogs
	@$(MAKE) --no-print-directory packages >/dev/null
	CGO_ENABLED=0 go run -tags $(TAGS) ./test/node -machine selinux -packages $(BIN)/packages $(if $(SUITE),-suite $(SUITE)) \
		$(if $(DRIVER),-driver $(DRIVER)) $(if $(HANDLER),-handler $(HANDLER)) $(if $(FOCUS),-focus '$(FOCUS)')

# Some of everything, since a spec takes many seconds there.
NODE_ARM64 = basic operations|Image Manager|support log|support networking|streaming interfaces|SeccompProfilePath

.PHONY: node-arm64
node-arm64: ## Run the demo and some of critest on an emulated arm64 machine. DRIVER=, HANDLER=; FOCUS=.: all specs.
	@test/setup.sh test dpkg-dev patch xz-utils bzip2 rpm mmdebstrap e2fsprogs qemu-system-arm \
		qemu-user-static binfmt-support arch-test gcc-aarch64-linux-gnu libc6-dev-arm64-cross
	@$(MAKE) --no-print-directory ARCH=arm64 packages >/dev/null
	CGO_ENABLED=0 go run -tags $(TAGS) ./test/node -machine arm64 -packages $(BIN)/arm64/packages $(if $(SUITE),-suite $(SUITE)) \
		-driver $(or $(DRIVER),systemd) -handler $(or $(HANDLER),runc$(comma)crun) -focus '$(or $(FOCUS),$(NODE_ARM64))'

.PHONY: runtimes
runtimes: ## Show what pods do over every runtime, with times. HANDLER=runsc RUN=TestX: only those.
	@test/setup.sh
	CGO_ENABLED=0 go test -count=1 -v -tags $(TAGS) -timeout 30m -run '$(RUN)' ./test/runtimes $(if $(HANDLER),-args -handlers $(HANDLER),-args -all)

.PHONY: powercut
powercut: ## Cut the power of machines again and again, and look what crius makes of it. COUNT=1000 SEED=1
	@test/setup.sh test mmdebstrap user-mode-linux e2fsprogs
	CGO_ENABLED=0 go run -tags $(TAGS) ./test/node -cuts $(or $(COUNT),1000) $(if $(SEED),-seed $(SEED))

.PHONY: bench
bench: ## Measure crius beside a current containerd. ROW=pods: only that; ROW=big SIZE=10G: an image of that size, on the disk; CONTAINERD=debian; OUT=page.md RAW=tables.md JSON=file: write it down.
	@test/setup.sh test conmon containerd $(if $(filter checkpoint,$(ROW)),python3)
	CGO_ENABLED=0 go run -tags $(TAGS) ./test/bench $(if $(OUT),-out '$(OUT)') $(if $(RAW),-raw '$(RAW)') $(if $(JSON),-json '$(JSON)') $(if $(CONTAINERD),-containerd '$(CONTAINERD)') $(ROW)

.PHONY: budgets
budgets: setup ## Measure memory, CPU and allocations against their budgets, alone and without the race detector.
	CGO_ENABLED=0 go test -count=1 -p 1 -parallel 1 -v -tags $(TAGS),budgets -run '^TestBudget' ./...

.PHONY: browser
browser: ## Look at the status page with a real browser, which is installed if it is missing (220 MB).
	@test/setup.sh chromium-headless-shell
	CGO_ENABLED=0 go test -count=1 -v -tags $(TAGS),browser -run '^TestBrowser' ./server/statuspage

.PHONY: cve
cve: tools ## Run the tests named after vulnerabilities, and print a row for each of those.
	@CRIUS_TEST_PREBUILT=1 go run ./test/cve -tags $(TAGS)

# Tests that run go read source files that the outer go does not track, so cached results would be stale.
.PHONY: check
check: lint ## Lint, and run the unit tests: what every pull request must pass.
	@uncached=$$(git grep --untracked -lE 'exec\.Command(Context)?\(.*"go"' -- '*_test.go' | grep -vP '^test/(?!kit/|layout/)' | xargs -n1 dirname | sort -u); \
	uncached=$$(go list -tags $(TAGS) $$(sed 's|^|./|' <<<"$$uncached")); \
	go test -tags $(TAGS) $$(go list -tags $(TAGS) ./... | grep -vP '/crius/test/(?!kit/|layout$$)' | grep -vxF "$$uncached"); \
	go test -tags $(TAGS) -count=1 $$uncached

.PHONY: fuzz
fuzz: ## Search with every fuzz target, TIME (10s) each. RUN=regexp PACKAGES=./oci/...: only those.
	CGO_ENABLED=0 go run -tags $(TAGS) ./test/fuzz -tags $(TAGS) -time $(or $(TIME),10s) $(if $(RUN),-run '$(RUN)') \
		$(or $(PACKAGES),$$(go list -tags $(TAGS) ./... | grep -v /crius/test/))

.PHONY: fuzz-cri
fuzz-cri: setup ## Make random calls of every RPC and check what comes of them. COUNT=100 sequences, TURNS=40 of each, SEED=1.
	CGO_ENABLED=0 go run -tags $(TAGS) ./test/crifuzz $(if $(COUNT),-count $(COUNT)) $(if $(TURNS),-turns $(TURNS)) $(if $(SEED),-seed $(SEED))

# golangci-lint understands the Go that it was built with. Its version is that of the module in
# test/tools/lint.
.PHONY: lint
lint: ## Complain about form: gofmt, go vet, golangci-lint.
	@unformatted=$$(find . -path ./.cache -prune -o -name '*.go' -print0 | xargs -0 "$$(go env GOROOT)/bin/gofmt" -l); \
	[ -z "$$unformatted" ] || { echo "run gofmt -w on" $$unformatted; exit 1; }
	go vet -tags $(TAGS),browser,budgets,kubelet ./...
	@linter=.cache/bin/golangci-lint-$(LINT_VERSION)-$$(go env GOVERSION); \
	[ -x "$$linter" ] || { echo "builds golangci-lint $(LINT_VERSION) with $$(go env GOVERSION)"; \
	CGO_ENABLED=0 go build -C test/tools/lint -trimpath -ldflags "-s -w -X main.version=$(LINT_VERSION)" \
		-o "$(CURDIR)/$$linter.new" github.com/golangci/golangci-lint/v2/cmd/golangci-lint; \
	mv "$$linter.new" "$$linter"; }; \
	set -x; "$$linter" run --allow-parallel-runners

.PHONY: generate
generate: build ## Write completions, manual pages and the sample configuration anew.
	$(BIN)/crius generate .

.PHONY: packages
packages: build ## Build DEB, RPM, archive and list of modules into bin/packages/. ARCH=arm64: into bin/arm64/packages/.
	contrib/packaging/build.sh $(VERSION) "$(or $(ARCH),$$(go env GOARCH))" $(BIN) $(BIN)/packages

.PHONY: release
release: ## Make all files of a release from the tag that is checked out, with checksums, into bin/release/. KEY= signs them.
	contrib/packaging/release.sh

.PHONY: packages-test
packages-test: build ## Build the packages and look into them.
	@test/setup.sh rpm cpio systemd jq
	test/packages.sh $(BIN)

.PHONY: packages-lint
packages-lint: build ## Have lintian and rpmlint look at the packages.
	@test/setup.sh rpm lintian rpmlint
	rm -rf $(BIN)/lint
	contrib/packaging/build.sh $(VERSION) "$(or $(ARCH),$$(go env GOARCH))" $(BIN) $(BIN)/lint >/dev/null
	lintian --allow-root --pedantic --tag-display-limit 0 --fail-on error,warning,info,pedantic $(BIN)/lint/*.deb
	rpmlint -c contrib/packaging/rpm/rpmlint.toml --strict $(BIN)/lint/*.rpm

# 386 represents 32-bit processors: an amd64 machine runs its tests without emulation.
.PHONY: arch
arch: ## Build for other processors, vet, and run tests of formats and arithmetic under emulation. ARCH='arm s390x': only those.
	@test/setup.sh qemu-user-static
	test/arch.sh $(or $(ARCH),386 arm arm64 ppc64le riscv64 s390x)

.PHONY: outdated
outdated: ## List the modules that are linked into crius and have newer versions.
	@go list -deps -tags $(TAGS) -f '{{with .Module}}{{if not .Main}}{{.Path}}{{end}}{{end}}' ./cmd/... | sort -u | \
		xargs go list -m -u -e -f '{{with .Update}}{{$$.Path}} {{$$.Version}}: {{.Version}}{{end}}' | sed '/^$$/d'

.PHONY: clean
clean: ## Remove what was built.
	rm -rf $(BIN) .cache
