package spec

import (
	"errors"
	"fmt"
	"os"
	"path"
	"sort"
	"strings"

	"golang.org/x/sys/unix"
)

// maxLinks is how many dangling links are followed one after the other for a mount.
const maxLinks = 8

// FollowLinks makes the directories that links of the image lead to, such as /var/run to
// /run, where the image lacks them and the request mounts something there or below: runc
// makes them itself, crun fails. Where the place of a mount is such a link itself it makes
// a directory or a file, as isDirectory says that the mount is. What cannot be made is
// left to the runtime, which says why.
//
// The root file system must be mounted, and no process may run in it yet.
func FollowLinks(in *Input, isDirectory func(mount int) (bool, error)) error {
	root, err := os.OpenRoot(in.Facts.Rootfs)
	if err != nil {
		return err
	}
	defer root.Close()
	users := in.podSecurity().GetNamespaceOptions().GetUsernsOptions()
	uid, gid := nodeID(users.GetUids(), 0), nodeID(users.GetGids(), 0)
	for i, m := range in.Request.Container.GetMounts() {
		place := path.Clean(m.GetContainerPath())
		for range maxLinks {
			link := danglingLink(in.Facts.Rootfs, place)
			if link == "" {
				break
			}
			target, err := resolveVolume(in.Facts.Rootfs, link)
			if err != nil {
				break
			}
			directory := true
			if link == place {
				if directory, err = isDirectory(i); err != nil {
					return fmt.Errorf("mount at %q: %w", place, err)
				}
			}
			if directory {
				err = makeVolume(root, target, uid, gid)
			} else {
				err = makeFile(root, target, uid, gid)
			}
			if err != nil {
				break
			}
		}
	}
	return nil
}

// makeFile makes an empty file, and the directories above it that are missing.
func makeFile(root *os.Root, name string, uid, gid int) error {
	if dir := path.Dir(name); dir != "/" {
		if err := makeVolume(root, dir, uid, gid); err != nil {
			return err
		}
	}
	name = strings.TrimPrefix(name, "/")
	f, err := root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	return errors.Join(f.Close(), root.Lchown(name, uid, gid))
}

// danglingLink is the first part of a path that is a link to what is not there; empty: there
// is none. Parts that exist come before those that do not, so few of them have to be tried.
func danglingLink(rootfs, place string) string {
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
