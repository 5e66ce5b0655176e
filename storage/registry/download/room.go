package download

import (
	"math"
	"os"

	"go.podman.io/image/v5/types"
	"golang.org/x/sys/unix"
)

// maxSum is more bytes than any disk has, and small enough that many of them fit an int64.
const maxSum = 1 << 50

// Fits reports whether the disk has room for the missing bytes of the blobs. Files that Clear would
// delete count as room, and are not deleted before the disk is full: a manifest may name any sizes.
// If the blobs fit, their files stay until End.
func (p *Pull) Fits(blobs []types.BlobInfo) (bool, error) {
	wanted := map[string]bool{}
	for _, blob := range blobs {
		if err := blob.Digest.Validate(); err != nil { // else it cannot name a file
			return false, err
		}
		wanted[fileName(blob.Digest, p.registry)] = true
	}
	room, err := p.dir.room(wanted)
	if err != nil {
		return false, err
	}
	var missing int64
	for _, blob := range blobs {
		missing += min(max(blob.Size-p.dir.stored(fileName(blob.Digest, p.registry)), 0), maxSum)
	}
	if missing > room {
		return false, nil
	}
	p.reserve(wanted)
	return true, nil
}

// room returns how many bytes are free on the disk, or would be after Clear without the files of
// these names.
func (d *Dir) room(except map[string]bool) (bytes int64, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(d.parent, &st); err != nil {
		return 0, &os.PathError{Op: "statfs", Path: d.parent, Err: err}
	}
	bytes = int64(min(st.Bavail*uint64(st.Bsize), math.MaxInt64/2))
	for _, dir := range d.onDisk() {
		dir.mu.Lock()
		files, _, _ := dir.unneeded()
		dir.mu.Unlock()
		for _, f := range files {
			if dir != d || !except[f.name] {
				bytes += min(f.size, maxSum)
			}
		}
	}
	return bytes, nil
}

// hasRoom reports whether a blob of this size fits, as far as is known.
func (d *Dir) hasRoom(size int64) bool {
	room, err := d.room(nil)
	return err != nil || size <= room
}

// stored returns how many bytes of a file are there.
func (d *Dir) stored(name string) int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	root, err := d.opened()
	if err != nil {
		return 0
	}
	info, err := root.Lstat(file(name))
	if err != nil || !info.Mode().IsRegular() {
		return 0
	}
	return info.Size()
}

// reserve keeps files of these names until the pull ends.
func (p *Pull) reserve(names map[string]bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dir.mu.Lock()
	defer p.dir.mu.Unlock()
	for name := range names {
		p.dir.reserved[name]++
		p.reserved = append(p.reserved, name)
	}
}

// Clear deletes all files that no pull uses, here and beside. It reports whether there were any.
func (d *Dir) Clear() (cleared bool) {
	for _, dir := range d.onDisk() {
		cleared = dir.clear() || cleared
	}
	return cleared
}

func (d *Dir) clear() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	files, _, _ := d.unneeded()
	for _, file := range files {
		d.remove(file.name)
	}
	return len(files) > 0
}

// onDisk returns this directory, and the one beside it if that is on the same disk.
func (d *Dir) onDisk() []*Dir {
	if d.Beside == nil || !sameDisk(d.parent, d.Beside.parent) {
		return []*Dir{d}
	}
	return []*Dir{d, d.Beside}
}

func sameDisk(a, b string) bool {
	var one, other unix.Stat_t
	return unix.Stat(a, &one) == nil && unix.Stat(b, &other) == nil && one.Dev == other.Dev
}
