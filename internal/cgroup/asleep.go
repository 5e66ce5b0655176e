package cgroup

import (
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
)

// Uninterruptible describes the first few threads in the cgroup and below it
// that sleep in the kernel and cannot be killed (state D): their process, its
// name and, if known, the kernel function in which they sleep. It is for
// people, and empty if nothing can be found out.
func Uninterruptible(cgroup string) []string {
	const most = 8
	cgroup, err := clean(cgroup)
	if err != nil || cgroup == "/" {
		return nil
	}
	all, _, err := find()
	if err != nil {
		return nil
	}
	pids, _ := members(all, cgroup)
	var asleep []string
	for _, pid := range pids {
		if len(asleep) == most {
			break
		}
		if text := Asleep(pid); text != "" {
			asleep = append(asleep, text)
		}
	}
	return asleep
}

// Frozen returns the file by which the cgroup, or one above it, has been frozen
// on v1 so that SIGKILL has no effect, and the value to write there to thaw it;
// v2 kills frozen processes, and Kill moves those of v1 out unless the kernel
// refuses that. Both are empty if the cgroup is not frozen, or not completely: if
// a process in uninterruptible sleep prevents that, the sleep is why SIGKILL has
// no effect, and Kill itself may be freezing the rest.
func Frozen(cgroup string) (file, thawed string) {
	return frozenBy(cgroup, func(h hierarchy) bool { return !h.v2() })
}

// Paused is Frozen for both versions: nothing in the cgroup runs.
func Paused(cgroup string) (file, thawed string) {
	return frozenBy(cgroup, func(hierarchy) bool { return true })
}

func frozenBy(cgroup string, counts func(hierarchy) bool) (file, thawed string) {
	cgroup, err := clean(cgroup)
	if err != nil {
		return "", ""
	}
	all, _, err := find()
	if err != nil {
		return "", ""
	}
	for _, h := range all {
		if counts(h) {
			if file, thawed = h.frozen(cgroup); file != "" {
				return file, thawed
			}
		}
	}
	return "", ""
}

func (h hierarchy) frozen(cgroup string) (file, thawed string) {
	cgroup = ofContainer(h, cgroup)
	is := func(at, file, line string) bool {
		text, err := os.ReadFile(h.dir(at) + file)
		return err == nil && strings.Contains("\n"+string(text), "\n"+line+"\n")
	}
	var by, self string
	switch {
	case h.v2() && is(cgroup, "/cgroup.events", "frozen 1"):
		by, self, thawed = "/cgroup.freeze", "/cgroup.freeze", "0"
	case h.has("freezer") && is(cgroup, "/freezer.state", "FROZEN"):
		by, self, thawed = "/freezer.state", "/freezer.self_freezing", "THAWED"
	default:
		return "", ""
	}
	for at := cgroup; at != "/"; at = path.Dir(at) {
		if is(at, self, "1") {
			return h.dir(at) + by, thawed
		}
	}
	return "", ""
}

// Asleep describes a process with a thread in such a sleep; else it is empty.
// It does not read files in /proc that need the process's memory, such as
// cmdline, because that could block the reader, too.
func Asleep(pid int) string {
	tasks, _ := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/task/*")
	for _, task := range tasks {
		stat, err := os.ReadFile(task + "/stat")
		name, state, found := strings.Cut(string(stat), "(")
		if end := strings.LastIndex(state, ")"); found && end >= 0 {
			name, state = state[:end], state[end+1:]
		}
		if err != nil || !strings.HasPrefix(state, " D ") {
			continue
		}
		where, err := os.ReadFile(task + "/wchan")
		if string(where) == "__refrigerator" {
			continue // frozen (cgroup v1), which also shows as D
		}
		text := "process " + strconv.Itoa(pid) + " (" + strings.ToValidUTF8(name, "?") + ")"
		if err == nil && len(where) > 1 { // "0" if the kernel hides it
			text += " in " + string(where)
		}
		return text
	}
	return ""
}
