//go:build differential

package differential

import (
	"archive/tar"
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// tree makes a directory with files of one kind.
type tree struct {
	name string
	make func(dir string) error
}

// trees are what images hold, one kind each.
var trees = []tree{
	{"plain", func(dir string) error { return texts(dir, "etc/motd", "usr/bin/tool", "a", "b/c/d") }},
	{"empty", func(string) error { return nil }},
	{"empty files", func(dir string) error {
		for i := range 20 {
			if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), nil, 0o644); err != nil {
				return err
			}
		}
		return nil
	}},
	{"links", func(dir string) error {
		err := texts(dir, "d/target", "d/other")
		for name, to := range map[string]string{
			"relative": "d/target", "absolute": "/d/target", "dangling": "/nowhere", "up": "../../../etc/passwd",
			"self": "self", "directory": "d", "long": strings.Repeat("x/", 90) + "y", "empty-ish": ".", "d/inner": "target",
		} {
			err = first(err, os.Symlink(to, filepath.Join(dir, name)))
		}
		return err
	}},
	{"hard links", func(dir string) error {
		err := texts(dir, "d/one", "two")
		err = first(err, os.Symlink("d/one", filepath.Join(dir, "link")))
		for _, pair := range [][2]string{{"d/one", "a-first"}, {"d/one", "z-last"}, {"two", "d/two"}, {"link", "link-again"}} {
			err = first(err, os.Link(filepath.Join(dir, pair[0]), filepath.Join(dir, pair[1])))
		}
		return err
	}},
	{"modes", func(dir string) error {
		err := texts(dir, "placeholder")
		for _, mode := range []uint32{0, 0o400, 0o111, 0o4755, 0o2755, 0o6711, 0o1777, 0o7777, 0o644} {
			file, directory := filepath.Join(dir, fmt.Sprintf("f%o", mode)), filepath.Join(dir, fmt.Sprintf("d%o", mode))
			err = first(err, os.WriteFile(file, []byte("x"), 0o600), unix.Chmod(file, mode), os.Mkdir(directory, 0o700), unix.Chmod(directory, mode))
		}
		return err
	}},
	{"owners", func(dir string) error {
		var err error
		for i, id := range []int{0, 1, 65534, 65535, 2097151, 2097152, 1 << 24, 1<<31 - 2} {
			file := filepath.Join(dir, fmt.Sprint("f", i))
			directory := filepath.Join(dir, fmt.Sprint("d", i))
			err = first(err, os.WriteFile(file, []byte("x"), 0o4755), os.Mkdir(directory, 0o2750), os.Symlink("f0", file+"l"))
			for _, path := range []string{file, directory, file + "l"} {
				err = first(err, os.Lchown(path, id, id))
			}
			err = first(err, unix.Chmod(file, 0o4755), unix.Chmod(directory, 0o2750))
		}
		return err
	}},
	{"times", func(dir string) error {
		var err error
		for i, at := range []time.Time{time.Unix(0, 0), time.Unix(1, 1), time.Unix(1700000000, 123456789), time.Unix(-1, 0), time.Unix(-1000000000, 5), time.Unix(1<<32+5, 7), time.Unix(1<<33, 0)} {
			file, directory, link := filepath.Join(dir, fmt.Sprint("f", i)), filepath.Join(dir, fmt.Sprint("d", i)), filepath.Join(dir, fmt.Sprint("l", i))
			err = first(err, os.WriteFile(file, []byte("x"), 0o644), os.Mkdir(directory, 0o755), os.Symlink("x", link), os.WriteFile(filepath.Join(directory, "f"), nil, 0o644))
			for _, path := range []string{file, directory, link} {
				ts := unix.NsecToTimespec(at.UnixNano())
				err = first(err, unix.UtimesNanoAt(unix.AT_FDCWD, path, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW))
			}
		}
		return err
	}},
	{"attributes", func(dir string) error {
		err := texts(dir, "d/user", "capability", "both")
		capability := []byte{1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
		for path, attributes := range map[string]map[string]string{
			"d": {"user.dir": "1"}, "d/user": {"user.a": "", "user.b": "b\x00\nb=1", "user.c.d.e": strings.Repeat("v", 2000)},
			"capability": {"security.capability": string(capability)}, "both": {"security.capability": string(capability), "user.x": "y"},
		} {
			for name, value := range attributes {
				err = first(err, unix.Lsetxattr(filepath.Join(dir, path), name, []byte(value), 0))
			}
		}
		return err
	}},
	{"long names", func(dir string) error {
		var err error
		for _, length := range []int{99, 100, 101, 154, 155, 156, 254, 255} {
			err = first(err, texts(dir, strings.Repeat("n", length), "dir/"+strings.Repeat("m", length), strings.Repeat("p/", length/2)+"q"))
		}
		return first(err, os.Symlink(strings.Repeat("t", 101), filepath.Join(dir, "to-long")), os.Link(filepath.Join(dir, strings.Repeat("n", 255)), filepath.Join(dir, "again")))
	}},
	{"odd names", func(dir string) error {
		return texts(dir, "with space", "new\nline", "tab\t", "back\\slash", "ünïcödé/日本", "quote\"'", "-dash", "..dots", "...", "*?[a]", "\x01\x7f", "%41", "a:b", "trailing ", "\\.wh.x")
	}},
	{"names that are not UTF-8", func(dir string) error { return texts(dir, "caf\xe9", "\xff\xfe/x", "d\xe9p/\x80") }},
	{"sparse", func(dir string) error {
		var err error
		for i, layout := range [][]int64{{}, {0}, {1 << 20}, {0, 1 << 20, 3 << 20}, {5000, 700000}} {
			file, openErr := os.Create(filepath.Join(dir, fmt.Sprint("s", i)))
			if openErr != nil {
				return openErr
			}
			err = first(err, file.Truncate(4<<20))
			for _, at := range layout {
				_, writeErr := file.WriteAt([]byte("data"), at)
				err = first(err, writeErr)
			}
			err = first(err, file.Close())
		}
		return err
	}},
	{"devices", func(dir string) error {
		err := texts(dir, "beside")
		for name, device := range map[string][2]uint32{"null": {unix.S_IFCHR | 0o666, 0x103}, "block": {unix.S_IFBLK | 0o660, 0x700}, "large": {unix.S_IFCHR | 0o600, uint32(unix.Mkdev(300, 300000))}, "pipe": {unix.S_IFIFO | 0o640, 0}} {
			err = first(err, unix.Mknod(filepath.Join(dir, name), device[0], int(device[1])))
		}
		return err
	}},
	{"deep", func(dir string) error { return texts(dir, strings.Repeat("d/", 120)+"bottom") }},
	{"many", func(dir string) error {
		var err error
		for i := range 1500 {
			err = first(err, texts(dir, fmt.Sprintf("%d/%d", i%40, i)))
		}
		return err
	}},
	{"large", func(dir string) error {
		noise := make([]byte, 3<<20+17)
		_, _ = rand.NewChaCha8([32]byte{7}).Read(noise)
		return first(os.WriteFile(filepath.Join(dir, "noise"), noise, 0o644), os.WriteFile(filepath.Join(dir, "zeros"), make([]byte, 5<<20), 0o644))
	}},
	{"directories that cannot be written", func(dir string) error {
		err := texts(dir, "ro/sub/file", "none/file")
		return first(err, os.Chmod(filepath.Join(dir, "ro/sub"), 0o555), os.Chmod(filepath.Join(dir, "ro"), 0o500), os.Chmod(filepath.Join(dir, "none"), 0))
	}},
}

