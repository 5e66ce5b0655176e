// Package overlay makes overlay mounts: read-only layers, and on top a writable layer if there is
// one. A mount may show its files with the owners that a user namespace gives them.
package overlay

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/thread"
)

// Mount describes one overlay mount.
type Mount struct {
	Lower   []string // absolute paths, top first
	Upper   string   // made if it is missing; empty like Work: nothing is writable
	Work    string   // made again
	Target  string   // mount point, which exists
	Label   string   // SELinux context of all files; may be empty
	Options []string // as in mountopt of storage.conf
	UserNS  string   // path of the user namespace whose ids own the files; empty: the node's
	// Made is called after Upper and Work have been made, before anything is written through the
	// mount. It may be nil.
	Made func() error

	private bool   // mount runs on a thread that shares neither mounts nor working directory with others
	found   func() // called when the kernel has looked up the directories one by one; nil but in tests
}

// Source marks crius's mounts in the mount table.
const Source = "crius"

// Make makes the directories of the writable layer, if there is one, and mounts m.
func (m Mount) Make() error {
	if m.UserNS == "" {
		return m.make()
	}
	m.private = true
	return mapped(m.UserNS, m.Lower, m.Target, m.make)
}

// make mounts m, if need be more than once: podman and buildah unmount the directory of all layers, which the library
// has mounted upon itself, when they end, and the kernel refuses (EINVAL) layers that it had found there.
func (m Mount) make() (err error) {
	for range 3 {
		if err = m.makeOnce(); !errors.Is(err, unix.EINVAL) {
			break
		}
	}
	return err
}

func (m Mount) makeOnce() error {
	if m.Upper == "" {
		return m.mount()
	}
	if err := makeUpper(m.Upper, m.Lower[0]); err != nil {
		return err
	}
	// The kernel refuses a work directory that a volatile mount has used.
	if err := os.RemoveAll(m.Work); err != nil {
		return err
	}
	if err := os.Mkdir(m.Work, 0o700); err != nil {
		return err
	}
	if m.Made != nil {
		if err := m.Made(); err != nil {
			return err
		}
	}
	return m.mount()
}

// makeUpper makes the upper directory, with the owner and mode of the top layer: they become those
// of the container's /.
func makeUpper(upper, like string) error {
	var st unix.Stat_t
	if err := unix.Stat(like, &st); err != nil {
		return &os.PathError{Op: "stat", Path: like, Err: err}
	}
	if err := os.MkdirAll(filepath.Dir(upper), 0o700); err != nil {
		return err
	}
	err := os.Mkdir(upper, 0o700)
	if errors.Is(err, os.ErrExist) {
		return nil
	} else if err != nil {
		return err
	}
	if err := os.Chown(upper, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	return unix.Chmod(upper, st.Mode&0o7777)
}

// mount mounts m at its target. It uses `volatile` if the kernel knows it (5.10): a container's
// writable layer does not survive the container, so syncing it at every unmount has no use and can
// take minutes.
func (m Mount) mount() error {
	if appends() {
		return m.mountByContext()
	}
	return m.mountByString()
}

// appends reports whether the kernel's overlay accepts lower directories one by one (6.8). Before
// 6.5 it accepts any parameter, refuses unknown ones only in the last step, and logs a line each
// time. So the kernel is asked without mounting anything, and only until it has answered.
func appends() bool {
	answer.Lock()
	defer answer.Unlock()
	if answer.known {
		return answer.appends
	}
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return !errors.Is(err, unix.ENOSYS) // mountByContext reports any other
	}
	defer unix.Close(fs)
	if unix.FsconfigSetFlag(fs, "no-such-parameter") == nil {
		answer.known = true
		return false
	}
	err = unix.FsconfigSetString(fs, "lowerdir+", "/")
	answer.appends = err == nil
	answer.known = err == nil || errors.Is(err, unix.EINVAL)
	return answer.appends
}

// answer is the kernel's answer.
var answer struct {
	sync.Mutex
	known, appends bool
}

