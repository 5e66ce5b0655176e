package storage

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/thread"
)

// overlay describes one overlay mount: read-only layers below a writable one.
type overlay struct {
	lower   []string // absolute paths, top first
	upper   string   // empty, and work too: nothing is writable
	work    string
	target  string
	label   string   // SELinux context of all files; may be empty
	options []string // as in storage.conf's mountopt
	private bool     // mount is called on a thread that shares neither mounts nor directory with others
}

// mountSource marks crius's mounts in the mount table.
const mountSource = "crius"

// mount mounts o at its target. It asks for `volatile` where the kernel knows
// it (5.10): a container's writable layer does not survive the container, so
// syncing it at every unmount buys nothing and can take minutes.
func (o overlay) mount() error {
	err := o.mountByContext()
	switch {
	case errors.Is(err, unix.ENOSYS), errors.Is(err, errNoAppend):
		return o.mountByString()
	case errors.Is(err, unix.EINVAL):
		// Before 6.5 any parameter is taken, and only the last step refuses
		// what is unknown. What is wrong indeed is wrong both ways, and the
		// first one says more.
		if o.mountByString() == nil {
			return nil
		}
	}
	return err
}

// errNoAppend: the kernel's overlay lacks the lowerdir+ parameter (6.5 and 6.6).
var errNoAppend = errors.New("overlay parameter lowerdir+ unknown")

// mountByContext uses fsopen(2), where each lower directory is a parameter of
// its own, so that no page-sized option string limits the number of layers.
func (o overlay) mountByContext() error {
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fmt.Errorf("fsopen overlay: %w", err)
	}
	defer unix.Close(fs)
	paths := pathSet{limit: 255} // the kernel reads no longer parameter
	defer paths.close()

	attributes, extra := mountFlags(o.options)
	parameters := []parameter{{"source", mountSource}}
	for _, dir := range o.lower {
		parameters = append(parameters, parameter{"lowerdir+", paths.short(dir)})
	}
	if o.upper != "" {
		parameters = append(parameters,
			parameter{"upperdir", paths.short(o.upper)},
			parameter{"workdir", paths.short(o.work)},
			parameter{"volatile", ""})
	}
	if o.label != "" {
		parameters = append(parameters, parameter{"context", o.label})
	}
	if paths.err != nil {
		return paths.err
	}
	for _, p := range append(parameters, extra...) {
		if err := p.set(fs); err != nil {
			return err
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return fmt.Errorf("create overlay of %d layers: %w%s", len(o.lower), err, contextLog(fs))
	}
	mnt, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, attributes.attr)
	if err != nil {
		return fmt.Errorf("fsmount overlay: %w%s", err, contextLog(fs))
	}
	defer unix.Close(mnt)
	if err := unix.MoveMount(mnt, "", unix.AT_FDCWD, o.target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach overlay to %s: %w", o.target, err)
	}
	return nil
}

type parameter struct{ name, value string }

func (p parameter) set(fs int) error {
	var err error
	if p.value == "" {
		err = unix.FsconfigSetFlag(fs, p.name)
	} else {
		err = unix.FsconfigSetString(fs, p.name, p.value)
	}
	switch {
	case err == nil:
		return nil
	case p.name == "lowerdir+" && errors.Is(err, unix.EINVAL):
		return errNoAppend
	}
	return fmt.Errorf("overlay parameter %s=%s: %w%s", p.name, p.value, err, contextLog(fs))
}

// contextLog is what the kernel says about the last step, as an error's tail.
func contextLog(fs int) string {
	var text strings.Builder
	buf := make([]byte, 4096)
	for range 8 { // the kernel keeps no more messages
		n, err := unix.Read(fs, buf)
		if err != nil || n == 0 {
			break
		}
		fmt.Fprintf(&text, ": %s", bytes.TrimSpace(bytes.TrimPrefix(buf[:n], []byte("e "))))
	}
	return text.String()
}

