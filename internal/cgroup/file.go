package cgroup

import (
	"errors"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// ReadFile reads a file of a cgroup, such as memory.current, without the final
// newline: in the hierarchy of the controller with which its name begins. A
// missing file is fault.NotFound, by which callers distinguish the two versions
// of cgroups.
func ReadFile(cgroup, name string) (string, error) {
	path, err := file(cgroup, name)
	if err != nil {
		return "", failed("read cgroup file", name, err)
	}
	text, err := read(unix.AT_FDCWD, path)
	if errors.Is(err, unix.ENOENT) {
		err = problem{fault.NotFound, "no such file"}
	}
	if err != nil {
		return "", failed("read cgroup file", path, err)
	}
	return strings.TrimSuffix(text, "\n"), nil
}

// WriteFile writes a file that ReadFile reads. If the kernel refuses the value,
// the error is the kernel's.
func WriteFile(cgroup, name, value string) error {
	path, err := file(cgroup, name)
	if err != nil {
		return failed("write cgroup file", name, err)
	}
	err = write(path, value+"\n") // the newline, because writing an empty value would be no write at all
	if errors.Is(err, unix.ENOENT) {
		err = problem{fault.NotFound, "no such file"}
	}
	if err != nil {
		return failed("write cgroup file", path, err)
	}
	return nil
}

func file(cgroup, name string) (string, error) {
	cgroup, err := clean(cgroup)
	if err != nil {
		return "", err
	}
	all, mode, err := find()
	if err != nil {
		return "", err
	}
	controller, _, _ := strings.Cut(name, ".")
	if mode == V2 {
		controller = ""
	}
	for _, h := range all {
		if h.has(controller) && !strings.Contains(name, "/") {
			return h.dir(cgroup) + "/" + name, nil
		}
	}
	return "", problem{fault.NotFound, "no hierarchy has the controller " + controller}
}

// Crowded returns the cgroup, this one or one above it, whose limit of processes and threads leaves
// no room for that many more, how many it has, and the limit. The path is empty if there is none, or
// if that is unknown.
func Crowded(cgroup string, more uint64) (at string, tasks, most uint64) {
	for at = path.Clean(cgroup); at != "/" && at != "."; at = path.Dir(at) {
		if tasks, most, limited := tasksIn(at); limited && tasks+more > most {
			return at, tasks, most
		}
	}
	return "", 0, 0
}

func tasksIn(cgroup string) (tasks, most uint64, limited bool) {
	limit, err := ReadFile(cgroup, "pids.max")
	if err != nil {
		return 0, 0, false
	}
	current, err := ReadFile(cgroup, "pids.current")
	if err != nil {
		return 0, 0, false
	}
	if most, err = strconv.ParseUint(limit, 10, 64); err != nil { // "max"
		return 0, 0, false
	}
	tasks, err = strconv.ParseUint(current, 10, 64)
	return tasks, most, err == nil
}

// OOMKills returns how many processes in the cgroup of a container the OOM killer has killed; 0 if
// that is unknown. crun has its containers one below their systemd scopes, and v1 does not count
// what is below.
func OOMKills(cgroup string) uint64 {
	at := []string{cgroup}
	if strings.HasSuffix(cgroup, ".scope") {
		at = []string{cgroup + "/container", cgroup}
	}
	for _, cgroup := range at {
		for _, name := range []string{"memory.oom_control", "memory.events"} {
			text, err := ReadFile(cgroup, name)
			if err != nil {
				continue
			}
			for line := range strings.Lines(text) {
				if count, ok := strings.CutPrefix(line, "oom_kill "); ok {
					n, _ := strconv.ParseUint(strings.TrimSpace(count), 10, 64)
					return n
				}
			}
		}
	}
	return 0
}
