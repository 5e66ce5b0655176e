package shim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/fault"
)

// recordFile is the name of a Record in a container's run directory.
const recordFile = "shim.json"

// Record says how to reach the shim of a container.
type Record struct {
	Endpoint
	// Program is the path of the shim's program.
	Program string `json:"program"`
	// Leader: the shim was started for this container, in whose run directory it
	// works, and may serve others as well.
	Leader bool `json:"leader"`
	// Sandboxed: the container lives in a runtime sandbox with its own kernel, where pids
	// of this machine mean nothing.
	Sandboxed bool `json:"guest"`
	// Process is the shim's, once the shim has reported it; zero before.
	Process wire.Process `json:"process"`
}

// Dial connects to the shim of the record. The error is fault.NotFound if it is dead, even if
// another process listens in its place: anyone in the node's network namespace may have taken the
// name of an abstract socket.
func (r Record) Dial(ctx context.Context) (*Client, error) {
	if r.Process != (wire.Process{}) && !conmon.Alive(r.Process) {
		return nil, fmt.Errorf("the shim, process %d, has ended: %w", r.Process.PID, fault.NotFound)
	}
	return r.Endpoint.Dial(ctx)
}

// Reach is Dial for a caller to whom a container whose shim is dead still
// exists. The error is ErrGone if the shim is dead, and fault.Unavailable in any
// case.
func (r Record) Reach(ctx context.Context) (*Client, error) {
	client, err := r.Dial(ctx)
	switch {
	case errors.Is(err, fault.NotFound):
		return nil, fmt.Errorf("reach shim at %s: %w", r.Address, ErrGone)
	case err != nil:
		return nil, fmt.Errorf("%w: %w", err, fault.Unavailable)
	}
	return client, nil
}

// Write writes the record into a run directory. It describes running processes
// and need not survive a power cut.
func (r Record) Write(dir string) error {
	text, err := json.Marshal(r)
	if err == nil {
		err = wire.WriteFile(filepath.Join(dir, recordFile), append(text, '\n'), false)
	}
	if err != nil {
		return fmt.Errorf("write shim record: %w", err)
	}
	return nil
}

// ReadRecord finds the shim of a container. The error is fault.NotFound if none
// has been started, or its address is unknown.
func ReadRecord(dir string) (Record, error) {
	var r Record
	text, err := os.ReadFile(filepath.Join(dir, recordFile))
	if errors.Is(err, fs.ErrNotExist) {
		return r, fmt.Errorf("no shim record in %s: %w", dir, fault.NotFound)
	}
	if err == nil {
		err = json.Unmarshal(text, &r)
	}
	if err != nil {
		return r, fmt.Errorf("read shim record in %s: %w", dir, err)
	}
	return r, nil
}

// LogFile is the file in the run directory to which shims log; it is made
// before they are started.
const LogFile = "log"

// Begun reports whether a shim may have been started for the container of a run
// directory, and Forget has not been called since.
func Begun(dir string) bool {
	if dir == "" {
		return false
	}
	_, err := os.Lstat(filepath.Join(dir, LogFile))
	return err == nil
}

// Forget deletes the shim's files in a run directory, its log last, once
// nothing of the container is left.
func Forget(dir string) error {
	for _, name := range []string{recordFile, LogFile} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// Workers returns the processes whose working directory is a run directory: a
// shim that was started for the container, and its descendants. They are found
// in this way even if no record names them.
func Workers(dir string) []wire.Process {
	links, _ := filepath.Glob("/proc/[0-9]*/cwd")
	var found []wire.Process
	for _, link := range links {
		at, err := os.Readlink(link)
		if err != nil || strings.TrimSuffix(at, " (deleted)") != dir {
			continue
		}
		var pid int
		if _, err := fmt.Sscanf(link, "/proc/%d/cwd", &pid); err != nil {
			continue
		}
		if p, err := wire.Find(pid); err == nil {
			found = append(found, p)
		}
	}
	return found
}
