package headers

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	tarsplit "github.com/vbatts/tar-split/archive/tar"
)

// archive writes entries with contents.
func archive(t testing.TB, format tar.Format, entries ...*tar.Header) []byte {
	t.Helper()
	var all bytes.Buffer
	w := tar.NewWriter(&all)
	for _, h := range entries {
		h.Format = format
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(bytes.Repeat([]byte("x"), int(h.Size))); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return all.Bytes()
}

func attributes(pairs ...string) map[string]string {
	records := map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		records[xattrPrefix+pairs[i]] = pairs[i+1]
	}
	return records
}

// header is one with content, of a regular archive.
func header(name string, kind byte, content string) []byte {
	all := make([]byte, blockSize, 2*blockSize+len(content))
	copy(all, name)
	copy(all[100:], "0000755\x000000000\x000000000\x00")
	copy(all[124:], fmt.Sprintf("%011o\x0000000000000\x00", len(content)))
	all[156] = kind
	copy(all[257:], "ustar\x0000")
	seal(all)
	all = append(all, content...)
	return append(all, make([]byte, padding(int64(len(content))))...)
}

// crafted is an archive of entries that archive/tar would not write.
func crafted(entries ...[]byte) []byte {
	return append(slices.Concat(entries...), make([]byte, 2*blockSize)...)
}

// pax is a record.
func pax(key, value string) string {
	length := len(key) + len(value) + 3
	for digits := 1; ; digits++ {
		if text := fmt.Sprint(length + digits); len(text) == digits {
			return text + " " + key + "=" + value + "\n"
		}
	}
}

// sparse is the records of a file that is a hole.
func sparse(size int64) string {
	return pax("GNU.sparse.major", "0") + pax("GNU.sparse.minor", "1") + pax("GNU.sparse.numblocks", "0") + pax("GNU.sparse.size", fmt.Sprint(size))
}

// hidden returns records behind one with a length of 21 digits. A parser that reads only 20 of them
// takes that record for a shorter one, and the records for the content of a second one.
func hidden(records string) string {
	const whole = 310
	first := "000000000000000000310 k=abcdef\n"
	second := fmt.Sprintf("%d j=", whole+len(records)-len(first))
	return first + second + strings.Repeat("z", whole-1-len(first)-len(second)) + "\n" + records
}

// samples are archives of each format.
func samples(t testing.TB) [][]byte {
	long := strings.Repeat("directory/", 30) + "file"
	return [][]byte{
		archive(t, tar.FormatUSTAR, &tar.Header{Name: "a", Size: 1}, &tar.Header{Name: "d/", Typeflag: tar.TypeDir}, &tar.Header{Name: "d/b", Size: 512}),
		archive(t, tar.FormatPAX, &tar.Header{Name: long, Size: 700, Uid: 1 << 30, PAXRecords: attributes("trusted.overlay.opaque", "y", "user.a", "b")},
			&tar.Header{Name: "\xff\xfe", Typeflag: tar.TypeSymlink, Linkname: long}),
		archive(t, tar.FormatGNU, &tar.Header{Name: long, Size: 3, Uid: 1 << 30}, &tar.Header{Name: "l", Typeflag: tar.TypeLink, Linkname: long}),
		archive(t, tar.FormatPAX, &tar.Header{Typeflag: tar.TypeXGlobalHeader, Name: "g", PAXRecords: attributes("trusted.a", "b")}, &tar.Header{Name: "a", Size: 513}),
		crafted(header("p", typePAX, hidden(pax("path", "other")+pax(xattrPrefix+"trusted.a", "b")+pax("uid", "7"))), header("f", '0', "")),
		crafted(header("p", typePAX, pax("uid", "7")), header("g", typeGlobal, pax("path", "g/lobal/path")), header("f", '0', "")),
		crafted(header("p", typePAX, sparse(1000)), header("f", '0', "")),
		crafted(header("p", typePAX, pax("GNU.sparse.major", "1")+pax("GNU.sparse.minor", "0")+pax("GNU.sparse.realsize", "1000")), header("f", '0', "1\n0\n3\n"+strings.Repeat("\x00", 506)+"abc")),
		nil, make([]byte, 100), make([]byte, 512), make([]byte, 4096), []byte(strings.Repeat("no tar", 300)),
	}
}

// shown returns the part of archive/tar's result for an entry that matters.
func shown(h *tar.Header) string {
	return fmt.Sprintf("%q %q %q %d %d %d", h.Typeflag, h.Name, h.Linkname, h.Uid, h.Gid, h.Size)
}

