package foreign

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/regular"
	"github.com/crius-run/crius/internal/rootprocess"
)

// users are the processes that use something in the store, each described in words.
type users struct {
	ids    map[string]string // by the id of the container of the process
	layers map[string]string // by the layer that is mounted for the process
	crio   string            // CRI-O's server
}

const maxCommandLine = 4 << 20

var (
	idInCgroup   = regexp.MustCompile(`[0-9a-f]{64}`)
	layerInMount = regexp.MustCompile(`/overlay/([0-9a-f]{64})/`)
)

// findUsers inspects all processes. A process uses a container if the name of its cgroup has the
// container's id, or if it is the container's monitor, conmon. It uses a layer if that is mounted
// in its mount namespace. Processes that have ended meanwhile use nothing.
func findUsers() (*users, error) {
	u := &users{ids: map[string]string{}, layers: map[string]string{}}
	dirs, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	namespaces := map[string]bool{} // mount namespaces that have been read
	for _, dir := range dirs {
		if _, err := strconv.Atoi(dir.Name()); err != nil {
			continue
		}
		if err := u.look(filepath.Join("/proc", dir.Name()), namespaces); err != nil && !ended(err) {
			return nil, fmt.Errorf("look at process %s: %w", dir.Name(), err)
		}
	}
	return u, nil
}

// ended reports whether an error means that a process has ended or, with EINVAL, has no more
// mounts.
func ended(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL)
}

func (u *users) look(proc string, namespaces map[string]bool) error {
	pid, err := strconv.Atoi(filepath.Base(proc))
	if err != nil {
		return err
	}
	program := rootprocess.Program(pid)
	process := fmt.Sprint("process ", pid)
	if program != "" {
		process += " (" + program + ")"
	}
	comm, err := os.ReadFile(filepath.Join(proc, "comm"))
	if err != nil {
		return err
	}
	if strings.TrimSpace(string(comm)) == "crio" { // even if another program says so: then everything is kept
		u.crio = process + " (crio)"
	}
	cgroup, err := os.ReadFile(filepath.Join(proc, "cgroup"))
	if err != nil {
		return err
	}
	for _, id := range idInCgroup.FindAllString(string(cgroup), -1) {
		u.ids[id] = process
	}
	if program == "conmon" || program == "conmonrs" { // files of other programs might never end
		arguments, err := regular.Read(filepath.Join(proc, "cmdline"), maxCommandLine)
		if err != nil {
			return err
		}
		for _, argument := range bytes.Split(arguments, []byte{0}) {
			u.ids[string(argument)] = process
		}
	}
	namespace, err := os.Readlink(filepath.Join(proc, "ns/mnt"))
	if err != nil { // the link may be hidden although the mounts are not
		namespace = proc
	}
	if namespaces[namespace] {
		return nil
	}
	mounts, err := os.ReadFile(filepath.Join(proc, "mountinfo"))
	if err != nil {
		return err
	}
	namespaces[namespace] = true
	for _, m := range layerInMount.FindAllStringSubmatch(string(mounts), -1) {
		u.layers[m[1]] = process
	}
	return nil
}

// of says which process uses a container; empty: none.
func (u *users) of(c *Container) string {
	switch {
	case u.ids[c.ID] != "":
		return u.ids[c.ID] + " belongs to it"
	case c.Runtime == CRIO && u.crio != "":
		return "CRI-O is running: " + u.crio
	case u.layers[c.Layer] != "":
		return "mounted where " + u.layers[c.Layer] + " is"
	}
	return ""
}
