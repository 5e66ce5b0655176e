// Package ns makes the namespaces that the containers of a pod share and keeps
// them without a process: each is pinned by a bind mount of its nsfs file at
//
//	<dir>/netns/<name>  <dir>/ipcns/<name>  <dir>/utsns/<name>  <dir>/userns/<name>
//
// where other tools (ip-netns(8), CNI meta plugins) look for them.
//
// The paths follow from the Spec alone. A caller that has recorded a Spec
// before Create can always call Remove with it, even after a crash in between,
// and nothing is left.
//
// Namespaces are entered on OS threads that end with the work, so that no other
// goroutine can ever run on a thread in the wrong namespace.
package ns

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/thread"
)

// Spec says which namespaces to make, and their initial settings.
type Spec struct {
	Dir  string `json:"Dir"`  // parent of the netns, ipcns, utsns and userns directories, absolute
	Name string `json:"Name"` // file name of the pins, unique on the node

	// Net, IPC and UTS say which to make; at least one, or a user namespace.
	Net bool `json:"Net"`
	IPC bool `json:"IPC"`
	UTS bool `json:"UTS"`

	// UIDs and GIDs ask for a user namespace with these mappings, which will own
	// the others. Both or neither.
	UIDs []IDMap `json:"UIDs"`
	GIDs []IDMap `json:"GIDs"`

	Hostname string            `json:"Hostname"` // set in the new UTS namespace; empty: as on the host
	Sysctls  map[string]string `json:"Sysctls"`  // set in the new namespaces; see SetNetworkSysctls
}

// IDMap maps Size user or group ids that begin with Container in a user
// namespace to those that begin with Host.
type IDMap struct {
	Container uint32 `json:"Container"`
	Host      uint32 `json:"Host"`
	Size      uint32 `json:"Size"`
}

// Root returns the host's ids of the root user in the namespaces.
func (s Spec) Root() (uid, gid int) { return int(HostID(s.UIDs, 0)), int(HostID(s.GIDs, 0)) }

// HostID returns the host's id for an id of a user namespace with these
// mappings. It returns an unmapped id unchanged, also if there are no mappings.
func HostID(maps []IDMap, id uint32) uint32 {
	for _, m := range maps {
		if id >= m.Container && id-m.Container < m.Size {
			return m.Host + (id - m.Container)
		}
	}
	return id
}

// Set holds the paths of pinned namespaces; empty for those not made.
type Set struct {
	Net  string `json:"net,omitempty"`
	IPC  string `json:"ipc,omitempty"`
	UTS  string `json:"uts,omitempty"`
	User string `json:"user,omitempty"`
}

// kind is a type of namespace.
type kind struct {
	flag int    // clone flag
	proc string // name in /proc/PID/ns
	dir  string // directory of its pins
	perm os.FileMode
}

// kinds returns all kinds that can be pinned, the owner of the others first.
func kinds() []kind {
	return []kind{
		{unix.CLONE_NEWUSER, "user", "userns", 0o700},
		network(),
		{unix.CLONE_NEWIPC, "ipc", "ipcns", 0o700},
		{unix.CLONE_NEWUTS, "uts", "utsns", 0o700},
	}
}

// Dirs returns the names of the directories in a Spec's Dir.
func Dirs() []string {
	var names []string
	for _, k := range kinds() {
		names = append(names, k.dir)
	}
	return names
}

// network returns the kind of network namespaces, the only ones that other
// programs look for.
func network() kind { return kind{unix.CLONE_NEWNET, "net", "netns", 0o755} }

func (k kind) in(set *Set) *string {
	switch k.flag {
	case unix.CLONE_NEWUSER:
		return &set.User
	case unix.CLONE_NEWNET:
		return &set.Net
	case unix.CLONE_NEWIPC:
		return &set.IPC
	default:
		return &set.UTS
	}
}

func (s Spec) wants(k kind) bool {
	switch k.flag {
	case unix.CLONE_NEWUSER:
		return s.mapped()
	case unix.CLONE_NEWNET:
		return s.Net
	case unix.CLONE_NEWIPC:
		return s.IPC
	default:
		return s.UTS
	}
}

func (s Spec) mapped() bool { return len(s.UIDs) > 0 }

func (s Spec) path(k kind) string { return filepath.Join(s.Dir, k.dir, s.Name) }

