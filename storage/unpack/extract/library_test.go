package extract

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc64"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	tarsplit "github.com/vbatts/tar-split/tar/storage"
	library "go.podman.io/storage/pkg/archive"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/regular"
)

// lenient checks nothing.
type lenient struct{}

func (lenient) Entry(*tar.Header) error { return nil }
func (lenient) Implied(int) error       { return nil }
func (lenient) Holes(int64) error       { return nil }

// unpacked is a layer that was extracted.
type unpacked struct {
	dir   string
	split bytes.Buffer
	Result
}

func extractTo(t testing.TB, dir string, content io.Reader, check Check) (*unpacked, error) {
	t.Helper()
	return extractIn(t.Context(), t, dir, content, check)
}

func extractIn(ctx context.Context, t testing.TB, dir string, content io.Reader, check Check) (*unpacked, error) {
	t.Helper()
	root, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	u := &unpacked{dir: dir}
	u.Result, err = Layer(ctx, Order{Content: content, Dir: root, Split: &u.split, Check: check})
	return u, err
}

// files returns a line for each file below a directory: everything that a container could see.
func files(t testing.TB, dir string) (lines []string) {
	t.Helper()
	var paths []string
	var stats []unix.Stat_t
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil {
			err = unix.Lstat(path, &st)
		}
		paths, stats = append(paths, path), append(stats, st)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	inodes := map[uint64]string{}
	for i, path := range paths { // now, since reading changes times
		st := stats[i]
		name, _ := filepath.Rel(dir, path)
		if inodes[st.Ino] == "" {
			inodes[st.Ino] = name
		}
		var content []byte
		times := fmt.Sprint(st.Atim, st.Mtim)
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			content, err = os.ReadFile(path)
		case unix.S_IFLNK:
			times = fmt.Sprint(st.Mtim) // whoever follows it changes the other
			var to string
			to, err = os.Readlink(path)
			content = []byte(to)
		case unix.S_IFDIR:
			if st.Atim.Sec > 0 && st.Ctim.Sec-st.Mtim.Sec < 1000 { // no entry says it
				times = "now"
			}
		case unix.S_IFCHR:
			if st.Rdev == 0 {
				times = "now"
			}
		}
		if err != nil {
			t.Fatal(err)
		}
		lines = append(lines, fmt.Sprintf("%q %o %d:%d %x %s %d bytes %.40q link of %q %q",
			name, st.Mode, st.Uid, st.Gid, st.Rdev, times, len(content), content, inodes[st.Ino], xattrs(t, path)))
	}
	return lines
}

func xattrs(t testing.TB, path string) (all []string) {
	t.Helper()
	names := make([]byte, 4096)
	size, err := unix.Llistxattr(path, names)
	if err != nil {
		t.Fatal(err)
	}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(names[:size]), "\x00"), "\x00") {
		if name == "" {
			continue
		}
		value := make([]byte, 4096)
		size, err := unix.Lgetxattr(path, name, value)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, name+"="+string(value[:size]))
	}
	slices.Sort(all)
	return all
}

// byLibrary unpacks an archive as containers/storage does.
func byLibrary(t testing.TB, dir string, archive []byte) error {
	t.Helper()
	return library.Unpack(bytes.NewReader(archive), dir, &library.TarOptions{WhiteoutFormat: library.OverlayWhiteoutFormat})
}

// rebuilt puts an archive together from tar-split data and the files below dir.
func (u *unpacked) rebuilt(t testing.TB) []byte {
	t.Helper()
	root, err := os.Open(u.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	var all bytes.Buffer
	for from := json.NewDecoder(bytes.NewReader(u.split.Bytes())); ; {
		var e tarsplit.Entry
		if err := from.Decode(&e); errors.Is(err, io.EOF) {
			return all.Bytes()
		} else if err != nil {
			t.Fatal(err)
		}
		if e.Type == tarsplit.SegmentType {
			all.Write(e.Payload)
			continue
		}
		if e.Size > 0 {
			file, err := regular.OpenBelow(int(root.Fd()), e.GetName())
			if err != nil {
				t.Fatal(err)
			}
			content, err := io.ReadAll(file)
			if err := errors.Join(err, file.Close()); err != nil {
				t.Fatal(err)
			}
			hash := crc64.New(tarsplit.CRCTable)
			_, _ = hash.Write(content)
			if !bytes.Equal(hash.Sum(nil), e.Payload) {
				t.Errorf("%q has another checksum", e.GetName())
			}
			all.Write(content)
		}
	}
}

// packed writes entries with contents.
func packed(t testing.TB, format tar.Format, entries ...tar.Header) []byte {
	t.Helper()
	var all bytes.Buffer
	w := tar.NewWriter(&all)
	for i := range entries {
		h := entries[i]
		h.Format = format
		if h.ModTime.IsZero() && h.Typeflag != tar.TypeXGlobalHeader {
			h.ModTime = time.Unix(1_000_000_000+int64(i), 0)
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg || h.Typeflag == 0 {
			if _, err := w.Write(bytes.Repeat([]byte{byte('a' + i%26)}, int(h.Size))); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return all.Bytes()
}

func dir(name string, mode int64) tar.Header {
	return tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: mode}
}

func plain(name string, size int64) tar.Header {
	return tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: size}
}

func link(name, to string) tar.Header {
	return tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: to, Mode: 0o777}
}

func hard(name, to string) tar.Header {
	return tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: to, Mode: 0o640, Uid: 3, Gid: 4}
}

