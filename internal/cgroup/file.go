package cgroup

import (
	"errors"
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
