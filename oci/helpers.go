package oci

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/ids"
	"github.com/crius-run/crius/internal/poll"
	"github.com/crius-run/crius/internal/regular"
	"github.com/crius-run/crius/internal/rootprocess"
)

// Helper is a process that a runtime has started beside its containers: a
// virtual machine, its proxy or file server, a shim, or the runtime itself.
type Helper struct {
	conmon.Process
	Program string // the name of its executable file
}

// helperPrograms are patterns for the names of such programs.
var helperPrograms = append(slices.Clone(machinePrograms), "virtiofsd*", "kata-*", shimPrograms, "runc", "crun", "runsc", "youki")

// machinePrograms are patterns for the names of those that run virtual machines.
var machinePrograms = []string{"qemu-*", "cloud-hypervisor*", "firecracker*", "stratovirt*", "acrn-dm*"}

const shimPrograms = "containerd-shim-*"

// shortDigits is how many digits of a pod's id Kata gives to Firecracker, whose
// socket would have too long a name otherwise.
const shortDigits = 32

// idText matches an id, or its first digits, among other text.
var idText = regexp.MustCompile(fmt.Sprintf("[0-9a-f]{%d,}", shortDigits))

// maxHelperLine is far above the length of a hypervisor's command line.
const maxHelperLine = 256 << 10

// HelpersByID are helpers by what their command lines name: ids of pods or
// containers, or the first shortDigits of one.
type HelpersByID map[string][]Helper

// Short returns the helpers that name only the first digits of an id.
func (h HelpersByID) Short(id string) []Helper {
	if len(id) <= shortDigits {
		return nil
	}
	return h[id[:shortDigits]]
}

// Helpers returns the helpers on this node. They run on behalf of the node's
// root, outside of containers, by the kernel's account and not by their own.
// programs are names of further programs, such as those of the handlers.
func Helpers(programs ...string) (HelpersByID, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	all := HelpersByID{}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || !isHelper(rootprocess.Program(pid), programs) {
			continue
		}
		h, named, ok := helperOf(pid)
		if !ok || !isHelper(h.Program, programs) {
			continue
		}
		for _, id := range named {
			all[id] = append(all[id], h)
		}
	}
	return all, nil
}

// helperOf returns the process that has the pid now, and the ids, whole or
// shortened, that it names. A longer or otherwise shorter number is not an id.
func helperOf(pid int) (h Helper, named []string, ok bool) {
	process, err := wire.Find(pid)
	if err != nil {
		return h, nil, false
	}
	line, err := regular.Read("/proc/"+strconv.Itoa(pid)+"/cmdline", maxHelperLine)
	if err != nil {
		return h, nil, false
	}
	for _, id := range idText.FindAllString(string(line), -1) {
		if (ids.Valid(id) || len(id) == shortDigits) && !slices.Contains(named, id) {
			named = append(named, id)
		}
	}
	// Asked again: the process may have executed another program meanwhile.
	return Helper{process, rootprocess.Program(pid)}, named, conmon.Alive(process)
}

func isHelper(program string, programs []string) bool {
	if program == "" || strings.HasPrefix(program, "crius") {
		return false
	}
	return slices.Contains(programs, program) || matchesAny(program, helperPrograms)
}

func matchesAny(program string, patterns []string) bool {
	return slices.ContainsFunc(patterns, func(pattern string) bool {
		matched, _ := path.Match(pattern, program) // the patterns are well-formed
		return matched
	})
}

// endHelpers kills what a runtime has left of a pod's own container that it has
// deleted: some lose its virtual machine. Shims may have other containers. A
// process that is about to exit gets a moment to do so; one that the kernel
// cannot kill now is not waited for long.
func endHelpers(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastTime)
	defer cancel()
	var failed error
	const grace = 500 * time.Millisecond
	told, began := map[conmon.Process]bool{}, time.Now()
	poll.Until(ctx, 20*time.Millisecond, func() bool {
		all, err := Helpers()
		if failed = err; err != nil {
			return true
		}
		left := slices.DeleteFunc(slices.Concat(all[id], all.Short(id)), func(h Helper) bool { return strings.HasPrefix(h.Program, strings.TrimSuffix(shimPrograms, "*")) })
		if len(left) > 0 && time.Since(began) < grace {
			return false
		}
		for _, h := range left {
			if !told[h.Process] {
				told[h.Process] = true
				slog.WarnContext(ctx, "runtime has left a process, killing it", "container", id, "pid", h.PID, "program", h.Program)
			}
			_ = conmon.Signal(h.Process, unix.SIGKILL)
			_, _ = unix.Wait4(h.PID, nil, unix.WNOHANG, nil) // an orphan of the monitor, and so a child
		}
		return len(left) == 0
	})
	return failed
}
