// Package rundir measures and bounds what a pod has in the run directory, which is in the
// node's memory (/run is a tmpfs).
package rundir

import (
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// MaxPod is the most bytes that one pod may have in the run directory, and the most that the
// requests for its containers may take in the server's memory.
const MaxPod = 64 << 20

// Size returns the bytes that the files at and below paths take, without what is mounted there.
// Files that are gone, or vanish meanwhile, take nothing.
func Size(paths ...string) int64 {
	var size int64
	for _, path := range paths {
		var st unix.Stat_t
		if unix.Lstat(path, &st) == nil {
			size += sizeOn(st.Dev, path)
		}
	}
	return size
}

func sizeOn(dev uint64, path string) int64 {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil || st.Dev != dev {
		return 0
	}
	const block = 512 // of st_blocks
	size := st.Blocks * block
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return size
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return size
	}
	for _, entry := range entries {
		size += sizeOn(dev, filepath.Join(path, entry.Name()))
	}
	return size
}
