package conmon

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/regular"
)

// Exit is how a container's init ended.
type Exit struct {
	Code       int32     `json:"exit_code"` // 128 + Signal if a signal ended it
	Signal     int32     `json:"signal"`
	FinishedAt time.Time `json:"finished_at"`
	OOMKills   uint64    `json:"oom_kills"`         // processes of the container killed because memory ran out
	OOMSeen    OOMSeen   `json:"oom_seen,omitzero"` // only in the exit file
	Message    string    `json:"message,omitempty"` // why the exit is unknown, if the monitor did not see it, or what could not be killed
}

// OOMSeen is what the monitor has noticed of OOM kills before the end: so many until then. The kernel
// announces them on cgroup v2 alone.
type OOMSeen struct {
	Kills uint64 `json:"kills"`
	At    int64  `json:"at"` // Unix time in seconds
}

// exitDocument is the exit file.
type exitDocument struct {
	Version int    `json:"version"`
	ID      string `json:"id,omitempty"`
	Exit
}

// maxDocument is far above the size of any document of a monitor.
const maxDocument = 16 << 10

// ReadExit reads an exit file. The error is fault.NotFound if there is none.
func ReadExit(file string) (Exit, error) {
	text, err := regular.ReadIn(filepath.Dir(file), filepath.Base(file), maxDocument)
	if errors.Is(err, fs.ErrNotExist) {
		return Exit{}, fmt.Errorf("exit file %s %w", file, fault.NotFound)
	}
	if err != nil {
		return Exit{}, fmt.Errorf("exit file %w", err)
	}
	var doc exitDocument
	err = json.Unmarshal(text, &doc)
	if err == nil && doc.Version != wire.Version {
		err = fmt.Errorf("unsupported version %d, expected %d", doc.Version, wire.Version)
	}
	if err != nil {
		return Exit{}, fmt.Errorf("exit file %s: %w", file, err)
	}
	return doc.Exit, nil
}

// WriteExit records, as durably as a monitor, the exit of a container whose
// monitor can no longer do that.
func WriteExit(file string, e Exit) error {
	e.FinishedAt = e.FinishedAt.UTC()
	text, err := json.Marshal(exitDocument{Version: wire.Version, Exit: e})
	if err != nil {
		return fmt.Errorf("exit file %s: %w", file, err)
	}
	return wire.WriteFile(file, append(text, '\n'), true)
}

// Rest is what the monitor would have reported when it began to rest.
type Rest = wire.Rest

// Processes are the two processes of a container, as its monitor has recorded
// them. Container is zero while there is none.
type Processes struct {
	Monitor   Process `json:"monitor"`
	Container Process `json:"container"`
	Rests     *Rest   `json:"rests"` // the monitor rests, or has begun to wake
}

// ReadProcesses reads what the monitor of a run directory has recorded, dead or
// alive. The error is fault.NotFound if it never came that far.
func ReadProcesses(dir string) (Processes, error) {
	file := dir + "/" + wire.Processes
	text, err := regular.ReadIn(dir, wire.Processes, maxDocument)
	if errors.Is(err, fs.ErrNotExist) {
		return Processes{}, fmt.Errorf("%s %w", file, fault.NotFound)
	}
	if err != nil {
		return Processes{}, err
	}
	var p Processes
	if err := json.Unmarshal(text, &p); err != nil {
		return Processes{}, fmt.Errorf("%s: %w", file, err)
	}
	return p, nil
}
