package hostport

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
)

// Bounds of the nft program.
const (
	timeLimit = 30 * time.Second
	waitDelay = time.Second
	maxSaid   = 2 << 10 // bytes of its error output in an error
)

// Installed checks that there is an nft program. The error is
// fault.Unavailable.
func Installed() error {
	if _, err := exec.LookPath("nft"); err != nil {
		return fmt.Errorf("host ports need the program nft: install the package nftables, or set network.host_ports to cni if the network forwards them itself: %w: %w", err, fault.Unavailable)
	}
	return nil
}

// run has nft execute script as one transaction: all of it or nothing.
func run(ctx context.Context, script string) error {
	_, err := nft(ctx, script, "-f", "-")
	return err
}

// listing returns the table of a family, with numeric output.
func listing(ctx context.Context, f family) (string, error) {
	return nft(ctx, "", "-nn", "list", "table", string(f), tableName)
}

// nft runs the program.
func nft(ctx context.Context, stdin string, args ...string) (string, error) {
	if err := Installed(); err != nil {
		return "", err
	}
	defer trace.For(ctx, "nft")()
	cmd := exec.CommandContext(ctx, "nft", args...)
	cmd.Dir = "/"
	cmd.Env = append(cmd.Environ(), "LC_ALL=C")
	cmd.Stdin = strings.NewReader(stdin)
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	// It must not outlive this server and be overtaken by the next one.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	cmd.WaitDelay = waitDelay

	// The death signal comes with the end of the thread, so no other goroutine
	// may use and end the thread.
	runtime.LockOSThread()
	err := cmd.Run()
	runtime.UnlockOSThread()
	if err == nil || errors.Is(err, exec.ErrWaitDelay) {
		return out.String(), nil
	}
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	text := append(said.Bytes(), out.Bytes()...)
	if len(text) > maxSaid {
		text = text[:maxSaid]
	}
	return "", fmt.Errorf("nft: %w; output: %q", err, bytes.TrimSpace(text))
}
