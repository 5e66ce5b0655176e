package storage

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/mount"
)

// FsSize is the size of a file system.
type FsSize struct {
	Device             string // mounted device, such as /dev/sda1
	Bytes              uint64
	Inodes, FreeInodes uint64 // both 0 if the file system does not count them
}

// WritableSize returns the size of the file system with the writable layers.
func (s *Store) WritableSize() (FsSize, error) {
	dir := s.containersDir
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return FsSize{}, fmt.Errorf("container file system: %w", &os.PathError{Op: "statfs", Path: dir, Err: err})
	}
	return FsSize{
		Device:     s.device(),
		Bytes:      st.Blocks * uint64(st.Bsize),
		Inodes:     st.Files,
		FreeInodes: st.Ffree,
	}, nil
}

// deviceOf returns the device that is mounted at dir; empty if that is unknown.
func deviceOf(dir string) string {
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return ""
	}
	m, err := mount.Of(real)
	if err != nil {
		return ""
	}
	return m.Source
}
