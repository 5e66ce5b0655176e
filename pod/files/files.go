// Package files makes the files that the containers of a pod see, below the run directory of
// the pod, and the directories of its logs.
package files

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/regular"
	"github.com/crius-run/crius/pod/records"
)

// Pod describes the files of a pod: where they are, and who owns them.
type Pod struct {
	Dir string // run directory of the pod

	own      bool // they have a file system of their own (docs/decisions/0015-pod-files.md)
	ipc      bool // they have a /dev/shm
	uid, gid int  // root of the pod's user namespace
}

// Of returns the files of a pod with this run directory and plan.
func Of(dir string, plan *records.PodPlan) Pod {
	uid, gid := plan.Namespaces.Root()
	return Pod{dir, plan.OwnFiles, plan.Namespaces.IPC, uid, gid}
}

// Shm returns the path of the /dev/shm of the pod's IPC namespace.
func (p Pod) Shm() string { return filepath.Join(p.Dir, "shm") }

// Root returns the directory of the files that containers see and may write to.
func (p Pod) Root() string {
	if !p.own {
		return p.Dir
	}
	return filepath.Join(p.Dir, "files")
}

// ResolvConf returns the path of the pod's resolv.conf.
func (p Pod) ResolvConf() string { return filepath.Join(p.Root(), "resolv.conf") }

// Hostname returns the path of the pod's /etc/hostname.
func (p Pod) Hostname() string { return filepath.Join(p.Root(), "hostname") }

// MakeDir makes the run directory.
func (p Pod) MakeDir() error { return errors.Join(os.Mkdir(p.Dir, 0o700), p.LetIn(p.Dir)) }

// MountShm mounts a /dev/shm of size bytes with an SELinux label.
func (p Pod) MountShm(size int64, label string) error {
	if err := mount.Shm(p.Shm(), size, label); err != nil {
		return err
	}
	return p.Give(p.Shm())
}

// Mount mounts a tmpfs for the pod's files, which containers can fill without harm to
// the node (CVE-2020-8557).
func (p Pod) Mount(label string) error {
	return errors.Join(mount.Files(p.Root(), label), p.LetIn(p.Root()))
}

