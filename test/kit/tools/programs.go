package tools

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/crius-run/crius/internal/flock"
)

// BuildTags are the product's build tags.
const BuildTags = "containers_image_openpgp,exclude_graphdriver_btrfs,nri_no_wasm"

// PrebuiltVariable says that everything this package builds from the
// repository's own sources has just been built, as by test/prebuild before a
// run of all tests.
const PrebuiltVariable = "CRIUS_TEST_PREBUILT"

// Programs returns the directory of crius, crius-unpack, crius-conmon and
// crius-conmon-shim: the one in the environment variable CRIUS_BIN, else one
// below the repository's .cache into which it builds them, so that a test never
// uses an old program.
//
// With race it builds the server and its pull worker with the race detector.
// The monitor is always built without: a node runs one per container, and its
// memory and start-up are measured.
func Programs(ctx context.Context, race bool) (string, error) {
	if dir := os.Getenv("CRIUS_BIN"); dir != "" {
		return filepath.Abs(dir)
	}
	repo, err := Repository()
	if err != nil {
		return "", err
	}
	dir := programsDir(repo, race)
	version := exec.CommandContext(ctx, "contrib/packaging/version.sh")
	version.Dir = repo
	said, err := version.Output()
	if err != nil {
		return "", fmt.Errorf("version of the sources: %w", err)
	}
	flags := "-X main.version=" + strings.TrimSpace(string(said))
	return dir, errors.Join(
		compile(ctx, repo, race, []string{"go", "build", "-tags", BuildTags, "-ldflags", flags, "-o", dir + "/", "./cmd/crius", "./cmd/crius-unpack"}),
		compile(ctx, repo, false, []string{"go", "build", "-ldflags", flags, "-o", dir + "/", "./cmd/crius-conmon", "./cmd/crius-conmon-shim"}))
}

// Unpacker builds only crius-unpack.
func Unpacker(ctx context.Context, race bool) (path string, err error) {
	repo, err := Repository()
	if err != nil {
		return "", err
	}
	path = filepath.Join(programsDir(repo, race), "crius-unpack")
	return path, compile(ctx, repo, race, []string{"go", "build", "-tags", BuildTags, "-o", path, "./cmd/crius-unpack"})
}

// PointsServer builds a crius that asks, at every point of its work, what to do
// there: the test binary of cmd/crius, which knows the environment variable
// [PointsVariable].
func PointsServer(ctx context.Context, race bool) (path string, err error) {
	repo, err := Repository()
	if err != nil {
		return "", err
	}
	path = filepath.Join(programsDir(repo, race), "crius-points")
	return path, compile(ctx, repo, race, []string{"go", "test", "-c", "-tags", BuildTags, "-o", path, "./cmd/crius"})
}

// PointsVariable names the unix socket on which a [PointsServer] asks.
const PointsVariable = "CRIUS_POINTS"

// Probe builds the program of nearly every container of a test, see
// test/images.
func Probe(ctx context.Context) (string, error) { return ProbeFor(ctx, runtime.GOARCH) }

// ProbeFor builds it for another processor, by its GOARCH.
func ProbeFor(ctx context.Context, arch string) (string, error) {
	return static(ctx, arch, "probe", "./test/images/probe")
}

// Failing builds the program that stands in for another one and fails when told
// to, see test/failing.
func Failing(ctx context.Context) (string, error) {
	return static(ctx, runtime.GOARCH, "failing", "./test/failing")
}

// Standin builds the program that stands in for nginx and httpd in the images of
// critest, see test/conformance/standin.
func Standin(ctx context.Context) (string, error) { return standin(ctx, runtime.GOARCH) }

func standin(ctx context.Context, arch string) (string, error) {
	return static(ctx, arch, "standin", "./test/conformance/standin")
}

// Demo builds the demo, see test/demo.
func Demo(ctx context.Context) (string, error) { return DemoFor(ctx, runtime.GOARCH) }

// DemoFor builds it for another processor, by its GOARCH.
func DemoFor(ctx context.Context, arch string) (string, error) {
	return static(ctx, arch, "demo", "./test/demo")
}

// static builds a static program of the repository.
func static(ctx context.Context, arch, name, pkg string) (string, error) {
	repo, err := Repository()
	if err != nil {
		return "", err
	}
	path := filepath.Join(repo, ".cache", "testkit", dirOf(arch), name)
	argv := []string{"go", "build", "-trimpath", "-tags", BuildTags, "-ldflags=-s -w", "-o", path, pkg}
	return path, compile(ctx, repo, false, argv, "GOARCH="+arch)
}

func programsDir(repo string, race bool) string {
	if race {
		return filepath.Join(repo, ".cache", "testkit-race")
	}
	return filepath.Join(repo, ".cache", "testkit")
}

// compile runs a go command in the repository, unless its result has been
// prebuilt for the whole run.
func compile(ctx context.Context, repo string, race bool, argv []string, env ...string) error {
	if os.Getenv(PrebuiltVariable) != "" {
		return nil
	}
	cgo := "CGO_ENABLED=0"
	if race {
		cgo = "CGO_ENABLED=1"
		argv = slices.Insert(argv, 2, "-race")
	}
	unlock, err := lock(filepath.Join(repo, ".cache"))
	if err != nil {
		return err
	}
	defer unlock()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = repo
	cmd.Env = append(append(os.Environ(), cgo), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, out)
	}
	return nil
}

// lock keeps concurrent test processes from building the same thing. It makes
// the directory.
func lock(dir string) (unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := flock.Wait(f); err != nil {
		f.Close()
		return nil, err
	}
	return func() { f.Close() }, nil
}

// Repository returns the root of the source tree in which the caller runs.
func Repository() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		mod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && strings.HasPrefix(string(mod), "module github.com/crius-run/crius\n") {
			return dir, nil
		}
		if dir == "/" {
			return "", errors.New("not inside the crius source tree; set CRIUS_BIN to the directory of its programs")
		}
		dir = filepath.Dir(dir)
	}
}