func with(h tar.Header, pairs ...string) tar.Header {
	h.PAXRecords = map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		h.PAXRecords[paxXattr+pairs[i]] = pairs[i+1]
	}
	return h
}

func owned(h tar.Header, uid, gid int) tar.Header {
	h.Uid, h.Gid = uid, gid
	return h
}

func device(name string, kind byte, major, minor int64) tar.Header {
	return tar.Header{Typeflag: kind, Name: name, Mode: 0o600, Devmajor: major, Devminor: minor}
}

// corpus are layers that the library accepts.
func corpus(t testing.TB) map[string][]byte {
	t.Helper()
	capability := "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
	late := plain("times", 3)
	late.AccessTime, late.ModTime = time.Unix(2_000_000_000, 500), time.Unix(1_500_000_000, 123_456_789)
	early := plain("early", 1)
	early.ModTime = time.Unix(-86400, 0)
	readLate := dir("read/", 0o755)
	readLate.AccessTime, readLate.ModTime = time.Unix(1_400_000_000, 0), time.Unix(1_500_000_000, 7)
	return map[string][]byte{
		"nothing": packed(t, tar.FormatPAX),
		"plain": packed(t, tar.FormatPAX, dir("usr/", 0o755), dir("usr/lib", 0o750), plain("usr/lib/a", 100), plain("usr/lib/b", 1<<20+7), plain("usr/empty", 0),
			owned(plain("usr/own", 5), 1000, 70_000), link("l", "usr/lib"), hard("h", "usr/lib/a"), hard("hl", "l"), dir("usr/lib/", 0o711)),
		"modes":             packed(t, tar.FormatPAX, owned(tar.Header{Typeflag: tar.TypeReg, Name: "su", Mode: 0o6755, Size: 1}, 5, 6), owned(dir("tmp", 0o1777), 1, 2), owned(dir("p", 0o2770), 7, 8), plain("p/f", 1), dir("p/d", 0o755), plain("p/i/m/f", 1)),
		"implied":           packed(t, tar.FormatPAX, plain("a/b/c/d", 1), hard("e/f/g", "a/b/c/d"), dir("a/b", 0o700), link("x/y", "/a/b"), plain("x/y/z/w", 2)),
		"root":              packed(t, tar.FormatPAX, owned(dir("./", 0o711), 9, 10), plain("./f", 1), dir("/", 0o701)),
		"root unchanged":    packed(t, tar.FormatPAX, plain("f", 1)),
		"dots":              packed(t, tar.FormatPAX, dir("a", 0o755), plain("a/../b", 1), plain("./c/./d", 1), plain("/e", 1)),
		"links":             packed(t, tar.FormatPAX, dir("d", 0o755), link("abs", "/d"), link("up", "../../../../d"), link("loop", "loop"), plain("abs/f", 1), plain("up/g", 2), link("chain", "abs"), dir("chain/sub", 0o755), plain("chain/sub/h", 1), hard("far", "chain/sub/h"), link("dangling", "n/o/where"), plain("dangling/i", 1)),
		"whiteouts":         packed(t, tar.FormatPAX, owned(plain("d/.wh.gone", 0), 3, 4), plain("d/.wh..wh..opq", 0), dir("e", 0o755), plain("e/.wh..wh..opq", 7), plain(".wh.top", 5), plain("f/.wh.x", 0), plain(".wh.dir", 0), plain("dir/.wh.below", 0)),
		"whiteouts, linked": packed(t, tar.FormatPAX, plain("d/.wh.a", 0), hard("d/.wh.b", "d/.wh.a"), hard(".wh.c", "of/a/lower/.wh.layer"), link(".wh.g", "x"), dir(".wh.h/", 0o755)),
		"whiteout, then":    packed(t, tar.FormatPAX, plain(".wh.f", 0), plain("f", 3), plain(".wh.d", 0), dir("d", 0o755), plain("d/f", 1)),
		"twice":             packed(t, tar.FormatPAX, plain("f", 10), plain("./f", 3), link("l", "f"), plain("l", 4), link("f", "l"), plain("x", 5), tar.Header{Typeflag: tar.TypeFifo, Name: "x", Mode: 0o600}, plain("y", 1), dir("y", 0o755), dir("d", 0o700), dir("d/", 0o755)),
		"over a directory":  packed(t, tar.FormatPAX, plain("a/b/f", 1), plain("a/b", 2), plain("c/d/f", 3), link("c/d", "../a"), plain("c/d/g", 4), plain("e/f", 5), hard("e", "a/b")),
		"devices":           packed(t, tar.FormatPAX, device("null", tar.TypeChar, 1, 3), device("sda", tar.TypeBlock, 8, 1), device("pipe", tar.TypeFifo, 0, 0), device("big", tar.TypeChar, 300, 70_000), hard("null2", "null")),
		"xattrs":            packed(t, tar.FormatPAX, with(plain("cap", 3), "security.capability", capability, "user.a", "b"), with(dir("d", 0o755), "user.a", ""), with(owned(plain("own", 1), 5, 5), "security.capability", capability), hard("caplink", "cap")),
		"times":             packed(t, tar.FormatPAX, late, early, readLate, plain("read/f", 1), link("read/l", "f")),
		"long":              packed(t, tar.FormatGNU, plain(strings.Repeat("directory/", 30)+"file", 3), link("l", strings.Repeat("x/", 200)), plain(strings.Repeat("n", 255), 1)),
		"odd":               packed(t, tar.FormatGNU, dir("\xff\xfe\n", 0o755), plain("\xff\xfe\n/\x01", 1), plain("\\ \"", 1)),
		"big ids":           packed(t, tar.FormatPAX, owned(plain("f", 1), 1<<31-1, 1<<31-2), owned(plain("g", 1), 1<<32-3, 1)),
		"global":            packed(t, tar.FormatPAX, tar.Header{Typeflag: tar.TypeXGlobalHeader, PAXRecords: map[string]string{"comment": "x"}}, plain("f", 1)),
		"ustar":             packed(t, tar.FormatUSTAR, dir("d", 0o755), plain("d/f", 512), plain(strings.Repeat("p/", 70)+"f", 513)),
		"entry as the dir":  packed(t, tar.FormatPAX, plain("d/f", 1), dir("d", 0o2755), dir("d/e", 0o755), plain("d/e/f", 1)),
	}
}

