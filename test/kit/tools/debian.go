package tools

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// errUnreachable says that no archive of Debian has answered, and that this machine has built nothing of the
// kind before.
var errUnreachable = errors.New("no archive of Debian can be reached")

// unreachable is the exit code of a script that has got no answer: EX_TEMPFAIL.
const unreachable = 75

// fromDebian is cached for what a script makes of packages. Each clone of the repository makes its own, as apt keeps
// nothing that it could take instead; of what was made last a copy is left with the user's other caches, as Go leaves
// modules. It is taken, which is said, if no archive can be reached, and only for the script that has made it.
func fromDebian(ctx context.Context, name string, script []byte, make func(repo, dir string) *exec.Cmd) (string, error) {
	copied := keptPath(name, fmt.Sprintf("%x", sha256.Sum256(script)))
	fresh := false
	path, err := cached(name, func(repo, dir string) *exec.Cmd { fresh = true; return make(repo, dir) })
	if failed := new(exec.ExitError); errors.As(err, &failed) && failed.ExitCode() == unreachable {
		err = fmt.Errorf("%w: %w", errUnreachable, err)
		made, missing := os.Stat(copied)
		if missing != nil {
			return "", err
		}
		fmt.Fprintf(os.Stderr, "%s is the one that was built here on %s: %v\n", name, made.ModTime().Format("2006-01-02"), err)
		return cached(name, func(_, dir string) *exec.Cmd {
			return exec.CommandContext(ctx, "cp", "-a", copied, filepath.Join(dir, filepath.Base(name)))
		})
	}
	if err == nil && fresh && copied != "" {
		if err := keep(ctx, path, copied); err != nil {
			fmt.Fprintf(os.Stderr, "%s is not kept for other clones: %v\n", name, err)
		}
	}
	return path, err
}

// keptPath returns where the copy of a program is, by what has made it; empty if this user has no caches.
func keptPath(name, maker string) string {
	dir, err := os.UserCacheDir()
	if err != nil {
		return ""
	}
	return filepath.Join(dir, "crius-tests", name, maker)
}

// keep leaves a copy of a program, in the place of those that other scripts have made. The time of the copy is when it
// was made.
func keep(ctx context.Context, path, copied string) error {
	dir := filepath.Dir(copied)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	others, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	made, err := os.MkdirTemp(dir, "")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(made) }()
	if out, err := exec.CommandContext(ctx, "cp", "-a", path, filepath.Join(made, "copy")).CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	for _, other := range others {
		if err := os.RemoveAll(filepath.Join(dir, other.Name())); err != nil {
			return err
		}
	}
	return os.Rename(filepath.Join(made, "copy"), copied)
}
