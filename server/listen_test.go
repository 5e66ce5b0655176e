package server

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

func listenConfig(t *testing.T) Config {
	cfg := DefaultConfig()
	cfg.Listen = filepath.Join(t.TempDir(), "run", "crius.sock")
	return cfg
}

func listen(t *testing.T, cfg Config) net.Listener {
	t.Helper()
	l, err := Listen(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// The class of containerd's CVE-2021-41103: nothing of the runtime's is open to
// other users.
func TestSocketPermissions_CVE_2021_41103(t *testing.T) {
	t.Parallel()
	for _, mode := range []os.FileMode{0o660, 0o600, 0o666} {
		cfg := listenConfig(t)
		cfg.SocketMode = mode
		listen(t, cfg)
		info, err := os.Lstat(cfg.Listen)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode() != os.ModeSocket|mode {
			t.Errorf("socket has mode %v, want %v", info.Mode(), mode)
		}
		if owner := info.Sys().(*syscall.Stat_t); int(owner.Uid) != os.Geteuid() || int(owner.Gid) != os.Getegid() {
			t.Errorf("socket belongs to %d:%d", owner.Uid, owner.Gid)
		}
		for path, want := range map[string]os.FileMode{filepath.Dir(cfg.Listen): 0o700, cfg.Listen + ".lock": 0o600} {
			if info, err := os.Stat(path); err != nil || info.Mode().Perm() != want {
				t.Errorf("%s has mode %v, want %v (%v)", path, info.Mode(), want, err)
			}
		}
	}
}

// Only members of socket_group may connect. Not parallel: between fork and exec
// its programs have the sockets and locks of concurrent tests.
func TestSocketGroupMayConnect(t *testing.T) {
	root, err := os.MkdirTemp("/tmp", "crius-group-") // t.TempDir is closed to other users
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	if err := os.Chmod(root, 0o711); err != nil {
		t.Fatal(err)
	}
	for _, group := range []string{"54321", "daemon"} {
		gid, err := groupID(group)
		if err != nil {
			t.Fatal(err)
		}
		cfg := listenConfig(t)
		cfg.Listen, cfg.SocketGroup = filepath.Join(root, group, "crius.sock"), group
		listen(t, cfg)
		writable := func(as *syscall.Credential) bool {
			cmd := exec.Command("test", "-w", cfg.Listen)
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: as}
			return cmd.Run() == nil
		}
		if !writable(&syscall.Credential{Uid: 1001, Gid: 1001, Groups: []uint32{uint32(gid)}}) {
			t.Errorf("a member of %s may not connect", group)
		}
		if writable(&syscall.Credential{Uid: 1001, Gid: 1001}) {
			t.Errorf("a stranger to %s may connect", group)
		}
	}
}

// A set-group-ID directory gives its group to files made in it.
func TestSocketGroup(t *testing.T) {
	t.Parallel()
	cfg := listenConfig(t)
	dir := filepath.Dir(cfg.Listen)
	if err := errors.Join(os.Mkdir(dir, 0o700), os.Chown(dir, 0, 12345), os.Chmod(dir, 0o770|os.ModeSetgid)); err != nil {
		t.Fatal(err)
	}
	listen(t, cfg)
	info, err := os.Lstat(cfg.Listen)
	if err != nil {
		t.Fatal(err)
	}
	if gid := info.Sys().(*syscall.Stat_t).Gid; int(gid) != os.Getegid() {
		t.Errorf("socket belongs to group %d", gid)
	}
}

func TestSocketIsRemovedOnClose(t *testing.T) {
	t.Parallel()
	cfg := listenConfig(t)
	if err := listen(t, cfg).Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(cfg.Listen); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("socket is still there: %v", err)
	}
	listen(t, cfg) // and the path is free again
}

func TestOneServerPerSocket(t *testing.T) {
	t.Parallel()
	cfg := listenConfig(t)
	listen(t, cfg)
	_, err := Listen(t.Context(), cfg)
	want := fmt.Sprintf("%s is served by another crius instance, process %d;", cfg.Listen, os.Getpid())
	if !errors.Is(err, fault.Exists) || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want %q", err, want)
	}
	if _, err := net.Dial("unix", cfg.Listen); err != nil {
		t.Errorf("the first server is gone: %v", err)
	}
}

