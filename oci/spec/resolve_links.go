package spec

import (
	"path"
	"slices"
	"sort"
	"sync"

	securejoin "github.com/cyphar/filepath-securejoin"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// FollowLinks changes the paths of a finished spec that go through links of the image which lead
// to nothing, such as /var/run to /run in an image without /run: mounts, device nodes and the
// working directory, whoever added them. Each is where the link leads, inside the root file
// system. crun and current runc fail at such a link; what a path without links lacks, both make.
//
// Paths stay as they are where another mount hides the link, and where a link leads into /proc: the
// runtime, or the check of the created container, refuses those. A working directory there is
// fault.Invalid.
func FollowLinks(s *specs.Spec) error {
	given := slices.Clone(s.Mounts)
	// The links in each are followed once, whatever the number of dangling ones.
	covered := sync.OnceValue(func() []string {
		var all []string
		for _, m := range given {
			all = append(all, inside(s.Root.Path, m.Destination))
		}
		return all
	})
	for i := range s.Mounts {
		s.Mounts[i].Destination = follow(s.Root.Path, s.Mounts[i].Destination, covered)
	}
	sortByDepth(s.Mounts)
	for i := range s.Linux.Devices {
		s.Linux.Devices[i].Path = follow(s.Root.Path, s.Linux.Devices[i].Path, covered)
	}
	link, target := throughDangling(s.Root.Path, s.Process.Cwd)
	if link == "" || hidden(s.Root.Path, link, covered) {
		return nil
	}
	if magicLink(target) {
		return invalid("working directory %.256q leads through /proc/PID", s.Process.Cwd)
	}
	s.Process.Cwd = target
	return nil
}

// follow returns where place leads, or place itself. covered are the places of all mounts, without links.
func follow(rootfs, place string, covered func() []string) string {
	// CheckRootfs has made sure that these are directories: what is below them is never the image's.
	if atOrBelow(path.Clean(place), []string{"/proc", "/sys", "/dev"}) {
		return place
	}
	link, target := throughDangling(rootfs, place)
	if link == "" || hidden(rootfs, link, covered) || validateProcMount(target, "") != nil {
		return place
	}
	return target
}

// hidden reports whether a mount covers the directory that has the link.
func hidden(rootfs, link string, covered func() []string) bool {
	dir := inside(rootfs, path.Dir(link))
	return dir != "/" && atOrBelow(dir, covered())
}

// inside returns where place leads with all links resolved inside the root file system; the root
// if that cannot be said, so that the runtime says what is wrong.
func inside(rootfs, place string) string {
	target, err := securejoin.SecureJoin(rootfs, place)
	if err != nil {
		return "/"
	}
	return below(rootfs, target)
}

// throughDangling returns the first link on the way to place that leads to nothing, and where
// place leads with all links resolved inside the root file system; nothing if there is no such link.
func throughDangling(rootfs, place string) (link, target string) {
	place = path.Clean(place)
	if !path.IsAbs(place) {
		return "", ""
	}
	if link = dangling(rootfs, place); link == "" {
		return "", ""
	}
	if target = inside(rootfs, place); target == "/" {
		return "", ""
	}
	return link, target
}

// dangling returns the part of a path that is a link to a path that does not exist, if there is
// one. Parts that exist come before those that do not, so few of them have to be tried.
func dangling(rootfs, place string) string {
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
		return ""
	}
	first := place[:ends[missing]]
	dir, err := openBelow(rootfs, path.Dir(first))
	if err != nil {
		return ""
	}
	defer unix.Close(dir)
	var st unix.Stat_t
	if unix.Fstatat(dir, path.Base(first), &st, unix.AT_SYMLINK_NOFOLLOW) != nil || st.Mode&unix.S_IFMT != unix.S_IFLNK {
		return ""
	}
	return first
}
