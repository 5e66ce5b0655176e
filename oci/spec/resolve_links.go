package spec

import (
	"path"
	"sort"

	securejoin "github.com/cyphar/filepath-securejoin"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// MountTargets returns where mounts are made that go through links of the image which lead to
// nothing, such as /var/run to /run in an image without /run; empty for all others. crun fails at
// such a link, where runc goes on inside the root file system; what a path without links lacks,
// both make, in other mounts as well.
func MountTargets(rootfs string, mounts []*cri.Mount) []string {
	targets := make([]string, len(mounts))
	for i, m := range mounts {
		targets[i] = throughDangling(rootfs, m.GetContainerPath())
	}
	return targets
}

// WorkingDir is MountTargets for the working directory, which both runtimes fail to make.
func (in *Input) WorkingDir() string { return throughDangling(in.Facts.Rootfs, in.workdir()) }

// throughDangling returns the path to which place leads with all links resolved inside the root
// file system, if one of them leads to nothing; else it is empty.
func throughDangling(rootfs, place string) string {
	place = path.Clean(place)
	if !path.IsAbs(place) || !dangles(rootfs, place) {
		return ""
	}
	target, err := securejoin.SecureJoin(rootfs, place)
	if err != nil {
		return "" // the runtime says what is wrong
	}
	return below(rootfs, target)
}

// dangles reports whether a part of a path is a link to a path that does not exist. Parts that
// exist come before those that do not, so few of them have to be tried.
func dangles(rootfs, place string) bool {
	var ends []int
	for i := 1; i <= len(place); i++ {
		if i == len(place) || place[i] == '/' {
			ends = append(ends, i)
		}
	}
	missing := sort.Search(len(ends), func(i int) bool {
		fd, err := openBelow(rootfs, place[:ends[i]])
		if err == nil {
			_ = unix.Close(fd)
		}
		return err != nil
	})
	if missing == len(ends) {
		return false
	}
	first := place[:ends[missing]]
	dir, err := openBelow(rootfs, path.Dir(first))
	if err != nil {
		return false
	}
	defer unix.Close(dir)
	var st unix.Stat_t
	return unix.Fstatat(dir, path.Base(first), &st, unix.AT_SYMLINK_NOFOLLOW) == nil && st.Mode&unix.S_IFMT == unix.S_IFLNK
}
