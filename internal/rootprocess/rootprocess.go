// Package rootprocess says which program a process of the node's root runs.
package rootprocess

import (
	"os"
	"path"
	"strconv"
	"strings"

	"github.com/crius-run/crius/internal/regular"
)

const maxStatus = 64 << 10

// Program returns the file name of the program that a process runs on behalf of the
// node's root, and "" of any other process. A process can call itself and its arguments
// whatever it likes, so only what the kernel alone decides counts:
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
// Nothing here waits, as reading the command line may: that lies in the memory of the
// process, and one that hangs lets its readers wait.
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
