// Package rootprocess identifies the program that a process of the node's root
// runs.
package rootprocess

import (
	"os"
	"path"
	"strconv"
	"strings"

	"github.com/crius-run/crius/internal/regular"
)

const maxStatus = 64 << 10

// Program returns the file name of the program that a process runs on behalf of
// the node's root, and "" for any other process. A process can call itself and
// its arguments whatever it likes, so only what the kernel alone decides
// counts:
//
//   - It is in the mount namespace of this process. Every container has another
//     one, and only root on the node can leave it for this one.
//   - All its user ids are 0 in this process's user namespace. So no user of
//     the node has started it, not even by a program with the set-user-ID bit.
//     The owner of /proc/PID does not show that: it is root if the process may
//     not be dumped.
//   - Its executable file has that name, even if another file has replaced it
//     since, as after an upgrade.
//
// Nothing here blocks, unlike reading the command line: that lies in the memory
// of the process, and a hanging process blocks its readers.
func Program(pid int) string {
	proc := "/proc/" + strconv.Itoa(pid)
	program, err := os.Readlink(proc + "/exe")
	if err != nil {
		return ""
	}
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return ""
	}
	if ns, err := os.Readlink(proc + "/ns/mnt"); err != nil || ns != own {
		return ""
	}
	status, err := regular.Read(proc+"/status", maxStatus)
	if err != nil || !strings.Contains(string(status), "\nUid:\t0\t0\t0\t0\n") {
		return ""
	}
	return path.Base(strings.TrimSuffix(program, " (deleted)"))
}