// Write writes the files that the request asks for.
func (p Pod) Write(plan *records.PodPlan) error {
	cfg := plan.Config.M
	if dir := cfg.GetLogDirectory(); dir != "" {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	text, err := ResolvConf(cfg.GetDnsConfig())
	if err != nil {
		return err
	}
	if err := os.WriteFile(p.ResolvConf(), text, 0o644); err != nil {
		return err
	}
	hostname, err := plan.Hostname()
	if err != nil {
		return err
	}
	if err := os.WriteFile(p.Hostname(), []byte(hostname+"\n"), 0o644); err != nil {
		return err
	}
	return p.Give(p.ResolvConf(), p.Hostname())
}

// Give makes the root of the pod's user namespace the owner of files that its
// containers see.
func (p Pod) Give(files ...string) error {
	if p.uid == 0 && p.gid == 0 {
		return nil
	}
	for _, file := range files {
		if err := os.Chown(file, p.uid, p.gid); err != nil {
			return err
		}
	}
	return nil
}

// LetIn gives the root of the pod's user namespace search permission on a directory of crius,
// and nothing more: runtimes set up a container's mounts as that root.
func (p Pod) LetIn(dir string) error {
	if p.gid == 0 {
		return nil
	}
	return errors.Join(os.Chown(dir, 0, p.gid), os.Chmod(dir, 0o710))
}

// Missing returns which files new containers would lack.
func (p Pod) Missing() []string {
	var missing []string
	unmounted := func(path string) bool {
		is, err := mount.Mounted(path)
		if is || err != nil {
			return false
		}
		missing = append(missing, "nothing is mounted at "+path)
		return true
	}
	if !p.own || !unmounted(p.Root()) {
		for _, path := range []string{p.ResolvConf(), p.Hostname()} {
			if _, err := os.Lstat(path); errors.Is(err, os.ErrNotExist) {
				missing = append(missing, path+" is gone")
			}
		}
	}
	if p.ipc {
		unmounted(p.Shm())
	}
	return missing
}

// maxResolvConf leaves room for a pod's other files, and for programs that rewrite it.
const maxResolvConf = 256 << 10

// ResolvConf returns what dns_config says, or the node's file if the request has no dns_config.
func ResolvConf(dns *cri.DNSConfig) ([]byte, error) {
	if dns == nil {
		text, err := regular.Read("/etc/resolv.conf", maxResolvConf)
		if errors.Is(err, os.ErrNotExist) {
			return nil, nil
		}
		return text, err
	}
	var text strings.Builder
	for _, server := range dns.GetServers() {
		fmt.Fprintf(&text, "nameserver %s\n", server)
	}
	if searches := dns.GetSearches(); len(searches) > 0 {
		fmt.Fprintf(&text, "search %s\n", strings.Join(searches, " "))
	}
	if options := dns.GetOptions(); len(options) > 0 {
		fmt.Fprintf(&text, "options %s\n", strings.Join(options, " "))
	}
	for _, list := range [][]string{dns.GetServers(), dns.GetSearches(), dns.GetOptions()} {
		for _, word := range list {
			if strings.ContainsAny(word, " \t\r\n\x00") {
				return nil, fmt.Errorf("dns_config: %.80q has white space in it: %w", word, fault.Invalid)
			}
		}
	}
	if text.Len() > maxResolvConf {
		return nil, fmt.Errorf("dns_config: the resolv.conf has %d bytes, more than %d: %w", text.Len(), maxResolvConf, fault.Invalid)
	}
	return []byte(text.String()), nil
}

// LogPath joins the pod's log directory and the container's path in it, which must not lead out
// (CVE-2025-0750). An empty path means that output is discarded.
func LogPath(pod *cri.PodSandboxConfig, cfg *cri.ContainerConfig) (string, error) {
	if cfg.GetLogPath() == "" || pod.GetLogDirectory() == "" {
		return "", nil
	}
	if !filepath.IsLocal(cfg.GetLogPath()) {
		return "", fmt.Errorf("log_path %q is outside the pod's log_directory: %w", cfg.GetLogPath(), fault.Invalid)
	}
	return filepath.Join(pod.GetLogDirectory(), cfg.GetLogPath()), nil
}

// MakeLogDir makes the directory of a log below the pod's, and that one as well. It refuses a
// link on the way that leads out of the directory of all pods' logs (CVE-2025-0750). The
// monitor refuses any other link, and one in place of the file itself.
func MakeLogDir(root, logPath string) error {
	all, own := filepath.Split(filepath.Clean(root))
	if err := os.MkdirAll(all, 0o755); err != nil {
		return err
	}
	confined, err := os.OpenRoot(all)
	if err != nil {
		return err
	}
	defer confined.Close()
	dir := filepath.Join(own, filepath.Dir(logPath))
	err = confined.MkdirAll(dir, 0o755)
	if err == nil {
		_, err = confined.Stat(dir)
	}
	if err != nil && ofPath(err) {
		err = fmt.Errorf("%w: %w", err, fault.Invalid)
	}
	if err != nil {
		return fmt.Errorf("log_path %q: %w", logPath, err)
	}
	return nil
}

// ofPath reports whether the path caused the error, and not a disk that is full or read-only.
func ofPath(err error) bool {
	var errno unix.Errno
	if !errors.As(err, &errno) { // an error of os.Root: the path leads out
		return true
	}
	return slices.Contains([]unix.Errno{unix.EEXIST, unix.ENOTDIR, unix.ELOOP, unix.ENAMETOOLONG, unix.EINVAL, unix.ENOENT}, errno)
}
