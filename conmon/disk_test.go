package conmon

import (
	"bytes"
	"encoding/json"
	"os"
	"testing"

	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/test/kit/disk"
)

// monitorDocument is the file of a monitor, whose version ReadProcesses leaves out.
type monitorDocument struct {
	Version int `json:"version"`
	Processes
}

func TestNamesOnDisk(t *testing.T) {
	disk.Names(t, map[string]any{"exit.json": exitDocument{}, "monitor.json": monitorDocument{}})
}

// Files of a monitor that set every field are read, and are what a monitor writes.
func TestFilesOfMonitorsWithEveryField(t *testing.T) {
	doc := disk.Full[exitDocument](t, "exit-full.json")
	exit := wire.Exit{Code: int(doc.Code), Signal: int(doc.Signal), Sec: doc.FinishedAt.Unix(), Nsec: doc.FinishedAt.Nanosecond(), OOMKills: doc.OOMKills, OOMSeen: doc.OOMSeen.Kills, OOMSeenAt: doc.OOMSeen.At, Message: doc.Message}
	same(t, "exit-full.json", exit.AppendDocument(nil, doc.ID))
	if read, err := ReadExit("testdata/exit-full.json"); err != nil || read != doc.Exit {
		t.Errorf("exit: %+v, %v", read, err)
	}

	monitor := disk.Full[monitorDocument](t, "monitor-full.json")
	same(t, "monitor-full.json", wire.AppendProcesses(nil, monitor.Monitor, monitor.Container, monitor.Rests))
	dir := t.TempDir()
	text, err := os.ReadFile("testdata/monitor-full.json")
	if err == nil {
		err = os.WriteFile(dir+"/"+wire.Processes, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	read, err := ReadProcesses(dir)
	if err != nil || read.Monitor != monitor.Monitor || read.Container != monitor.Container || read.Rests == nil || *read.Rests != *monitor.Rests {
		t.Errorf("monitor: %+v, %v", read, err)
	}
}

// same compares what a monitor writes with a file of testdata but for white space.
func same(t *testing.T, file string, written []byte) {
	t.Helper()
	text, err := os.ReadFile("testdata/" + file)
	if err != nil {
		t.Fatal(err)
	}
	var want bytes.Buffer
	if err := json.Compact(&want, text); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(bytes.TrimSpace(written), want.Bytes()) {
		t.Errorf("%s: a monitor writes %s, want %s", file, written, want.Bytes())
	}
}