// mountByString uses mount(2), for kernels without mountByContext's calls.
func (o overlay) mountByString() error {
	var paths pathSet
	defer paths.close()
	data := o.data(escape)
	if len(data) < os.Getpagesize() {
		return o.mountData(data)
	}
	// File descriptors as names, relative to /proc/self/fd, are three digits
	// long instead of a hundred.
	data = o.data(paths.number)
	if paths.err != nil {
		return paths.err
	}
	if len(data) >= os.Getpagesize() {
		return fmt.Errorf("overlay of %d layers: %w: this kernel limits mount options to one page", len(o.lower), unix.E2BIG)
	}
	relative := func() error {
		if err := unix.Chdir("/proc/self/fd"); err != nil {
			return err
		}
		return o.mountData(data)
	}
	if o.private {
		return relative()
	}
	return thread.Run(func() error {
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return err
		}
		return relative()
	})
}

func (o overlay) data(name func(path string) string) string {
	lower := make([]string, len(o.lower))
	for i, dir := range o.lower {
		lower[i] = name(dir)
	}
	data := "lowerdir=" + strings.Join(lower, ":")
	if o.upper != "" {
		data += ",upperdir=" + name(o.upper) + ",workdir=" + name(o.work)
	}
	if o.label != "" {
		data += `,context="` + o.label + `"`
	}
	_, extra := mountFlags(o.options)
	for _, p := range extra {
		data += "," + p.name
		if p.value != "" {
			data += "=" + p.value
		}
	}
	return data
}

func (o overlay) mountData(data string) error {
	flags, _ := mountFlags(o.options)
	err := error(unix.EINVAL)
	if o.upper != "" {
		err = unix.Mount(mountSource, o.target, "overlay", flags.ms, data+",volatile")
	}
	if errors.Is(err, unix.EINVAL) { // before 5.10, or nothing is writable
		err = unix.Mount(mountSource, o.target, "overlay", flags.ms, data)
	}
	if err != nil {
		return fmt.Errorf("mount overlay of %d layers at %s: %w", len(o.lower), o.target, err)
	}
	return nil
}

// escape protects the separators of overlay's option string in a path.
func escape(path string) string {
	return strings.NewReplacer(`\`, `\\`, `:`, `\:`, `,`, `\,`).Replace(path)
}

// pathSet gives directories shorter names for as long as it is open.
type pathSet struct {
	limit int
	fds   []int
	err   error
}

// short is path itself, or a link to it below /proc where it is too long, or
// has the character that only some parameters take for an escape.
func (s *pathSet) short(path string) string {
	if len(path) <= s.limit && !strings.Contains(path, `\`) {
		return path
	}
	return "/proc/self/fd/" + s.number(path)
}

// number is the number of a descriptor of path; -1, which no call accepts, and
// s.err after a failure.
func (s *pathSet) number(path string) string {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		s.err = errors.Join(s.err, &os.PathError{Op: "open", Path: path, Err: err})
		return "-1"
	}
	s.fds = append(s.fds, fd)
	return strconv.Itoa(fd)
}

func (s *pathSet) close() {
	for _, fd := range s.fds {
		unix.Close(fd)
	}
}

// flagPair is one mount flag in the words of mount(2) and of fsmount(2).
type flagPair struct {
	ms   uintptr
	attr int
}

// mountFlags splits storage.conf's mountopt into flags of the mount and
// parameters of the overlay. volatile is left out, since it is always set.
func mountFlags(options []string) (flagPair, []parameter) {
	known := map[string]flagPair{
		"nodev":   {unix.MS_NODEV, unix.MOUNT_ATTR_NODEV},
		"nosuid":  {unix.MS_NOSUID, unix.MOUNT_ATTR_NOSUID},
		"noexec":  {unix.MS_NOEXEC, unix.MOUNT_ATTR_NOEXEC},
		"noatime": {unix.MS_NOATIME, unix.MOUNT_ATTR_NOATIME},
	}
	var flags flagPair
	var rest []parameter
	for _, option := range options {
		if pair, ok := known[option]; ok {
			flags.ms |= pair.ms
			flags.attr |= pair.attr
			continue
		}
		if option == "" || option == "volatile" {
			continue
		}
		name, value, _ := strings.Cut(option, "=")
		rest = append(rest, parameter{name, value})
	}
	return flags, rest
}

// mounted tells whether a file system of its own is mounted at path.
func mounted(path string) (bool, error) {
	var at, above unix.Stat_t
	err := unix.Lstat(path, &at)
	if err == nil {
		err = unix.Lstat(filepath.Dir(path), &above)
	}
	switch {
	case errors.Is(err, unix.ENOENT):
		return false, nil
	case err != nil:
		return false, &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	return at.Dev != above.Dev, nil
}