// texts writes files whose content is their name.
func texts(dir string, names ...string) error {
	for _, name := range names {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(name), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// age gives everything below dir a time before the test started.
func age(dir string) error {
	return descend(dir, ".", func(_ string, st *unix.Stat_t, path string) error {
		if st.Mtim.Sec < started.Unix()-1 || st.Mtim.Sec > started.Unix()+1000 {
			return nil // the tree has set it
		}
		at := unix.NsecToTimespec(int64(1_700_000_000_123_456_789) + int64(st.Ino%1000))
		return unix.UtimesNanoAt(unix.AT_FDCWD, path, []unix.Timespec{at, at}, unix.AT_SYMLINK_NOFOLLOW)
	})
}

func first(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// packer packs a directory into an archive.
type packer struct {
	name string
	pack func(dir string) ([]byte, error)
}

// packers are the programs that make layers in the field, in all of their formats.
var packers = append([]packer{{"go", packGo}, command("busybox", "busybox", "tar", "-c", ".")},
	append(variants("GNU tar", []string{"tar", "--xattrs", "--xattrs-include=*", "--numeric-owner", "-c", "."}, [][]string{
		{"--format=v7"}, {"--format=oldgnu"}, {"--format=gnu"}, {"--format=ustar"}, {"--format=posix"}, {"--format=gnu", "-S"},
		{"--format=posix", "-S", "--sparse-version=0.0"}, {"--format=posix", "-S", "--sparse-version=0.1"}, {"--format=posix", "-S", "--sparse-version=1.0"},
		{"--format=posix", "--pax-option=delete=atime,delete=ctime", "--sort=name"},
	}), variants("bsdtar", []string{"bsdtar", "--numeric-owner", "-c", "."}, [][]string{
		{"--format=ustar"}, {"--format=pax"}, {"--format=paxr"}, {"--format=gnutar"},
	})...)...)

func variants(name string, base []string, options [][]string) (all []packer) {
	for _, o := range options {
		argv := append(append([]string{base[0]}, o...), base[1:]...)
		all = append(all, command(name+" "+strings.Join(o, " "), argv...))
	}
	return all
}

func command(name string, argv ...string) packer {
	return packer{name, func(dir string) ([]byte, error) {
		cmd := exec.Command(argv[0], argv[1:]...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "LC_ALL=C.UTF-8")
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil && len(out) < 1024 {
			return nil, fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, stderr.String())
		}
		return out, nil // formats that cannot hold a name leave the file out
	}}
}

// packGo packs as images are built by Go programs.
func packGo(dir string) ([]byte, error) {
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	inodes := map[uint64]string{}
	err := descend(dir, ".", func(name string, st *unix.Stat_t, path string) error {
		info, err := os.Lstat(path)
		if err != nil {
			return err
		}
		target, _ := os.Readlink(path)
		header, err := tar.FileInfoHeader(info, target)
		if err != nil {
			return err
		}
		header.Name = strings.TrimPrefix(name, "./")
		if info.IsDir() {
			header.Name += "/"
		}
		header.Format = tar.FormatPAX
		header.Uname, header.Gname = "", ""
		if linked, ok := inodes[st.Ino]; ok && st.Nlink > 1 && !info.IsDir() {
			header.Typeflag, header.Linkname, header.Size = tar.TypeLink, linked, 0
		}
		inodes[st.Ino] = header.Name
		if err := w.WriteHeader(header); err != nil {
			return nil //nolint:nilerr // a header that the format cannot hold leaves the file out
		}
		if header.Typeflag != tar.TypeReg {
			return nil
		}
		data, err := os.ReadFile(path)
		if err == nil {
			_, err = w.Write(data)
		}
		return err
	})
	return archive.Bytes(), first(err, w.Close())
}