// Create makes the namespaces of s and pins them. The loopback interface of a
// new network namespace is up, with its addresses. It fails with fault.Invalid
// for a Spec that can never work (for example with a sysctl that is not
// namespaced), with fault.Exists if one of the pins is taken, and with
// fault.Exhausted at the kernel's limit of namespaces. After an error nothing
// is left.
func Create(s Spec) (_ Set, err error) {
	if err := s.valid(); err != nil {
		return Set{}, fmt.Errorf("create namespaces: %w", err)
	}
	settings, err := s.settings()
	if err != nil {
		return Set{}, fmt.Errorf("create namespaces: %w", err)
	}
	var made []kind
	defer func() {
		if err == nil {
			return
		}
		err = fmt.Errorf("create namespaces: %w", err)
		for _, k := range made { // and none that existed before
			err = errors.Join(err, unpin(s.path(k)))
		}
	}()
	for _, k := range kinds() {
		if !s.wants(k) {
			continue
		}
		if err := place(filepath.Join(s.Dir, k.dir), s.Name, k.perm); err != nil {
			return Set{}, err
		}
		made = append(made, k)
	}
	if err := thread.Run(func() error { return s.build(made, settings) }); err != nil {
		return Set{}, err
	}
	return s.Paths(), nil
}

// Paths returns where the namespaces of s are pinned, whether they exist or
// not.
func (s Spec) Paths() Set {
	var set Set
	for _, k := range kinds() {
		if s.wants(k) {
			*k.in(&set) = s.path(k)
		}
	}
	return set
}

// build runs on a thread that ends afterwards.
func (s Spec) build(wanted []kind, settings []setting) error {
	source, release, err := s.enter(wanted)
	if err != nil {
		return err
	}
	defer release()
	for _, k := range wanted {
		if err := unix.Mount(source+k.proc, s.path(k), "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("pin %s namespace at %s: %w", k.proc, s.path(k), err)
		}
	}
	if s.Net {
		if err := loopbackUp(); err != nil {
			return fmt.Errorf("bring up loopback interface: %w", err)
		}
	}
	if s.Hostname != "" {
		if err := unix.Sethostname([]byte(s.Hostname)); err != nil {
			return fmt.Errorf("set host name %q: %w", s.Hostname, err)
		}
	}
	return s.apply(settings)
}

// enter moves the calling thread into new namespaces. It returns the directory
// of their nsfs files, which is valid until release is called.
func (s Spec) enter(wanted []kind) (source string, release func(), err error) {
	if s.mapped() {
		return s.enterMapped(wanted)
	}
	var flags int
	for _, k := range wanted {
		flags |= k.flag
	}
	if err := unix.Unshare(flags); err != nil {
		return "", nil, limit(fmt.Errorf("unshare: %w", err))
	}
	return "/proc/thread-self/ns/", func() {}, nil
}

// limit explains the kernel's "no space left on device".
func limit(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EUSERS) {
		return fmt.Errorf("too many namespaces, raise the sysctls user.max_*_namespaces: %w: %w", err, fault.Exhausted)
	}
	return err
}

// Remove removes every pin that Create can have made for s, and with it the
// namespaces unless a process or an open file holds them. It uses only Dir and
// Name of s. Missing pins are not an error.
func Remove(s Spec) error {
	if err := s.named(); err != nil {
		return fmt.Errorf("remove namespaces: %w", err)
	}
	var errs []error
	for _, k := range kinds() {
		errs = append(errs, unpin(s.path(k)))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("remove namespaces: %w", err)
	}
	return nil
}

// Do runs f on its own thread in the network namespace pinned at path.
// Goroutines that f starts are not in the namespace; processes and sockets are.
func Do(path string, f func() error) error {
	return thread.Run(func() error {
		if err := enterPinned(path); err != nil {
			return err
		}
		return f()
	})
}

// Isolate gives the calling thread, which must be one of thread.Run's, a network namespace of its own
// that ends with its last process. Only the loopback device is in it.
func Isolate() error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("unshare network namespace: %w", err)
	}
	return loopbackUp()
}

// Each runs f in each network namespace pinned at paths, one after the other,
// all on one thread, because threads are expensive. It continues after an
// error, from f or because a namespace is gone (fault.NotFound), and returns
// the errors by index; nil if there were none.
func Each(paths []string, f func(i int) error) (errs map[int]error) {
	_ = thread.Run(func() error {
		for i, path := range paths {
			err := enterPinned(path)
			if err == nil {
				err = f(i)
			}
			if err != nil {
				if errs == nil {
					errs = map[int]error{}
				}
				errs[i] = err
			}
		}
		return nil
	})
	return errs
}