// Each socket has its own option, which the error names.
func TestSocketInUseNamesItsOption(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cfg := Config{Listen: filepath.Join(dir, "crius.sock"), CrioSocket: filepath.Join(dir, "crio.sock"), SocketMode: 0o660}
	for option, path := range map[string]string{"api.listen": cfg.Listen, "api.crio_socket": cfg.CrioSocket} {
		other, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		defer other.Close()
		bind := Listen
		if option == "api.crio_socket" {
			bind = ListenAsCrio
		}
		want := "stop it or set a different " + option + ":"
		if _, err := bind(t.Context(), cfg); !errors.Is(err, fault.Exists) || !strings.Contains(err.Error()+":", want) {
			t.Errorf("%s: got %v", option, err)
		}
		if err := errors.Join(other.Close(), os.RemoveAll(path), os.WriteFile(path, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
		if _, err := bind(t.Context(), cfg); !errors.Is(err, fault.Exists) || !strings.Contains(err.Error()+":", want[len("stop it or "):]) {
			t.Errorf("a file at %s: got %v", option, err)
		}
	}
}

// Between the start of one server and its first answer, a second one must not
// consider the path free.
func TestSocketIsLocked(t *testing.T) {
	t.Parallel()
	cfg := listenConfig(t)
	if err := os.Mkdir(filepath.Dir(cfg.Listen), 0o700); err != nil {
		t.Fatal(err)
	}
	starting, err := address{"api.listen", cfg.Listen}.lock()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(t.Context(), cfg); !errors.Is(err, fault.Exists) {
		t.Errorf("got %v", err)
	}
	if err := starting.Close(); err != nil {
		t.Fatal(err)
	}
	listen(t, cfg)
}

// A socket that another program serves stays, whether it answers or its queue
// is full.
func TestSocketOfAnotherProgram(t *testing.T) {
	t.Parallel()
	cfg := listenConfig(t)
	if err := os.Mkdir(filepath.Dir(cfg.Listen), 0o700); err != nil {
		t.Fatal(err)
	}
	other, err := net.Listen("unix", cfg.Listen)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	who := fmt.Sprintf("another process serves %s: process %d (", cfg.Listen, os.Getpid())
	if _, err := Listen(t.Context(), cfg); !errors.Is(err, fault.Exists) || !strings.Contains(err.Error(), who) {
		t.Errorf("got %v, want %s", err, who)
	}
	if _, err := net.Dial("unix", cfg.Listen); err != nil {
		t.Errorf("the other program is gone: %v", err)
	}
}

func TestBusySocketOfAnotherProgram(t *testing.T) {
	t.Parallel()
	cfg := listenConfig(t)
	if err := os.Mkdir(filepath.Dir(cfg.Listen), 0o700); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: cfg.Listen}), unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	filler, err := net.Dial("unix", cfg.Listen) // takes the only place in the queue
	if err != nil {
		t.Fatal(err)
	}
	defer filler.Close()
	if _, err := Listen(t.Context(), cfg); !errors.Is(err, fault.Exists) {
		t.Errorf("got %v", err)
	}
	if _, err := os.Lstat(cfg.Listen); err != nil {
		t.Errorf("the other program's socket is gone: %v", err)
	}
}

func TestStaleSocketIsReplaced(t *testing.T) {
	t.Parallel()
	cfg := listenConfig(t)
	if err := os.Mkdir(filepath.Dir(cfg.Listen), 0o700); err != nil {
		t.Fatal(err)
	}
	dead, err := net.Listen("unix", cfg.Listen)
	if err != nil {
		t.Fatal(err)
	}
	dead.(*net.UnixListener).SetUnlinkOnClose(false) // as after kill -9
	dead.Close()
	listen(t, cfg)
	if _, err := net.Dial("unix", cfg.Listen); err != nil {
		t.Errorf("nobody listens: %v", err)
	}
}

