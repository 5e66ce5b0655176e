package main

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/crius-run/crius/test/kit/tools"
)

// collectCheckpoint adds the tests of test/integration and what they run besides the
// package, in a tree like the one that they expect.
func collectCheckpoint(ctx context.Context, repo string, files map[string]string) error {
	probe, err := tools.Probe(ctx)
	failing, failingErr := tools.Failing(ctx)
	criu, criuErr := tools.Criu(ctx)
	checkpointctl, ctlErr := tools.Checkpointctl(ctx)
	program := filepath.Join(repo, ".cache", "node", "integration.test")
	err = errors.Join(err, failingErr, criuErr, ctlErr,
		command(ctx, repo, "go", "test", "-c", "-tags", tools.BuildTags, "-o", program, "./test/integration"))
	if err != nil {
		return err
	}
	files["tree/test/integration/integration.test"] = program
	add := func(path string) error {
		name, err := filepath.Rel(repo, path)
		files["tree/"+name] = path
		return err
	}
	return errors.Join(
		add(filepath.Join(repo, "go.mod")),
		add(probe), add(failing),
		add(checkpointctl),
		add(filepath.Join(repo, "test", "tools", "checkpointctl", "go.mod")), // names the version
		filepath.WalkDir(filepath.Dir(criu), func(path string, _ fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() { // documentation has links to nothing
				return err
			}
			return add(path)
		}))
}
