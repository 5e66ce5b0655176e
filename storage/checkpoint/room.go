package checkpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// Room is the free space of a directory's file system.
type Room struct {
	Path   string // of the directory, for messages
	Free   uint64 // bytes
	Device uint64 // of the file system
}

// RoomIn returns the room in a directory.
func RoomIn(dir string) (Room, error) { return room(dir, dir) }

// Room returns the room in the directory, which messages call path.
func (t *Target) Room(path string) (Room, error) { return room(path, t.path()) }

func room(name, dir string) (Room, error) {
	var system unix.Statfs_t
	var st unix.Stat_t
	if err := errors.Join(unix.Statfs(dir, &system), unix.Stat(dir, &st)); err != nil {
		return Room{}, fmt.Errorf("free space of %s: %w", name, err)
	}
	return Room{name, system.Bavail * uint64(system.Bsize), st.Dev}, nil
}

// CheckRoom returns fault.Exhausted unless each of the rooms has space for so many bytes. Directories on
// the same file system share its space.
func CheckRoom(bytes uint64, rooms ...Room) error {
	needs := map[uint64]uint64{}
	for _, r := range rooms {
		needs[r.Device] += bytes
	}
	for _, r := range rooms {
		if need := needs[r.Device]; need > r.Free {
			return fmt.Errorf("no space for the checkpoint: it needs at least %s on the file system of %s, which has %s; free some, or choose another directory: %w: %w",
				mib(need), r.Path, mib(r.Free), unix.ENOSPC, fault.Exhausted)
		}
	}
	return nil
}

func mib(bytes uint64) string { return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20)) }

// LayerSize returns how many bytes of files Diff would archive, or its error for sparse files. The container
// may go on changing them.
func LayerSize(upper string, hidden []string) (size uint64, err error) {
	root, err := os.OpenRoot(upper)
	if err != nil {
		return 0, err
	}
	defer root.Close()
	skip, seen, holes := map[string]bool{}, map[inode]bool{}, int64(0)
	for _, at := range hidden {
		skip[strings.Trim(path.Clean("/"+at), "/")] = true
	}
	err = walk(root, ".", fs.ModeDir, func(name string, kind fs.FileMode, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return err
		case skip[name] && kind.IsDir():
			return fs.SkipDir
		case skip[name] || !kind.IsRegular():
			return nil
		}
		info, err := root.Lstat(name)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		self := inode{st.Dev, st.Ino}
		if st.Nlink > 1 && seen[self] {
			return nil
		}
		seen[self] = st.Nlink > 1
		if holes += max(0, st.Size-st.Blocks*block); holes > maxHoles {
			return tooSparse(name)
		}
		size += uint64(st.Size)
		return nil
	})
	return size, err
}
