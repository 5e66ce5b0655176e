package conmon

import (
	"os"
	"path"
	"strconv"
	"strings"

	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/regular"
)

// Monitor is a monitor that was found among the node's processes, as its
// command line describes it.
type Monitor struct {
	Process
	ID, Dir string // of its Spec
}

// programName is what the monitor's program is called, wherever it lies.
const programName = "crius-conmon"

const (
	maxCommandLine = 4 << 20 // twice what the kernel takes at exec by default
	maxStatus      = 64 << 10
)

// Monitors are all monitors on the node, of other servers as well.
//
// A process can call itself and its arguments whatever it likes, so nothing that
// it says counts before the kernel has said who it is: see trusted.
func Monitors() ([]Monitor, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	self, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return nil, err
	}
	var found []Monitor
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || !trusted(pid, self) {
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
		opt, err := wire.ParseArgs(argv[1:])
		// Asked again, for a process may have gone into a container meanwhile.
		if err == nil && trusted(pid, self) && Alive(process) {
			found = append(found, Monitor{process, opt.ID, opt.Dir})
		}
	}
	return found, nil
}

// trusted reports whether a process runs a program called crius-conmon on behalf
// of the node's root, by what the kernel alone decides:
//
//   - It is in the mount namespace of this process. Every container has another
//     one, and only who is root on the node already can leave it for this one.
//   - All its user ids are 0, as this process's user namespace counts. So a user
//     of the node has not started it, not even by a program with the set-user-ID
//     bit. The owner of /proc/PID would not tell: that is root's wherever the
//     process may not be dumped.
//   - The file that it was made of has that name, even if another one has taken
//     its place since, as after an upgrade.
//
// Which file that is does not count. After an upgrade it is one that has no
// name any more; and the program itself is also in containers, as /pause.
// Nothing here waits: only the command line lies in the memory of a process,
// for which one that hangs lets its readers wait.
func trusted(pid int, mountNS string) bool {
	proc := "/proc/" + strconv.Itoa(pid)
	program, err := os.Readlink(proc + "/exe")
	if err != nil || path.Base(strings.TrimSuffix(program, " (deleted)")) != programName {
		return false
	}
	if ns, err := os.Readlink(proc + "/ns/mnt"); err != nil || ns != mountNS {
		return false
	}
	status, err := regular.Read(proc+"/status", maxStatus)
	return err == nil && strings.Contains(string(status), "\nUid:\t0\t0\t0\t0\n")
}