// Abandon removes what a server has left, and nothing that another one has made
// since.
func TestAbandon(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		since func(t *testing.T, cfg Config) // what happened after the server died
		stays []string                       // files that stay in the directory; nil: not even the directory
	}{
		"nothing": {since: func(*testing.T, Config) {}},
		"a file of another program": {since: func(t *testing.T, cfg Config) {
			if err := os.WriteFile(filepath.Join(filepath.Dir(cfg.Listen), "version"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}, stays: []string{"version"}},
		"another server": {since: func(t *testing.T, cfg Config) { listen(t, cfg) }, stays: []string{"crio.sock", "crio.sock.lock"}},
		"CRI-O": {since: func(t *testing.T, cfg Config) {
			if err := os.Remove(cfg.Listen); err != nil {
				t.Fatal(err)
			}
			l, err := net.Listen("unix", cfg.Listen)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { l.Close() })
		}, stays: []string{"crio.sock"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := DefaultConfig()
			cfg.Listen = filepath.Join(t.TempDir(), "crio", "crio.sock")
			l, err := Listen(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			dead := l.(*listener) // its socket stays, like that of a killed server
			dead.Listener.(*net.UnixListener).SetUnlinkOnClose(false)
			if err := dead.Close(); err != nil {
				t.Fatal(err)
			}
			test.since(t, cfg)
			for range 2 {
				if err := Abandon(cfg.Listen); err != nil {
					t.Error(err)
				}
				entries, err := os.ReadDir(filepath.Dir(cfg.Listen))
				var names []string
				for _, entry := range entries {
					names = append(names, entry.Name())
				}
				if !slices.Equal(names, test.stays) || errors.Is(err, fs.ErrNotExist) != (test.stays == nil) {
					t.Errorf("%q stay, want %q: %v", names, test.stays, err)
				}
			}
		})
	}
}

func TestNoSocketInTheWay(t *testing.T) {
	t.Parallel()
	for name, make := range map[string]func(path string) error{
		"file":         func(path string) error { return os.WriteFile(path, []byte("precious"), 0o600) },
		"directory":    func(path string) error { return os.Mkdir(path, 0o700) },
		"symlink":      func(path string) error { return os.Symlink("/dev/null", path) },
		"dead symlink": func(path string) error { return os.Symlink("nowhere", path) },
		"fifo":         func(path string) error { return unix.Mkfifo(path, 0o600) },
	} {
		cfg := listenConfig(t)
		if err := errors.Join(os.Mkdir(filepath.Dir(cfg.Listen), 0o700), make(cfg.Listen)); err != nil {
			t.Fatal(err)
		}
		if _, err := Listen(t.Context(), cfg); !errors.Is(err, fault.Exists) {
			t.Errorf("%s: got %v", name, err)
		}
		if _, err := os.Lstat(cfg.Listen); err != nil {
			t.Errorf("%s was removed: %v", name, err)
		}
	}
}

// A link at the lock's path must not make crius write elsewhere.
func TestLockIsNoLink(t *testing.T) {
	t.Parallel()
	cfg := listenConfig(t)
	target := filepath.Join(t.TempDir(), "target")
	if err := errors.Join(os.Mkdir(filepath.Dir(cfg.Listen), 0o700), os.Symlink(target, cfg.Listen+".lock")); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(t.Context(), cfg); !errors.Is(err, syscall.ELOOP) {
		t.Errorf("got %v", err)
	}
	if _, err := os.Lstat(target); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the link's target was made: %v", err)
	}
}

// A failed Listen leaves nothing: the next one gets the lock.
func TestFailedListenLetsGo(t *testing.T) {
	t.Parallel()
	cfg := listenConfig(t)
	if err := errors.Join(os.Mkdir(filepath.Dir(cfg.Listen), 0o700), os.Mkdir(cfg.Listen, 0o700)); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(t.Context(), cfg); err == nil {
		t.Fatal("a directory was taken for a socket")
	}
	if err := os.Remove(cfg.Listen); err != nil {
		t.Fatal(err)
	}
	listen(t, cfg)
}

func TestListenConfig(t *testing.T) {
	t.Parallel()
	for key, change := range map[string]func(*Config){
		"listen":        func(c *Config) { c.Listen = "crius.sock" },
		"listen ":       func(c *Config) { c.Listen = "" },
		"listen =":      func(c *Config) { c.Listen = "/" + strings.Repeat("x", maxSocketPath) },
		"socket_mode":   func(c *Config) { c.SocketMode = 0o4660 },
		"socket_group":  func(c *Config) { c.SocketGroup = "no-such-group" },
		"socket_mode ":  func(c *Config) { c.SocketMode = 0 },
		"socket_mode =": func(c *Config) { c.SocketMode = os.ModeSetuid | 0o660 },
	} {
		cfg := listenConfig(t)
		change(&cfg)
		if _, err := Listen(t.Context(), cfg); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), strings.TrimRight(key, " =")) {
			t.Errorf("%s: got %v", key, err)
		}
	}
}

// A lock on a file that Abandon has removed does not count.
func TestLockWithoutAName(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "lock")
	lock, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if !named(lock) {
		t.Error("a file at its path has no name")
	}
	if err := os.Remove(path); err != nil || named(lock) {
		t.Errorf("a removed file has a name: %v", err)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil || named(lock) {
		t.Errorf("a removed file has the name of another: %v", err)
	}
}
