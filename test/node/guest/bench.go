package main

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"strings"

	"github.com/crius-run/crius/test/kit/tools"
)

// bench measures rows of test/bench in the tree that the host has prepared, and
// returns an error if it could not.
func bench(ctx context.Context, rows []string) error {
	log, err := os.Create("out/bench.log")
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.CommandContext(ctx, ".cache/node/bench", append([]string{"-raw", "../out/bench.md"}, rows...)...)
	cmd.Dir = "tree"
	cmd.Env = append(os.Environ(), tools.PrebuiltVariable+"=1")
	cmd.Stdout = io.MultiWriter(log, os.Stdout)
	cmd.Stderr = cmd.Stdout
	r := report{mode: "bench"}
	r.promise("measure "+strings.Join(rows, " "), cmd.Run())
	return errors.Join(r.write(), os.WriteFile("out/left", nil, 0o644))
}
