package unpack

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/types"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/thread"
	"github.com/crius-run/crius/storage/pull/pullerror"
	"github.com/crius-run/crius/storage/unpack/wire"
	"github.com/crius-run/crius/test/kit/sockets"
)

// What a worker's thread can still do.
func TestConfine(t *testing.T) {
	t.Parallel()
	inside, outside := t.TempDir(), t.TempDir()
	file := filepath.Join(outside, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	refused := map[string]func() error{
		"create outside":   func() error { return os.WriteFile(filepath.Join(outside, "new"), nil, 0o600) },
		"write outside":    func() error { return os.WriteFile(file, nil, 0o600) },
		"remove outside":   func() error { return unix.Unlink(file) },
		"move in":          func() error { return unix.Rename(file, filepath.Join(inside, "moved")) },
		"link in":          func() error { return unix.Link(file, filepath.Join(inside, "linked")) },
		"connect":          func() error { _, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0); return err },
		"mount":            func() error { return unix.Mount(inside, inside, "", unix.MS_BIND, "") },
		"new namespace":    func() error { return unix.Unshare(unix.CLONE_NEWNS) },
		"root and mounts":  func() error { return unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS) },
		"own descriptors":  func() error { return unix.Unshare(unix.CLONE_FILES) },
		"join a namespace": func() error { return unix.Setns(0, unix.CLONE_NEWNS) },
		"copy a mount": func() error {
			path, err := unix.BytePtrFromString(outside)
			if err != nil {
				return err
			}
			_, _, errno := unix.Syscall6(unix.SYS_OPEN_TREE_ATTR, 0, uintptr(unsafe.Pointer(path)), unix.OPEN_TREE_CLONE, 0, 0, 0)
			return errno
		},
		"open what others open": func() error { _, err := unix.FanotifyInit(unix.FAN_CLASS_NOTIF, unix.O_RDONLY); return err },
		"send datagrams":        func() error { _, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM, 0); return err },
		"remove shared memory":  func() error { _, err := unix.SysvShmCtl(-1, unix.IPC_RMID, nil); return err },
		"command file systems":  func() error { _, err := unix.IoctlGetInt(0, unix.TIOCINQ); return err },
		"change quotas": func() error {
			_, _, errno := unix.Syscall6(unix.SYS_QUOTACTL_FD, ^uintptr(0), 0, 0, 0, 0, 0)
			return errno
		},
		"trace the server": func() error { return unix.PtraceAttach(os.Getppid()) },
	}
	allowed := map[string]func() error{
		"create":  func() error { return os.WriteFile(filepath.Join(inside, "own"), []byte("x"), 0o600) },
		"move":    func() error { return os.Rename(filepath.Join(inside, "own"), filepath.Join(inside, "other")) },
		"chown":   func() error { return os.Chown(filepath.Join(inside, "other"), 1, 1) },
		"xattr":   func() error { return unix.Setxattr(inside, "trusted.overlay.opaque", []byte("y"), 0) },
		"device":  func() error { return unix.Mknod(filepath.Join(inside, "null"), unix.S_IFCHR, int(unix.Mkdev(1, 3))) },
		"discard": func() error { return os.WriteFile(os.DevNull, nil, 0) },
		"root":    func() error { return errors.Join(unix.Unshare(unix.CLONE_FS), unix.Chroot(inside)) },
	}
	err := thread.Run(func() error {
		if err := confine([]string{inside}, refusedToUnpacker); err != nil {
			return err
		}
		for what, try := range refused {
			if err := try(); !errors.Is(err, fs.ErrPermission) && !errors.Is(err, unix.EXDEV) {
				t.Errorf("%s: %v", what, err)
			}
		}
		for _, what := range []string{"create", "move", "chown", "xattr", "device", "discard", "root"} {
			if err := allowed[what](); err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Errorf("another thread is confined, too: %v", err)
	}
}

// What a worker that was taken over writes ends its pull, and no more.
func TestHostile(t *testing.T) {
	t.Parallel()
	for what, line := range map[string]string{
		"nonsense":      "nonsense\n",
		"nothing":       "",
		"endless line":  strings.Repeat("x", 2*wire.MaxMessage),
		"empty message": "{}\n",
		"half":          `{"Copied":`,
	} {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		ours, theirs := os.NewFile(uintptr(pair[0]), "ours"), os.NewFile(uintptr(pair[1]), "theirs")
		conn, err := net.FileConn(ours)
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			_, _ = io.WriteString(theirs, line) // all of it may not be wanted
			theirs.Close()
		}()
		w := &process{conn: conn.(*net.UnixConn)}
		if last := w.serve(t.Context()); last != (wire.Message{}) {
			t.Errorf("%s: %+v", what, last)
		}
		conn.Close()
		ours.Close()
	}
}