// enterPinned moves the calling thread into the namespace pinned at path. After
// an error the thread has not moved.
func enterPinned(path string) error {
	handle, err := netns.GetFromPath(path)
	if errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("network namespace %s %w", path, fault.NotFound)
	}
	if err != nil {
		return fmt.Errorf("network namespace %s: %w", path, err)
	}
	defer func() { _ = handle.Close() }()
	err = netns.Set(handle)
	if errors.Is(err, unix.EINVAL) { // a pin with no mount on it
		return fmt.Errorf("network namespace %s: not pinned: %w", path, fault.NotFound)
	}
	if err != nil {
		return fmt.Errorf("enter network namespace %s: %w", path, err)
	}
	return nil
}

// Inode identifies the namespace pinned at path among those that exist now. It
// is fault.NotFound if there is none, also if the file exists and no namespace
// is mounted on it (the result of a reboot when Dir is not a tmpfs).
func Inode(path string) (uint64, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return 0, fmt.Errorf("namespace %s %w", path, fault.NotFound)
	}
	if err != nil {
		return 0, fmt.Errorf("namespace %s: %w", path, err)
	}
	defer unix.Close(fd)
	var fs unix.Statfs_t
	var st unix.Stat_t
	if err := errors.Join(unix.Fstatfs(fd, &fs), unix.Fstat(fd, &st)); err != nil {
		return 0, fmt.Errorf("namespace %s: %w", path, err)
	}
	if fs.Type != unix.NSFS_MAGIC {
		return 0, fmt.Errorf("namespace %s: nothing is pinned there: %w", path, fault.NotFound)
	}
	return st.Ino, nil
}

// place makes the empty file over which a namespace is bound, and missing
// parent directories. It assumes nothing about existing mounts there.
func place(dir, name string, perm os.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	switch err := os.Mkdir(dir, perm); {
	case err == nil:
		if err := os.Chmod(dir, perm); err != nil { // regardless of the umask
			return err
		}
	case !errors.Is(err, os.ErrExist):
		return err
	}
	path := filepath.Join(dir, name)
	file, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE|os.O_EXCL, 0o444)
	if errors.Is(err, os.ErrExist) {
		return fmt.Errorf("namespace %s %w", path, fault.Exists)
	}
	if err != nil {
		return err
	}
	return file.Close()
}

func unpin(path string) error {
	if err := mount.Unmount(path); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
		return err
	}
	return nil
}

func loopbackUp() error {
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(socket)
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(socket, unix.SIOCGIFFLAGS, lo); err != nil {
		return err
	}
	lo.SetUint16(lo.Uint16() | unix.IFF_UP)
	return unix.IoctlIfreq(socket, unix.SIOCSIFFLAGS, lo)
}

func (s Spec) valid() error {
	if err := s.named(); err != nil {
		return err
	}
	switch {
	case !s.Net && !s.IPC && !s.UTS && !s.mapped():
		return fmt.Errorf("no namespace requested: %w", fault.Invalid)
	case len(s.UIDs) == 0 != (len(s.GIDs) == 0):
		return fmt.Errorf("a user namespace needs both user and group id mappings: %w", fault.Invalid)
	case s.Hostname != "" && !s.UTS:
		return fmt.Errorf("host name %q without a UTS namespace would rename the node: %w", s.Hostname, fault.Invalid)
	}
	if s.Hostname == "" {
		return nil
	}
	return utsName("host name", s.Hostname)
}

// named checks Dir and Name, so that the pins cannot lie elsewhere.
func (s Spec) named() error {
	if !filepath.IsAbs(s.Dir) {
		return fmt.Errorf("namespaces directory %q is not an absolute path: %w", s.Dir, fault.Invalid)
	}
	if s.Name == "" || s.Name == "." || s.Name == ".." || len(s.Name) > 255 || strings.ContainsAny(s.Name, "/\x00") {
		return fmt.Errorf("%q cannot be the name of a namespace: %w", s.Name, fault.Invalid)
	}
	return nil
}

// Pins returns, by name, the paths below dir of pins, or of their files, whose
// names begin with prefix.
func Pins(dir, prefix string) (map[string][]string, error) {
	found := map[string][]string{}
	for _, k := range kinds() {
		entries, err := os.ReadDir(filepath.Join(dir, k.dir))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("list namespaces: %w", err)
		}
		for _, entry := range entries {
			if name := entry.Name(); strings.HasPrefix(name, prefix) {
				found[name] = append(found[name], filepath.Join(dir, k.dir, name))
			}
		}
	}
	return found, nil
}