// same fails the test if archive/tar finds other entries in an archive that was passed on than
// in the original, apart from attributes that were dropped, or others than were shown. So it
// does if tar-split finds others, which keeps layers.
func same(t *testing.T, original []byte) {
	t.Helper()
	var seen []string
	r := NewReader(iotest.OneByteReader(bytes.NewReader(original)), func(e *Entry) error { seen = append(seen, shown(e.Header)); return nil },
		func(_ byte, xattr string) bool { return strings.HasPrefix(xattr, "trusted.") })
	passed, err := io.ReadAll(r)
	if err == nil && len(passed) != len(original) {
		t.Fatalf("%d bytes became %d", len(original), len(passed))
	}
	want, got, split := tar.NewReader(bytes.NewReader(original)), tar.NewReader(bytes.NewReader(passed)), tarsplit.NewReader(bytes.NewReader(passed))
	split.RawAccounting = true
	for {
		a, aErr := want.Next()
		b, bErr := got.Next()
		c, cErr := split.Next()
		if err != nil && bErr != nil {
			return // was refused here
		}
		if (aErr == nil) != (bErr == nil) || (aErr == nil) != (cErr == nil) {
			t.Fatalf("archive/tar: %v, and behind the reader: %v, and tar-split: %v", aErr, bErr, cErr)
		}
		if errors.Is(aErr, io.EOF) && err == nil && len(seen) > 0 {
			t.Fatalf("%q were shown, and are none", seen)
		}
		if aErr != nil {
			return
		}
		if len(seen) == 0 || seen[0] != shown(a) || seen[0] != shown(b) {
			t.Fatalf("%s and %s, and %q were shown", shown(a), shown(b), seen)
		}
		seen = seen[1:]
		if a.Name != c.Name || a.Linkname != c.Linkname || a.Size != c.Size || a.Uid != c.Uid || a.Gid != c.Gid || a.Typeflag != c.Typeflag {
			t.Fatalf("%+v is for tar-split %+v", a, c)
		}
		for key := range b.PAXRecords {
			if strings.HasPrefix(key, xattrPrefix+"trusted.") && b.Typeflag != tar.TypeXGlobalHeader {
				t.Fatalf("%q has %q", b.Name, key)
			}
		}
		maps.DeleteFunc(a.PAXRecords, func(key, _ string) bool { return strings.HasPrefix(key, xattrPrefix+"trusted.") })
		maps.DeleteFunc(b.PAXRecords, func(key, _ string) bool {
			return strings.HasPrefix(key, xattrPrefix+"trusted.") || strings.HasPrefix(key, droppedPrefix+"trusted.")
		})
		if !maps.Equal(a.PAXRecords, b.PAXRecords) {
			t.Fatalf("%+v became %+v", a, b)
		}
		x, xErr := io.ReadAll(io.LimitReader(want, 1<<20))
		y, yErr := io.ReadAll(io.LimitReader(got, 1<<20))
		z, zErr := io.ReadAll(io.LimitReader(split, 1<<20))
		if err == nil && ((xErr == nil) != (yErr == nil) || (xErr == nil) != (zErr == nil) || !bytes.Equal(x, y) || !bytes.Equal(x, z)) {
			t.Fatalf("%q: content differs: %v, %v, %v", a.Name, xErr, yErr, zErr)
		}
	}
}

func TestArchiveStaysTheSame(t *testing.T) {
	t.Parallel()
	for _, s := range samples(t) {
		same(t, s)
		same(t, s[:len(s)/2])
	}
}

// archive/tar unpacks layers, so that it must not find an entry where this reader found none.
func FuzzReader(f *testing.F) {
	for _, s := range samples(f) {
		f.Add(s, 124, byte('7'), true)
		f.Add(s, 156, byte('S'), false)
	}
	f.Fuzz(func(t *testing.T, s []byte, at int, value byte, again bool) {
		if len(s) > 1<<16 {
			return
		}
		s = slices.Clone(s)
		if at >= 0 && at < len(s) {
			s[at] = value
		}
		for block := s; again && len(block) >= blockSize; block = block[blockSize:] { // or hardly anything passes
			seal(block[:blockSize])
		}
		same(t, s)
	})
}

// seal gives a block that looks like a header its checksum.
func seal(block []byte) {
	if !bytes.HasPrefix(block[257:], []byte("ustar")) {
		return
	}
	copy(block[148:], "        ")
	sum := 0
	for _, b := range block {
		sum += int(b)
	}
	copy(block[148:], fmt.Sprintf("%06o\x00 ", sum))
}

func TestEntriesAreShown(t *testing.T) {
	t.Parallel()
	var said []string
	see := func(e *Entry) error {
		said = append(said, shown(e.Header))
		return nil
	}
	for _, s := range samples(t)[:4] {
		if _, err := io.Copy(io.Discard, NewReader(bytes.NewReader(s), see, nil)); err != nil {
			t.Error(err)
		}
	}
	all := strings.Join(said, "\n")
	for _, want := range []string{`'0' "a" "" 0 0 1`, `'5' "d/"`, "1073741824", "directory/directory/directory", `\xff\xfe`, "'1'", `'g' "g"`} {
		if !strings.Contains(all, want) {
			t.Errorf("%s is missing in:\n%s", want, all)
		}
	}
	if len(said) != 9 {
		t.Errorf("%d entries:\n%s", len(said), all)
	}
}