// entering is where workers run.
type entering func(ctx context.Context, pid int) error

func (e entering) Enter(ctx context.Context, _ string, pid int) (func(), error) {
	return func() {}, e(ctx, pid)
}

// A worker that dies before it has its limits and its cgroup has died like any other; one that
// cannot get them has not.
func TestWorkerDiesEarly(t *testing.T) {
	t.Parallel()
	errRefused := errors.New("refused")
	refuses := entering(func(context.Context, int) error { return errRefused })
	for name, test := range map[string]struct {
		program string
		dead    bool // before it gets its limits
		cgroups Cgroups
		died    bool
	}{
		"before":            {program: "false", dead: true, died: true},
		"while it is moved": {program: "cat", cgroups: entering(diesOnTheWay), died: true},
		"not":               {program: "cat", cgroups: refuses},
	} {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		ours, theirs := os.NewFile(uintptr(pair[0]), "ours"), os.NewFile(uintptr(pair[1]), "theirs")
		conn, err := net.FileConn(ours)
		if err := errors.Join(err, ours.Close(), theirs.Close()); err != nil {
			t.Fatal(err)
		}
		w := &process{Task: Task{Cgroups: test.cgroups}, conn: conn.(*net.UnixConn), cmd: exec.Command(test.program), ended: make(chan struct{})}
		w.stdin, err = w.cmd.StdinPipe()
		if err := errors.Join(err, w.cmd.Start()); err != nil {
			t.Fatal(err)
		}
		go func() {
			defer close(w.ended)
			w.end = w.cmd.Wait()
		}()
		if test.dead {
			<-w.ended
		}
		w.leave, w.unplaced = w.place(t.Context())
		_, err = w.run(t.Context(), wire.Order{})
		if errors.Is(err, pullerror.ErrWorkerDied) != test.died || errors.Is(err, fault.Unavailable) != test.died || errors.Is(err, errRefused) == test.died {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A worker that gets no thread says so, and not that the image needs too much memory.
func TestWorkerWithoutThreads(t *testing.T) {
	t.Parallel()
	ended := errors.New("exit status 2")
	for _, said := range []string{"runtime: failed to create new OS thread (have 5 already; errno=11)\n", "runtime/cgo: pthread_create failed: Resource temporarily unavailable\n"} {
		w := &process{}
		w.stderr.Max = len(said)
		_, _ = io.WriteString(&w.stderr, said) // never fails
		err := w.died(t.Context(), ended)
		if !errors.Is(err, pullerror.ErrWorkerDied) || !errors.Is(err, fault.Exhausted) || errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "pids.max") {
			t.Errorf("%q: %v", said, err)
		}
	}
}

// diesOnTheWay waits for a process to arrive, which has been killed.
func diesOnTheWay(ctx context.Context, pid int) error {
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		return err
	}
	<-ctx.Done()
	return context.Cause(ctx)
}

// What a worker says of blobs that its image does not have is not kept, and it cannot
// fill the log.
func TestWorkerThatSaysTooMuch(t *testing.T) {
	conns := sockets.Pair(t, unix.SOCK_STREAM)
	var log strings.Builder
	old := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	defer slog.SetDefault(old)

	known := digest.FromString("known")
	events := make(chan types.ProgressProperties, 2)
	w := &process{Task: Task{Events: events}, conn: conns[0], blobs: map[digest.Digest]bool{known: true}}
	go func() {
		defer conns[1].Close()
		to := json.NewEncoder(conns[1])
		for i := range 2 * maxLogLines {
			_ = to.Encode(wire.Message{Event: &wire.Event{Blob: wire.Blob{Digest: digest.FromString(fmt.Sprint(i))}}})
			_ = to.Encode(wire.Message{Log: &wire.Line{Level: slog.LevelWarn, Text: "line"}})
		}
		_ = to.Encode(wire.Message{Event: &wire.Event{Blob: wire.Blob{Digest: known}, Kind: uint(types.ProgressEventRead), Update: math.MaxUint64}})
	}()
	w.serve(t.Context())
	if len(events) != 1 {
		t.Fatalf("%d events", len(events))
	}
	if e := <-events; e.Artifact.Digest != known || int64(e.OffsetUpdate) < 0 {
		t.Errorf("event %+v", e)
	}
	if n := strings.Count(log.String(), "line"); n != maxLogLines {
		t.Errorf("%d lines", n)
	}
	if err := w.fetch(t.Context(), types.BlobInfo{Digest: digest.FromString("unknown")}); !errors.Is(err, fault.Invalid) {
		t.Errorf("fetch of an unknown blob: %v", err)
	}
	w.underway = 2*w.Parallel + 2
	if err := w.fetch(t.Context(), types.BlobInfo{Digest: known}); !errors.Is(err, fault.Invalid) {
		t.Errorf("one fetch too many: %v", err)
	}
}
