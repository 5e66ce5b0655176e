package pod

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/regular"
)

// LevelFile is the file of a state directory that says which servers may work on it.
const LevelFile = "level"

// recordLevel is raised when a server writes something that earlier servers must not work on: that
// they would misread, rather than ignore. It says nothing of fields that may be ignored.
const recordLevel = 1

// level is the content of LevelFile.
type level struct {
	Level   int    `json:"level"`
	Version string `json:"version"` // of the server that wrote it, for people
}

// ErrLevel is the error of CheckLevel.
var ErrLevel = fmt.Errorf("%w", fault.Precondition)

// CheckLevel returns ErrLevel if a later server has used the state directory in a way
// that this one cannot continue. Nothing is changed: the caller must not change anything, either.
func CheckLevel(stateDir string) error {
	found, err := readLevel(stateDir)
	if err != nil || found.Level <= recordLevel {
		return err
	}
	return fmt.Errorf("the records in %s are of level %d, written by crius %.40q, and this crius knows only levels up to %d: nothing was changed; install that version or a later one, or remove all pods with it first (crius wipe): %w",
		stateDir, found.Level, found.Version, recordLevel, ErrLevel)
}

// NoteLevel writes that only servers that know the level of this one may work on the state
// directory.
func NoteLevel(stateDir, version string) error {
	if found, err := readLevel(stateDir); err != nil || found.Level == recordLevel {
		return err
	}
	text, err := json.Marshal(level{recordLevel, version})
	if err != nil {
		return err
	}
	path := filepath.Join(stateDir, LevelFile)
	if err := os.WriteFile(path+".new", append(text, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// readLevel returns level 0 if there is no file.
func readLevel(stateDir string) (found level, err error) {
	const most = 4 << 10 // bytes
	path := filepath.Join(stateDir, LevelFile)
	text, err := regular.Read(path, most)
	if errors.Is(err, fs.ErrNotExist) {
		return found, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &found)
	}
	if err != nil {
		return found, fmt.Errorf("%s: %w", path, err)
	}
	return found, nil
}
