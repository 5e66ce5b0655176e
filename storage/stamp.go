package storage

import (
	"errors"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// stamp identifies the content of a file that is replaced whenever it changes, or the names in a
// directory, without reading it.
type stamp struct {
	device, inode   uint64
	size            int64
	changed, status unix.Timespec
}

// stampAge is how old a change must be for its stamp to differ from that of the next change: clocks of
// file systems are coarse, and they use numbers of inodes again.
const stampAge = 3 * time.Second

// stampsOf returns the stamps of files, which may be missing. It returns false if one cannot be had, or
// was changed so short a while ago that it may not show the next change. It must be called before the
// files are read.
func stampsOf(paths []string) ([]stamp, bool) {
	stamps := make([]stamp, len(paths))
	now := time.Now()
	for i, path := range paths {
		var st unix.Stat_t
		err := unix.Stat(path, &st)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil || now.Sub(time.Unix(st.Mtim.Unix())) < stampAge {
			return nil, false
		}
		stamps[i] = stamp{st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim}
	}
	return stamps, true
}

// unchanged reports whether files still have the stamps that they had, if there are any.
func unchanged(paths []string, had []stamp) bool {
	if len(had) == 0 {
		return false
	}
	now, ok := stampsOf(paths)
	return ok && slices.Equal(now, had)
}
