package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// BuildTags are those of the product.
const BuildTags = "containers_image_openpgp,exclude_graphdriver_btrfs"

// Programs returns the directory that holds crius, crius-conmon and crius-conmon-shim: the one
// that the environment variable CRIUS_BIN names, else one below the
// repository's .cache into which they are built, so that a test never meets an
// old program.
//
// With race the server is built with the race detector. The monitor never is:
// it is what a node has most of, and its memory and start-up are measured.
func Programs(ctx context.Context, race bool) (string, error) {
	if dir := os.Getenv("CRIUS_BIN"); dir != "" {
		return filepath.Abs(dir)
	}
	repo, err := Repository()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(repo, ".cache", "testkit")
	server := []string{"go", "build", "-tags", BuildTags}
	cgo := "CGO_ENABLED=0"
	if race {
		dir += "-race"
		server = append(server, "-race")
		cgo = "CGO_ENABLED=1"
	}
	unlock, err := lock(dir)
	if err != nil {
		return "", err
	}
	defer unlock()
	server = append(server, "-o", filepath.Join(dir, "crius"), "./cmd/crius")
	monitor := []string{"go", "build", "-o", dir + "/", "./cmd/crius-conmon", "./cmd/crius-conmon-shim"}
	return dir, errors.Join(
		build(ctx, repo, cgo, server),
		build(ctx, repo, "CGO_ENABLED=0", monitor))
}

// PointsServer builds a crius that asks at every point of its work what shall
// happen there: the test binary of cmd/crius, which knows the environment
// variable [PointsVariable].
func PointsServer(ctx context.Context, race bool) (path string, err error) {
	repo, err := Repository()
	if err != nil {
		return "", err
	}
	dir, cgo := filepath.Join(repo, ".cache", "testkit"), "CGO_ENABLED=0"
	argv := []string{"go", "test", "-c", "-tags", BuildTags}
	if race {
		dir += "-race"
		cgo = "CGO_ENABLED=1"
		argv = append(argv, "-race")
	}
	unlock, err := lock(dir)
	if err != nil {
		return "", err
	}
	defer unlock()
	path = filepath.Join(dir, "crius-points")
	return path, build(ctx, repo, cgo, append(argv, "-o", path, "./cmd/crius"))
}

// PointsVariable names the unix socket on which a [PointsServer] asks.
const PointsVariable = "CRIUS_POINTS"

func build(ctx context.Context, repo, cgo string, argv []string) error {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = repo
	cmd.Env = append(os.Environ(), cgo)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, out)
	}
	return nil
}

// lock keeps test processes that run at the same time from building into the
// same directory, which it makes.
func lock(dir string) (unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		f.Close()
		return nil, err
	}
	return func() { f.Close() }, nil
}

// Repository is the root of the source tree in which the caller runs.
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
