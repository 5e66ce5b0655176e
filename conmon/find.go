package conmon

import (
	"bytes"
	"os"
	"strconv"
	"strings"

	"github.com/crius-run/crius/conmon/wire"
)

// Monitor is a monitor that was found among the node's processes, as its
// command line describes it.
type Monitor struct {
	Process
	ID, Dir string // of its Spec
}

// programName is what the kernel calls a monitor.
const programName = "crius-conmon"

// Monitors are all monitors on the node, of other servers as well.
func Monitors() ([]Monitor, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var found []Monitor
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		proc := "/proc/" + entry.Name()
		// A command line lies in the memory of its process, for which one that
		// hangs lets everybody wait. Its name does not.
		name, err := os.ReadFile(proc + "/comm")
		if err != nil || string(bytes.TrimSpace(name)) != programName {
			continue
		}
		process, err := wire.Find(pid)
		if err != nil {
			continue
		}
		line, err := os.ReadFile(proc + "/cmdline")
		if err != nil {
			continue
		}
		argv := strings.Split(strings.TrimSuffix(string(line), "\x00"), "\x00")
		if opt, err := wire.ParseArgs(argv[1:]); err == nil && Alive(process) {
			found = append(found, Monitor{process, opt.ID, opt.Dir})
		}
	}
	return found, nil
}
