// Package diskusage measures what image layers take of the disk, in blocks, as du(1) does, and notes
// it at each layer: layers never change, and may have a hundred thousand files.
package diskusage

import (
	"encoding/binary"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/tree"
)

// Usage is what files take of a disk. A file with several links counts once.
type Usage struct {
	Bytes  uint64 `json:"Bytes"`
	Inodes uint64 `json:"Inodes"`
}

// Plus returns the sum.
func (u Usage) Plus(other Usage) Usage {
	return Usage{u.Bytes + other.Bytes, u.Inodes + other.Inodes}
}

// Of measures files and directories with all that is below them. What does not exist takes nothing.
// The error is tree.ErrStopped if stop, which may be nil, says so.
func Of(stop func() bool, paths ...string) (Usage, error) {
	sum := tree.Usage{Stop: stop}
	for _, path := range paths {
		if err := sum.Add(path); err != nil {
			return Usage{}, err
		}
	}
	return Usage{sum.Bytes, sum.Inodes}, nil
}

// OfEach measures files and directories without what is in them.
func OfEach(paths ...string) (sum Usage) {
	for _, path := range paths {
		var st unix.Stat_t
		if unix.Lstat(path, &st) == nil {
			sum = sum.Plus(Usage{uint64(st.Blocks) * 512, 1})
		}
	}
	return sum
}

// Layer says where a layer is on the disk.
type Layer struct {
	Dir   string // its files are in FilesName
	Split string // file with its tar-split data, which may be missing
}

// SplitSuffix ends the names of files with tar-split data, after the id of the layer.
const SplitSuffix = ".tar-split.gz"

// Names in the directory of the overlay driver.
const (
	FilesName = "diff" // of a layer's files, in the directory of the layer
	linkName  = "link" // file in the directory of the layer with the name of a link to its files
	LinksName = "l"    // directory of such links, beside those of layers
)

// Measure measures a layer.
func (l Layer) Measure(stop func() bool) (Usage, error) {
	files, err := Of(stop, filepath.Join(l.Dir, FilesName))
	if err != nil {
		return Usage{}, err
	}
	return l.with(files)
}

// with adds what the layer has beside its files. A mount, such as that of a container of podman, is no
// part of the layer.
func (l Layer) with(files Usage) (Usage, error) {
	var self unix.Stat_t
	if err := unix.Lstat(l.Dir, &self); err != nil {
		return Usage{}, &os.PathError{Op: "lstat", Path: l.Dir, Err: err}
	}
	entries, err := os.ReadDir(l.Dir)
	if err != nil {
		return Usage{}, err
	}
	beside := []string{l.Split}
	if name, err := os.ReadFile(filepath.Join(l.Dir, linkName)); err == nil && filepath.IsLocal(string(name)) {
		beside = append(beside, filepath.Join(filepath.Dir(l.Dir), LinksName, string(name)))
	}
	for _, entry := range entries {
		var st unix.Stat_t
		path := filepath.Join(l.Dir, entry.Name())
		if entry.Name() != FilesName && unix.Lstat(path, &st) == nil && st.Dev == self.Dev {
			beside = append(beside, path)
		}
	}
	rest, err := Of(nil, beside...)
	return files.Plus(rest).Plus(OfEach(l.Dir)), err
}

// noted is the extended attribute of a layer's directory with its usage: the inode number of the directory,
// since a copy may take other blocks of its disk, then bytes and inodes.
const noted = "trusted.crius.usage"

const notedSize = 3 * 8 // bytes

// Note measures a layer, which must be complete, and notes the result at its directory. A file system that
// takes no note is no error: the next process measures the layer again.
func (l Layer) Note(stop func() bool) (Usage, error) {
	files, err := Of(stop, filepath.Join(l.Dir, FilesName))
	if err != nil {
		return Usage{}, err
	}
	return l.NoteWith(files)
}

// NoteWith is Note for a layer whose files have been measured already.
func (l Layer) NoteWith(files Usage) (Usage, error) {
	_ = unix.Lsetxattr(l.Dir, noted, make([]byte, notedSize), 0) // the attribute itself may take a block
	usage, err := l.with(files)
	var self unix.Stat_t
	if err == nil && unix.Lstat(l.Dir, &self) == nil {
		var note []byte
		for _, number := range []uint64{self.Ino, usage.Bytes, usage.Inodes} {
			note = binary.LittleEndian.AppendUint64(note, number)
		}
		_ = unix.Lsetxattr(l.Dir, noted, note, 0)
	}
	return usage, err
}

// Noted returns what Note has noted at the directory of a layer.
func Noted(dir string) (usage Usage, ok bool) {
	note := make([]byte, notedSize)
	n, err := unix.Lgetxattr(dir, noted, note)
	var self unix.Stat_t
	if err != nil || n != notedSize || unix.Lstat(dir, &self) != nil || binary.LittleEndian.Uint64(note) != self.Ino {
		return Usage{}, false
	}
	return Usage{binary.LittleEndian.Uint64(note[8:]), binary.LittleEndian.Uint64(note[16:])}, true
}
