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

// How old a change must be for its stamp to differ from that of the next change, by the kernel's coarse clock, from
// which file systems have their times. They use numbers of inodes again.
const (
	stampAge       = 100 * time.Millisecond // many ticks of that clock
	stampAgeInFull = 3 * time.Second        // if the file system may know whole seconds only
)

// stampsOf returns the stamps of files, which may be missing. It returns false if one cannot be had, or
// was changed so short a while ago that it may not show the next change. It must be called before the
// files are read.
func stampsOf(paths []string) ([]stamp, bool) {
	stamps := make([]stamp, len(paths))
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &now); err != nil {
		return nil, false
	}
	for i, path := range paths {
		var st unix.Stat_t
		err := unix.Stat(path, &st)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil || !settled(st.Mtim, now) {
			return nil, false
		}
		stamps[i] = stamp{st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim}
	}
	return stamps, true
}

// settled reports whether a file that was changed at that time would have another time if it were changed now.
func settled(changed, now unix.Timespec) bool {
	age := stampAge
	if changed.Nsec == 0 {
		age = stampAgeInFull
	}
	return time.Duration(now.Nano()-changed.Nano()) >= age
}

// unchanged reports whether files still have the stamps that they had, if there are any.
func unchanged(paths []string, had []stamp) bool {
	if len(had) == 0 {
		return false
	}
	now, ok := stampsOf(paths)
	return ok && slices.Equal(now, had)
}
