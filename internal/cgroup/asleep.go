package cgroup

import (
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
)

// Uninterruptible describes the threads in the cgroup and below it that sleep in
// the kernel in such a way that they cannot be killed (state D), the first few
// of them: their process, its name, and the kernel's function they are in where
// it tells. It is for people, and empty if nothing can be found out.
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

// Frozen returns the file by which the cgroup, or one above it, has been frozen so that
// SIGKILL does not end what is in it, and what to write there to thaw it: on v1, since v2
// kills the frozen. Both are empty if it is not, or not entirely: where something sleeps
// uninterruptibly, which keeps it from being frozen, that is why SIGKILL does not end it,
// and Kill itself may be freezing the rest.
func Frozen(cgroup string) (file, thawed string) {
	cgroup, err := clean(cgroup)
	if err != nil {
		return "", ""
	}
	all, _, err := find()
	if err != nil {
		return "", ""
	}
	for _, h := range all {
		if state, err := os.ReadFile(h.dir(cgroup) + "/freezer.state"); err != nil || string(state) != "FROZEN\n" {
			continue
		}
		for at := cgroup; h.has("freezer") && at != "/"; at = path.Dir(at) {
			if self, err := os.ReadFile(h.dir(at) + "/freezer.self_freezing"); err == nil && string(self) == "1\n" {
				return h.dir(at) + "/freezer.state", "THAWED"
			}
		}
	}
	return "", ""
}

// Asleep describes a process one of whose threads sleeps in that way; else it is
// empty. It does not read those of the process's files in /proc that need its
// memory, such as cmdline, which could keep the reader waiting, too.
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
		if err == nil && len(where) > 1 { // "0" where it is not told
			text += " in " + string(where)
		}
		return text
	}
	return ""
}
