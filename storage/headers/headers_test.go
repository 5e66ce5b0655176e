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

// samples are archives of each format.
func samples(t testing.TB) [][]byte {
	long := strings.Repeat("directory/", 30) + "file"
	return [][]byte{
		archive(t, tar.FormatUSTAR, &tar.Header{Name: "a", Size: 1}, &tar.Header{Name: "d/", Typeflag: tar.TypeDir}, &tar.Header{Name: "d/b", Size: 512}),
		archive(t, tar.FormatPAX, &tar.Header{Name: long, Size: 700, Uid: 1 << 30, PAXRecords: attributes("trusted.overlay.opaque", "y", "user.a", "b")},
			&tar.Header{Name: "\xff\xfe", Typeflag: tar.TypeSymlink, Linkname: long}),
		archive(t, tar.FormatGNU, &tar.Header{Name: long, Size: 3, Uid: 1 << 30}, &tar.Header{Name: "l", Typeflag: tar.TypeLink, Linkname: long}),
		archive(t, tar.FormatPAX, &tar.Header{Typeflag: tar.TypeXGlobalHeader, Name: "g", PAXRecords: attributes("trusted.a", "b")}, &tar.Header{Name: "a", Size: 513}),
		nil, make([]byte, 100), make([]byte, 512), make([]byte, 4096), []byte(strings.Repeat("no tar", 300)),
	}
}

// same fails the test if archive/tar finds other entries in an archive that was passed on than
// in the original, apart from attributes that were dropped.
func same(t *testing.T, original []byte) {
	t.Helper()
	names := 0
	r := NewReader(iotest.OneByteReader(bytes.NewReader(original)), func(*Entry) error { names++; return nil },
		func(_ byte, xattr string) bool { return strings.HasPrefix(xattr, "trusted.") })
	passed, err := io.ReadAll(r)
	if err == nil && len(passed) != len(original) {
		t.Fatalf("%d bytes became %d", len(original), len(passed))
	}
	want, got := tar.NewReader(bytes.NewReader(original)), tar.NewReader(bytes.NewReader(passed))
	for {
		a, aErr := want.Next()
		b, bErr := got.Next()
		if err != nil && bErr != nil {
			return // was refused here
		}
		if (aErr == nil) != (bErr == nil) {
			t.Fatalf("archive/tar: %v, and behind the reader: %v", aErr, bErr)
		}
		if aErr != nil {
			return
		}
		if a.Typeflag != tar.TypeXGlobalHeader {
			names--
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
		if a.Name != b.Name || a.Size != b.Size || a.Uid != b.Uid || a.Linkname != b.Linkname || !maps.Equal(a.PAXRecords, b.PAXRecords) {
			t.Fatalf("%+v became %+v", a, b)
		}
		x, xErr := io.ReadAll(io.LimitReader(want, 1<<20))
		y, yErr := io.ReadAll(io.LimitReader(got, 1<<20))
		if err == nil && ((xErr == nil) != (yErr == nil) || !bytes.Equal(x, y)) {
			t.Fatalf("%q: content differs: %v, %v", a.Name, xErr, yErr)
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
		said = append(said, fmt.Sprintf("%c %q %q %d %d", e.Type, e.Names, e.Links, e.UIDs, e.GIDs))
		return nil
	}
	for _, s := range samples(t)[:4] {
		if _, err := io.Copy(io.Discard, NewReader(bytes.NewReader(s), see, nil)); err != nil {
			t.Error(err)
		}
	}
	all := strings.Join(said, "\n")
	for _, want := range []string{`0 ["a"] [""] [0] [0]`, `5 ["d/"]`, "1073741824", "directory/directory/directory", `\xff\xfe`, "1 ["} {
		if !strings.Contains(all, want) {
			t.Errorf("%s is missing in:\n%s", want, all)
		}
	}
	if len(said) != 8 {
		t.Errorf("%d entries:\n%s", len(said), all)
	}
}

// An entry that is refused does not pass, and those before it do.
func TestRefusedEntryDoesNotPass(t *testing.T) {
	t.Parallel()
	refusal := errors.New("refused")
	s := archive(t, tar.FormatPAX, &tar.Header{Name: "a", Size: 600}, &tar.Header{Name: "b", Size: 600})
	r := NewReader(bytes.NewReader(s), func(e *Entry) error {
		if slices.ContainsFunc(e.Names, func(n []byte) bool { return string(n) == "b" }) {
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
