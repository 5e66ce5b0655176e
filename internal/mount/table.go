package mount

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Info is one line of the kernel's mount table.
type Info struct {
	ID      int    // of the mount, as long as it exists
	Device  string // of the file system, as MAJOR:MINOR
	Root    string // directory of the file system that is visible at Point
	Point   string // where it is mounted
	Type    string // file system type, such as "cgroup2"
	Source  string // what is mounted, such as /dev/sda1; a file system may choose any text
	Options string // options of the file system (not of the mount), comma-separated
	Flags   string // options of the mount, comma-separated

	ReadOnly bool // nothing can be written through this mount
	Shared   bool // mounts below it propagate to its peers, and theirs to it
	Slave    bool // mounts below its master propagate to it
}

const self = "/proc/thread-self/mountinfo"

// Each calls f with every mount that this process sees, in the table's order,
// until f returns false. It skips malformed lines.
func Each(f func(Info) bool) error { return each(self, f) }

// EachOf is Each for another process. Points are paths below its root.
func EachOf(pid int, f func(Info) bool) error {
	return each(fmt.Sprintf("/proc/%d/mountinfo", pid), f)
}

func each(file string, f func(Info) bool) error {
	table, err := os.Open(file)
	if err != nil {
		return err
	}
	defer table.Close()
	lines := bufio.NewScanner(table)
	lines.Buffer(make([]byte, 0, 4<<10), 1<<20) // the kernel returns a page at a time
	for lines.Scan() {
		if m, ok := parse(lines.Text()); ok && !f(m) {
			return nil
		}
	}
	if err := lines.Err(); err != nil {
		return &os.PathError{Op: "read", Path: file, Err: err}
	}
	return nil
}

// Under lists the mount points at and below the directory prefix, each before
// its parents: unmounting them in this order leaves nothing mounted. Stacked
// mounts are listed as often as they exist.
func Under(prefix string) ([]string, error) {
	prefix, err := resolve(prefix)
	if err != nil {
		return nil, err
	}
	below := strings.TrimSuffix(prefix, "/") + "/"
	var points []string
	err = Each(func(m Info) bool {
		if m.Point == prefix || strings.HasPrefix(m.Point, below) {
			points = append(points, m.Point)
		}
		return true
	})
	slices.Sort(points)
	slices.Reverse(points) // a path sorts after its parents
	return points, err
}

// Of returns the mount that contains path. It goes by the name and follows no
// links, so that it does not touch a file system that may not answer.
func Of(path string) (Info, error) {
	path = filepath.Clean(path)
	var found Info
	err := Each(func(m Info) bool {
		in := m.Point == path || strings.HasPrefix(path, strings.TrimSuffix(m.Point, "/")+"/")
		if in && len(m.Point) >= len(found.Point) { // of two in the same place the later hides the other
			found = m
		}
		return true
	})
	return found, err
}

// A Place is a directory as its file system knows it, whichever mounts lead to it.
type Place struct {
	Device string // as MAJOR:MINOR
	Path   string // below the root of the file system
}

// PlaceOf returns the place of a path, by the name as Of does.
func PlaceOf(path string) (Place, error) {
	m, err := Of(path)
	if err != nil {
		return Place{}, err
	}
	below, err := filepath.Rel(m.Point, path)
	return Place{m.Device, filepath.Join(m.Root, below)}, err
}

// Holds reports whether other is this place or below it.
func (p Place) Holds(other Place) bool {
	return p.Device == other.Device && (p.Path == other.Path || strings.HasPrefix(other.Path, strings.TrimSuffix(p.Path, "/")+"/"))
}

// Place returns the place that is visible at Point.
func (m Info) Place() Place { return Place{m.Device, m.Root} }

// resolve returns path in the form that the mount table uses. A missing path is
// returned unchanged.
func resolve(path string) (string, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	real, err := filepath.EvalSymlinks(path)
	if errors.Is(err, fs.ErrNotExist) {
		return path, nil
	}
	return real, err
}

func listed(path string) (found bool, err error) {
	dir, err := resolve(filepath.Dir(path))
	if err != nil {
		return false, err
	}
	path = filepath.Join(dir, filepath.Base(path))
	err = Each(func(m Info) bool {
		found = m.Point == path
		return !found
	})
	return found, err
}

// parse parses a line of proc_pid_mountinfo(5):
//
//	36 35 98:0 /root /point rw,noatime master:1 - ext4 /dev/sda rw,errors=continue
func parse(line string) (Info, bool) {
	mount, filesystem, ok := strings.Cut(line, " - ")
	if !ok {
		return Info{}, false
	}
	m, f := strings.Split(mount, " "), strings.Split(filesystem, " ")
	if len(m) < 6 || len(f) < 3 {
		return Info{}, false
	}
	id, err := strconv.Atoi(m[0])
	if err != nil {
		return Info{}, false
	}
	info := Info{
		ID: id, Flags: m[5],
		Device: m[2], Root: unescape(m[3]), Point: unescape(m[4]), Type: f[0], Source: unescape(f[1]), Options: f[2],
		ReadOnly: slices.Contains(strings.Split(m[5], ","), "ro"),
	}
	for _, tag := range m[6:] {
		info.Shared = info.Shared || strings.HasPrefix(tag, "shared:")
		info.Slave = info.Slave || strings.HasPrefix(tag, "master:")
	}
	return info, true
}

// unescape undoes the kernel's \ooo for space, tab, newline and backslash.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	out := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) && octal(s[i+1]) && octal(s[i+2]) && octal(s[i+3]) {
			out = append(out, (s[i+1]-'0')<<6|(s[i+2]-'0')<<3|(s[i+3]-'0'))
			i += 3
			continue
		}
		out = append(out, s[i])
	}
	return string(out)
}

func octal(c byte) bool { return '0' <= c && c <= '7' }
