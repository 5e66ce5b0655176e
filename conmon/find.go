package conmon

import (
	"os"
	"strconv"
	"strings"

	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/regular"
	"github.com/crius-run/crius/internal/rootprocess"
)

// Monitor is a monitor found among the node's processes, as its command line
// describes it.
type Monitor struct {
	Process
	ID, Dir string // of its Spec
}

// programName is the name of the monitor's program, in any directory.
const programName = "crius-conmon"

const maxCommandLine = 4 << 20 // twice the kernel's default limit at exec

// Monitors returns all monitors on the node, including those of other servers.
// A process's own claims count only after the kernel has confirmed that it runs
// the program (rootprocess.Program). The executable file does not matter: after
// an upgrade it has no name any more; and containers have the program too, as
// /pause.
func Monitors() ([]Monitor, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var found []Monitor
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || rootprocess.Program(pid) != programName {
			continue
		}
		process, err := wire.Find(pid)
		if err != nil {
			continue
		}
		line, err := regular.Read("/proc/"+entry.Name()+"/cmdline", maxCommandLine)
		if err != nil {
			continue
		}
		argv := strings.Split(strings.TrimSuffix(string(line), "\x00"), "\x00")
		id, dir := wire.Identity(argv[1:])
		// Checked again, because the process may have entered a container
		// meanwhile.
		if id != "" && dir != "" && rootprocess.Program(pid) == programName && Alive(process) {
			found = append(found, Monitor{process, id, dir})
		}
	}
	return found, nil
}
