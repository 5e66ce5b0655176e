package oci

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/regular"
	"github.com/crius-run/crius/oci/proc"
)

// machineFile is the name of the file in a container's run directory that names the processes of the
// virtual machine that the container is in. Without a virtual machine, or if crius does not know its
// program, there is no such file.
const machineFile = "machine.json"

// maxMachineFile is far above the size of that file, which usually names one process.
const maxMachineFile = 16 << 10

// noteMachine writes the file.
func noteMachine(ref Ref) error {
	all, err := Helpers()
	if err != nil {
		return err
	}
	pod := cmp.Or(ref.Holder, ref.ID)
	var machine []conmon.Process
	for _, h := range slices.Concat(all[pod], all.Short(pod)) {
		if matchesAny(h.Program, machinePrograms) {
			machine = append(machine, h.Process)
		}
	}
	if len(machine) == 0 {
		return nil
	}
	text, err := json.Marshal(machine)
	if err != nil {
		return err
	}
	return replace(filepath.Join(ref.Dir, machineFile), text)
}

// readMachine returns what the file says; nothing if there is none.
func readMachine(ref Ref) (machine []conmon.Process, err error) {
	text, err := regular.ReadIn(ref.Dir, machineFile, maxMachineFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &machine)
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", machineFile, err)
	}
	return machine, nil
}

// machineDied reports whether the container was in a virtual machine that is dead.
func machineDied(ref Ref) bool {
	machine, err := readMachine(ref)
	return err == nil && len(machine) > 0 && !slices.ContainsFunc(machine, conmon.Alive)
}

// watchMachine kills the process that stands for the container on the node once its virtual machine
// has died: Kata's shim of a container may wait forever for an answer from the machine.
func (t *cliTask) watchMachine(ctx context.Context) {
	machine, err := readMachine(t.ref)
	if err != nil {
		slog.WarnContext(ctx, "cannot watch the virtual machine of a container", "container", t.ref.ID, "err", err)
	}
	if len(machine) == 0 {
		return
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	t.unwatch, t.machineDead = cancel, make(chan struct{})
	go func() {
		defer cancel()
		select {
		case <-t.client.Exited():
		case <-ctx.Done():
		}
	}()
	go func() {
		defer cancel()
		for _, p := range machine {
			if err := conmon.Await(ctx, p); err != nil {
				if ctx.Err() == nil {
					slog.WarnContext(ctx, "cannot watch the virtual machine of a container", "container", t.ref.ID, "pid", p.PID, "err", err)
				}
				return
			}
		}
		slog.WarnContext(ctx, "virtual machine died, ending its container", "container", t.ref.ID, "pid", machine[0].PID)
		close(t.machineDead)
		if err := t.client.Signal(unix.SIGKILL); err != nil {
			slog.ErrorContext(ctx, "cannot end a container whose virtual machine died", "container", t.ref.ID, "err", err)
		}
	}()
}

// endWithMachine kills a command once the virtual machine that it runs in has died.
func (t *cliTask) endWithMachine(e *execution) {
	if t.machineDead == nil {
		return
	}
	go func() {
		select {
		case <-t.machineDead:
			proc.KillTree(e.PID, proc.IsOwnChild)
		case <-e.Ended():
		}
	}()
}