// made are archives of other programs.
func made(t testing.TB) map[string][]byte {
	t.Helper()
	from := t.TempDir()
	holes := filepath.Join(from, "d/holes")
	err := errors.Join(os.MkdirAll(filepath.Join(from, "d/\xff"), 0o750), os.WriteFile(filepath.Join(from, "d/f"), []byte("text"), 0o4755),
		os.Symlink("f", filepath.Join(from, "d/l")), os.Link(filepath.Join(from, "d/f"), filepath.Join(from, "h")), os.WriteFile(holes, []byte("x"), 0o644), os.Truncate(holes, 3<<20),
		os.WriteFile(filepath.Join(from, strings.Repeat("n", 150)), []byte("long"), 0o644), unix.Mkfifo(filepath.Join(from, "p"), 0o644), os.Chown(filepath.Join(from, "h"), 12, 13))
	if err != nil {
		t.Fatal(err)
	}
	archives := map[string][]byte{}
	for name, args := range map[string][]string{
		"gnu": {"-H", "gnu"}, "oldgnu": {"-H", "oldgnu"}, "posix": {"-H", "posix", "--xattrs"}, "v7": {"-H", "v7", "--exclude=n*"}, "ustar": {"-H", "ustar", "--exclude=n*"},
		"sparse posix": {"-S", "-H", "posix"}, "sparse gnu": {"-S", "-H", "gnu"}, "sparse 0.1": {"-S", "-H", "posix", "--sparse-version=0.1"}, "sparse 0.0": {"-S", "-H", "posix", "--sparse-version=0.0"},
	} {
		out, err := exec.Command("tar", append(append([]string{"-C", from}, args...), "-c", ".")...).Output()
		if len(out) == 0 {
			t.Fatalf("%s: %v", name, err)
		}
		archives["made as "+name] = out
	}
	return archives
}

// Layers become the files that containers/storage makes of them, and their archives can be rebuilt.
func TestLayerAsTheLibraryUnpacksIt(t *testing.T) {
	t.Parallel()
	all := corpus(t)
	for name, archive := range made(t) {
		all[name] = archive
	}
	for name, archive := range all {
		theirs, ours := t.TempDir(), t.TempDir()
		libraryErr := byLibrary(t, theirs, archive)
		got, err := extractTo(t, ours, iotest.HalfReader(bytes.NewReader(archive)), lenient{})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if want := "made as sparse gnu"; libraryErr != nil && name != want { // it knows no such files
			t.Errorf("%s: the library: %v", name, libraryErr)
		}
		if a, b := files(t, theirs), files(t, ours); libraryErr == nil && !slices.Equal(a, b) {
			for i := range max(len(a), len(b)) {
				if i >= len(a) || i >= len(b) || a[i] != b[i] {
					t.Errorf("%s:\n%s\nis for the library\n%s", name, strings.Join(b[min(i, len(b)):], "\n"), strings.Join(a[min(i, len(a)):], "\n"))
					break
				}
			}
		}
		if got.Size != int64(len(archive)) {
			t.Errorf("%s: size %d, want %d", name, got.Size, len(archive))
		}
		if (len(got.Implied) == 0 || !got.Implied[0].implied) != (name == "root" || strings.HasPrefix(name, "made")) {
			t.Errorf("%s: has an entry for its root: %t", name, len(got.Implied) == 0)
		}
		if !strings.Contains(name, "sparse") && name != "twice" && name != "over a directory" && name != "whiteouts" && !bytes.Equal(got.rebuilt(t), archive) {
			t.Errorf("%s: cannot be rebuilt", name)
		}
	}
}