// A refused entry is not passed on, and the entries before it are.
func TestRefusedEntryDoesNotPass(t *testing.T) {
	t.Parallel()
	refusal := errors.New("refused")
	s := archive(t, tar.FormatPAX, &tar.Header{Name: "a", Size: 600}, &tar.Header{Name: "b", Size: 600})
	r := NewReader(bytes.NewReader(s), func(e *Entry) error {
		if e.Name == "b" {
			return refusal
		}
		return nil
	}, nil)
	passed, err := io.ReadAll(r)
	if !errors.Is(err, refusal) || len(passed) != 512+1024 {
		t.Errorf("%d bytes passed, %v", len(passed), err)
	}
}

// Programs other than archive/tar write archives, too.
func TestArchivesOfOtherPrograms(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "sparse"), []byte("x"), 0o644), os.Truncate(filepath.Join(dir, "sparse"), 1<<20),
		os.WriteFile(filepath.Join(dir, strings.Repeat("n", 150)), []byte("long"), 0o644)); err != nil {
		t.Fatal(err)
	}
	for _, format := range []string{"oldgnu", "gnu", "posix"} {
		out, err := exec.Command("tar", "-C", dir, "-S", "-H", format, "-c", ".").Output()
		if len(out) == 0 {
			t.Fatal(err)
		}
		same(t, out)
	}
}

// A record can hide nothing from what archive/tar reads.
func TestLengthsWithLeadingZeros(t *testing.T) {
	t.Parallel()
	archive := crafted(header("p", typePAX, hidden(pax("path", "other")+pax("linkpath", "target")+pax("uid", "7")+pax(xattrPrefix+"trusted.a", "b"))), header("f", '5', ""))
	var seen []string
	r := NewReader(bytes.NewReader(archive), func(e *Entry) error { seen = append(seen, shown(e.Header)); return nil },
		func(_ byte, xattr string) bool { return xattr == "trusted.a" })
	passed, err := io.ReadAll(r)
	if err != nil || len(seen) != 1 || seen[0] != `'5' "other" "target" 7 0 0` || bytes.Contains(passed, []byte(xattrPrefix)) {
		t.Errorf("%q, %v", seen, err)
	}
}

func TestGlobalHeadersAreShown(t *testing.T) {
	t.Parallel()
	for records, want := range map[string]string{pax("path", "a/.wh.b"): "a/.wh.b", pax("comment", "c"): "g", "": "g", pax("path", "b") + pax("uid", "x"): ""} {
		var names []string
		archive := crafted(header("g", typeGlobal, records), header("f", '0', ""))
		_, err := io.ReadAll(NewReader(bytes.NewReader(archive), func(e *Entry) error { names = append(names, e.Name); return nil }, nil))
		if want == "" && errors.Is(err, ErrInvalid) {
			continue
		}
		if err != nil || !slices.Equal(names, []string{want, "f"}) {
			t.Errorf("%q: %q, %v", records, names, err)
		}
	}
}

func TestHolesOfSparseFiles(t *testing.T) {
	t.Parallel()
	old := header("f", 'S', "abc")
	copy(old[257:], "ustar  \x00")                    // of GNU
	copy(old[386:], "00000000000\x0000000000003\x00") // of its map
	copy(old[483:], "00000001750\x00")                // its size, 1000
	seal(old[:blockSize])
	version1 := pax("GNU.sparse.major", "1") + pax("GNU.sparse.minor", "0") + pax("GNU.sparse.realsize", "1000")
	for name, test := range map[string]struct {
		entry []byte
		want  int64
	}{
		"PAX 0.1":   {slices.Concat(header("p", typePAX, sparse(1000)), header("f", '0', "")), 1000},
		"PAX 1.0":   {slices.Concat(header("p", typePAX, version1), header("f", '0', "1\n0\n3\n"+strings.Repeat("\x00", 506)+"abc")), 1000 - 515},
		"old":       {old, 997},
		"none":      {header("f", '0', "abc"), 0},
		"directory": {header("d", '5', "")[:blockSize], 0},
	} {
		var holes []int64
		_, err := io.ReadAll(NewReader(bytes.NewReader(crafted(test.entry, header("e", '0', ""))), func(e *Entry) error { holes = append(holes, e.Holes); return nil }, nil))
		if err != nil || !slices.Equal(holes, []int64{test.want, 0}) {
			t.Errorf("%s: %d, %v", name, holes, err)
		}
	}
}

// archive/tar takes an old directory for one without content, whatever size its header says.
func TestOldDirectoryWithSize(t *testing.T) {
	t.Parallel()
	directory := header("dir/", 0, "")
	copy(directory[124:], "00000010000\x00")
	seal(directory)
	var names []string
	s := crafted(directory, header("f", '0', ""))
	if _, err := io.ReadAll(NewReader(bytes.NewReader(s), func(e *Entry) error { names = append(names, e.Name); return nil }, nil)); err != nil || len(names) != 2 {
		t.Errorf("%q, %v", names, err)
	}
	same(t, s)
}
