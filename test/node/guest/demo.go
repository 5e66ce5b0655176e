package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"

	"github.com/crius-run/crius/test/kit/tools"
)

// demo shows what make demo shows, with the programs of the package, on a
// machine that got the demo: one with another processor than the host's. Its
// output is kept in demo.log, and its result in the file demo. It returns what
// is wrong.
func demo(ctx context.Context, o options) (wrong []string) {
	if _, err := os.Stat("demo"); err != nil {
		return nil
	}
	var said bytes.Buffer
	cmd := exec.CommandContext(ctx, "./demo", "-handler", o.Handler)
	cmd.Env = append(os.Environ(), "CRIUS_BIN=/usr/bin", tools.PrebuiltVariable+"=1")
	cmd.Stdout = io.MultiWriter(&said, os.Stdout) // the console shows the progress
	cmd.Stderr = cmd.Stdout
	err := cmd.Run()
	err = errors.Join(err, os.WriteFile("out/demo.log", said.Bytes(), 0o644))
	_, end, _ := strings.Cut(said.String(), "\n\n") // after the steps
	if err == nil {
		err = os.WriteFile("out/demo", []byte("the demo: "+end), 0o644)
	}
	if err != nil {
		return []string{fmt.Sprintf("the demo: %v: %s", err, end)}
	}
	return nil
}
