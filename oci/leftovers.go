package oci

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/shim"
	"github.com/crius-run/crius/internal/fault"
)

// ShimOf returns the process of the shim of a container; zero: it is in none,
// or that is not known.
func ShimOf(ref Ref) conmon.Process {
	record, err := shim.ReadRecord(ref.Dir)
	if err != nil {
		return conmon.Process{}
	}
	return record.Process
}

// EndLeftovers ignores a refusal: it means that the runtime no longer knows the
// container. Nothing is left in a dead virtual machine, for whose answer the
// runtime would wait.
func (r *cli) EndLeftovers(ctx context.Context, ref Ref) error {
	if ref.Holder == "" || machineDied(ref) {
		return nil
	}
	_, err := r.run(ctx, ref, nil, "kill", "--all", ref.ID, strconv.Itoa(int(unix.SIGKILL)))
	if _, refused := errors.AsType[*exec.ExitError](err); refused {
		return nil
	}
	return err
}

// EndLeftovers ignores a missing shim: it has ended, and its runtime sandbox with it.
func (r *shimmed) EndLeftovers(ctx context.Context, ref Ref) error {
	if ref.Holder == "" {
		return nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, hangTime,
		fmt.Errorf("the shim of %s did not answer within %s: %w", r.name, hangTime, fault.Timeout))
	defer cancel()
	record, err := shim.ReadRecord(ref.Dir)
	var client *shim.Client
	if err == nil {
		client, err = record.Dial(ctx)
	}
	if err == nil {
		defer client.Close()
		err = client.Kill(ctx, shim.Process{ID: ref.ID}, unix.SIGKILL, true)
	}
	if err == nil || errors.Is(err, fault.NotFound) || errors.Is(err, shim.ErrGone) {
		return nil
	}
	return fmt.Errorf("%s: kill leftover processes: %w", r.name, err)
}
