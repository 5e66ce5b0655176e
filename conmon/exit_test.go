package conmon_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"unicode/utf8"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/fault"
)

// An exit file is accepted only if it is JSON of the one version, and what was
// read can be written and read again.
func FuzzReadExit(f *testing.F) {
	f.Add(wire.Exit{Code: 137, Signal: 9, Sec: 1_700_000_000, Nsec: 5, OOMKills: 2}.AppendDocument(nil, "id"))
	f.Add([]byte(`{"version":1,"exit_code":-1,"finished_at":"0001-01-01T00:00:00Z","message":"monitor died"}`))
	f.Add([]byte(`{"version":2}`))
	f.Add([]byte(`{"version":1,"finished_at":"9999-12-31T23:59:59.999999999-23:59"}`))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, text []byte) {
		file := filepath.Join(t.TempDir(), "exit.json")
		must(os.WriteFile(file, text, 0o600))
		exit, err := conmon.ReadExit(file)
		if err != nil {
			if errors.Is(err, fault.NotFound) {
				t.Errorf("%q is taken for no file: %v", text, err)
			}
			return
		}
		var version struct{ Version int }
		if json.Unmarshal(text, &version) != nil || version.Version != wire.Version || !utf8.ValidString(exit.Message) {
			t.Errorf("%q was read as %+v", text, exit)
		}
		if exit.FinishedAt.UTC().Year() > 9999 {
			return // no monitor lives to see it
		}
		if err := conmon.WriteExit(file, exit); err != nil {
			t.Fatalf("%+v cannot be written: %v", exit, err)
		}
		again, err := conmon.ReadExit(file)
		if err != nil || !again.FinishedAt.Equal(exit.FinishedAt) {
			t.Fatalf("%+v became %+v, %v", exit, again, err)
		}
		if again.FinishedAt = exit.FinishedAt; again != exit {
			t.Errorf("%+v became %+v", exit, again)
		}
	})
}

// A monitor's document is read back; anything else is an error or a pair of
// processes that can be looked up without harm.
func FuzzReadProcesses(f *testing.F) {
	f.Add(wire.AppendProcesses(nil, wire.Process{PID: 1, StartTime: 2}, wire.Process{PID: 3, StartTime: 4}, &wire.Rest{Logged: 5, Discarded: 6, JournalLost: 7, Trouble: 2}))
	f.Add([]byte(`{"version":1,"monitor":{"pid":-1},"container":{"pid":-9223372036854775808}}`))
	f.Add([]byte(`{"monitor":{"pid":4611686018427387904},"container":null}`))
	f.Add([]byte("null"))
	f.Fuzz(func(t *testing.T, text []byte) {
		dir := t.TempDir()
		must(os.Chmod(dir, 0o700))
		file := filepath.Join(dir, wire.Processes)
		must(os.WriteFile(file, text, 0o600))
		p, err := conmon.ReadProcesses(dir)
		if err != nil {
			if errors.Is(err, fault.NotFound) || p != (conmon.Processes{}) {
				t.Errorf("%q was read as %+v, %v", text, p, err)
			}
			return
		}
		for _, one := range []conmon.Process{p.Monitor, p.Container} {
			if one.PID <= 0 && conmon.Alive(one) {
				t.Errorf("%q names a process %d that is alive", text, one.PID)
			}
		}
		must(os.WriteFile(file, wire.AppendProcesses(nil, p.Monitor, p.Container, p.Rests), 0o600))
		if again, err := conmon.ReadProcesses(dir); err != nil || !reflect.DeepEqual(again, p) {
			t.Errorf("%+v became %+v, %v", p, again, err)
		}
	})
}
