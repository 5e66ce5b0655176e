package conmon

import (
	"os"
	"strconv"
	"strings"

	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/regular"
	"github.com/crius-run/crius/internal/rootprocess"
)

// Monitor is a monitor that was found among the node's processes, as its
// command line describes it.
type Monitor struct {
	Process
	ID, Dir string // of its Spec
}

// programName is what the monitor's program is called, wherever it lies.
const programName = "crius-conmon"

const maxCommandLine = 4 << 20 // twice what the kernel takes at exec by default

// Monitors are all monitors on the node, of other servers as well. Nothing that a
// process says counts before the kernel has said that it is one (rootprocess.Program).
// Which file it was made of does not count: after an upgrade it is one that has no name
// any more; and the program itself is also in containers, as /pause.
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
		// Asked again, for a process may have gone into a container meanwhile.
		if id != "" && dir != "" && rootprocess.Program(pid) == programName && Alive(process) {
			found = append(found, Monitor{process, id, dir})
		}
	}
	return found, nil
}