// mountByContext uses fsopen(2), where each lower directory is a parameter of its own, so the
// number of layers is not limited by an option string of one page.
func (m Mount) mountByContext() error {
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fmt.Errorf("fsopen overlay: %w", err)
	}
	defer unix.Close(fs)
	paths := pathSet{limit: 255} // the kernel's limit for a parameter
	defer paths.close()

	attributes, extra := mountFlags(m.Options)
	parameters := []parameter{{"source", Source}}
	for _, dir := range m.Lower {
		parameters = append(parameters, parameter{"lowerdir+", paths.short(dir)})
	}
	if m.Upper != "" {
		parameters = append(parameters,
			parameter{"upperdir", paths.short(m.Upper)},
			parameter{"workdir", paths.short(m.Work)},
			parameter{"volatile", ""})
	}
	if m.Label != "" {
		parameters = append(parameters, parameter{"context", m.Label})
	}
	if paths.err != nil {
		return paths.err
	}
	for _, p := range append(parameters, extra...) {
		if err := p.set(fs); err != nil {
			return err
		}
	}
	if m.found != nil {
		m.found()
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return fmt.Errorf("create overlay of %d layers: %w%s", len(m.Lower), err, contextLog(fs))
	}
	mnt, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, attributes.attr)
	if err != nil {
		return fmt.Errorf("fsmount overlay: %w%s", err, contextLog(fs))
	}
	defer unix.Close(mnt)
	if err := unix.MoveMount(mnt, "", unix.AT_FDCWD, m.Target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach overlay to %s: %w", m.Target, err)
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
	if err == nil {
		return nil
	}
	return fmt.Errorf("overlay parameter %s=%s: %w%s", p.name, p.value, err, contextLog(fs))
}

// contextLog returns the kernel's messages about the last step, for the end of an error.
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

// mountByString uses mount(2), for kernels without the calls of mountByContext.
func (m Mount) mountByString() error {
	var paths pathSet
	defer paths.close()
	data := m.data(escape)
	if len(data) < os.Getpagesize() {
		return m.mountData(data)
	}
	// File descriptors as names, relative to /proc/self/fd, have three characters instead of a
	// hundred.
	data = m.data(paths.number)
	if paths.err != nil {
		return paths.err
	}
	if len(data) >= os.Getpagesize() {
		return fmt.Errorf("overlay of %d layers: %w: this kernel limits mount options to one page", len(m.Lower), unix.E2BIG)
	}
	relative := func() error {
		if err := unix.Chdir("/proc/self/fd"); err != nil {
			return err
		}
		return m.mountData(data)
	}
	if m.private {
		return relative()
	}
	return thread.Run(func() error {
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return err
		}
		return relative()
	})
}

func (m Mount) data(name func(path string) string) string {
	lower := make([]string, len(m.Lower))
	for i, dir := range m.Lower {
		lower[i] = name(dir)
	}
	data := "lowerdir=" + strings.Join(lower, ":")
	if m.Upper != "" {
		data += ",upperdir=" + name(m.Upper) + ",workdir=" + name(m.Work)
	}
	if m.Label != "" {
		data += `,context="` + m.Label + `"`
	}
	_, extra := mountFlags(m.Options)
	for _, p := range extra {
		data += "," + p.name
		if p.value != "" {
			data += "=" + p.value
		}
	}
	return data
}

func (m Mount) mountData(data string) error {
	flags, _ := mountFlags(m.Options)
	err := error(unix.EINVAL)
	if m.Upper != "" {
		err = unix.Mount(Source, m.Target, "overlay", flags.ms, data+",volatile")
	}
	if errors.Is(err, unix.EINVAL) { // before 5.10, or nothing is writable
		err = unix.Mount(Source, m.Target, "overlay", flags.ms, data)
	}
	if err != nil {
		return fmt.Errorf("mount overlay of %d layers at %s: %w", len(m.Lower), m.Target, err)
	}
	return nil
}

// escape escapes the separators of overlay's option string in a path.
func escape(path string) string {
	return strings.NewReplacer(`\`, `\\`, `:`, `\:`, `,`, `\,`).Replace(path)
}

// pathSet gives directories shorter names while it is open.
type pathSet struct {
	limit int
	fds   []int
	err   error
}

// short returns path or, if that is too long or has a character that only some parameters take for
// an escape, a link to it below /proc.
func (s *pathSet) short(path string) string {
	if len(path) <= s.limit && !strings.Contains(path, `\`) {
		return path
	}
	return "/proc/self/fd/" + s.number(path)
}

// number returns the number of a descriptor of path. After a failure it returns -1, which no call
// accepts, and sets s.err.
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

// flagPair is a mount flag for mount(2) and for fsmount(2).
type flagPair struct {
	ms   uintptr
	attr int
}

// obeyNothing makes the kernel refuse files of layers that name other files by attributes, which it
// would otherwise show instead. Layers of crius have none; layers that another tool has unpacked
// may. Linux knows both since 4.19.
var obeyNothing = []parameter{{"redirect_dir", "nofollow"}, {"metacopy", "off"}}

// mountFlags splits mountopt of storage.conf into flags of the mount and parameters of the overlay.
// obeyNothing is always among the parameters, whatever the options say; volatile is left out, since
// it is always set.
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
		if slices.ContainsFunc(obeyNothing, func(p parameter) bool { return p.name == name }) {
			continue
		}
		rest = append(rest, parameter{name, value})
	}
	return flags, append(rest, obeyNothing...)
}

// Mounted reports whether a file system is mounted at path.
func Mounted(path string) (bool, error) {
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
