//go:build differential

package differential

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

var started = time.Now()

// walk describes each file below root by one line: its path, then everything
// that a container can see of it, and what overlayfs reads.
func walk(root string) (map[string]string, error) {
	files := map[string]string{}
	first := map[uint64]string{} // name of an inode with several
	return files, descend(root, ".", func(name string, st *unix.Stat_t, path string) error {
		content, err := contentOf(path, st)
		if err != nil {
			return err
		}
		attributes, err := xattrs(path)
		if err != nil {
			return err
		}
		same := name
		if st.Nlink > 1 && st.Mode&unix.S_IFMT != unix.S_IFDIR {
			if _, ok := first[st.Ino]; !ok {
				first[st.Ino] = name
			}
			same = first[st.Ino]
		}
		if st.Mtim.Sec >= started.Unix() {
			st.Mtim = unix.Timespec{} // of unpacking
		}
		files[name] = fmt.Sprintf("mode %o owner %d:%d time %d.%09d device %x size %d content %s xattrs %s inode of %q",
			st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec, st.Rdev, sizeOf(st), content, attributes, same)
		return nil
	})
}

// descend calls visit for everything below root, in the order of names. Names
// need not be UTF-8.
func descend(root, name string, visit func(name string, st *unix.Stat_t, path string) error) error {
	path := filepath.Join(root, name)
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return &fs.PathError{Op: "lstat", Path: path, Err: err}
	}
	if err := visit(name, &st, path); err != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return err
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if err := descend(root, name+"/"+entry.Name(), visit); err != nil {
			return err
		}
	}
	return nil
}

func sizeOf(st *unix.Stat_t) int64 {
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return 0 // which the file system decides
	}
	return st.Size
}

func contentOf(path string, st *unix.Stat_t) (string, error) {
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		data, err := os.ReadFile(path)
		return fmt.Sprintf("%x", sha256.Sum256(data))[:16], err
	case unix.S_IFLNK:
		return os.Readlink(path)
	}
	return "none", nil
}

func xattrs(path string) (string, error) {
	names := make([]byte, 64<<10)
	size, err := unix.Llistxattr(path, names)
	if err != nil {
		return "", &fs.PathError{Op: "llistxattr", Path: path, Err: err}
	}
	var all []string
	for _, name := range bytes.Split(bytes.TrimSuffix(names[:size], []byte{0}), []byte{0}) {
		if len(name) == 0 {
			continue
		}
		value := make([]byte, 64<<10)
		n, err := unix.Lgetxattr(path, string(name), value)
		if err != nil && !errors.Is(err, unix.ENODATA) {
			return "", &fs.PathError{Op: "lgetxattr", Path: path, Err: err}
		}
		all = append(all, fmt.Sprintf("%s=%q", name, value[:max(n, 0)]))
	}
	slices.Sort(all)
	return "[" + strings.Join(all, " ") + "]", nil
}

// differences compares two walks, and returns a line for each file that
// differs. It leaves out the root directory, which Debian's library makes 0555
// whatever the archive says.
func differences(ours, theirs map[string]string) (lines []string) {
	names := map[string]bool{}
	for name := range ours {
		names[name] = true
	}
	for name := range theirs {
		names[name] = true
	}
	delete(names, ".")
	for name := range names {
		if ours[name] != theirs[name] {
			lines = append(lines, fmt.Sprintf("%q\n    ours:   %s\n    theirs: %s", name, orNone(ours[name]), orNone(theirs[name])))
		}
	}
	slices.Sort(lines)
	return lines
}

// dropInherited removes the directories that no entry describes from the walks of
// a layer, if one that crius has unpacked below has their attributes. It reports
// whether there were any, and adds the layer to the lower ones.
func dropInherited(ours, theirs map[string]string, lower map[string][]string) (dropped bool) {
	for name, line := range ours {
		attributes, _, _ := strings.Cut(line, " xattrs")
		if strings.HasPrefix(theirs[name], "mode 40755 owner 0:0 time 0.000000000 ") && line != theirs[name] && slices.Contains(lower[name], attributes) {
			delete(ours, name)
			delete(theirs, name)
			dropped = true
		}
		lower[name] = append(lower[name], attributes)
	}
	return dropped
}

func orNone(description string) string {
	if description == "" {
		return "does not exist"
	}
	return description
}
