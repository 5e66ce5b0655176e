package extract

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	tarsplit "github.com/vbatts/tar-split/tar/storage"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

const blockSize = 512

// header is an entry of an archive that archive/tar does not write.
func header(name string, kind byte, content string) []byte {
	all := make([]byte, blockSize, 2*blockSize+len(content))
	copy(all, name)
	copy(all[100:], "0000755\x000000000\x000000000\x00")
	copy(all[124:], fmt.Sprintf("%011o\x0000000000000\x00", len(content)))
	all[156] = kind
	copy(all[257:], "ustar\x0000")
	seal(all)
	all = append(all, content...)
	return append(all, make([]byte, -len(content)&(blockSize-1))...)
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

// watch notes what is checked, and refuses the entry called refuse.
type watch struct {
	names  []string
	holes  int64
	refuse string
}

var errRefused = errors.New("refused")

func (w *watch) Entry(h *tar.Header) error {
	w.names = append(w.names, h.Name)
	if h.Name == w.refuse {
		return errRefused
	}
	return nil
}

func (w *watch) Implied(int) error { return nil }

func (w *watch) Holes(bytes int64) error {
	w.holes += bytes
	return nil
}

// Archives that cannot be unpacked are refused as such, whatever else may be wrong; errors of
// their content stay what they are.
func TestArchivesThatAreRefused(t *testing.T) {
	t.Parallel()
	good := packed(t, tar.FormatPAX, dir("d", 0o755), plain("d/f", 600))
	var long [][]byte
	for range 10 {
		long = append(long, header("p", tar.TypeXHeader, pax("comment", strings.Repeat("x", 1000_000))))
	}
	cut := errors.New("cut")
	for name, test := range map[string]struct {
		content io.Reader
		says    string
		want    error
	}{
		"no tar":                {strings.NewReader(strings.Repeat("no tar ", 300)), "no tar archive", fault.Invalid},
		"half a block":          {bytes.NewReader(make([]byte, 700)), "no tar archive", fault.Invalid},
		"cut header":            {bytes.NewReader(good[:700]), "no tar archive", fault.Invalid},
		"cut content":           {bytes.NewReader(good[:2*blockSize+100]), "no tar archive", fault.Invalid},
		"content that fails":    {io.MultiReader(bytes.NewReader(good[:2*blockSize+100]), failing{cut}), "cut", cut},
		"headers that fail":     {failing{cut}, "cut", cut},
		"padding that fails":    {io.MultiReader(bytes.NewReader(good), failing{cut}), "cut", cut},
		"headers without end":   {bytes.NewReader(slices.Concat(long...)), "headers of an entry", fault.Invalid},
		"unknown type":          {bytes.NewReader(crafted(header("f", 'Z', ""))), "unknown type", fault.Invalid},
		"file with files":       {bytes.NewReader(packed(t, tar.FormatPAX, plain("f", 1), plain("f/g", 1))), "no directory", fault.Invalid},
		"file in a new file":    {bytes.NewReader(packed(t, tar.FormatPAX, plain("d/f", 1), plain("d", 1), plain("d/g", 1))), "no directory", fault.Invalid},
		"link to a directory":   {bytes.NewReader(packed(t, tar.FormatPAX, dir("d", 0o755), hard("h", "d"))), "hard link to the directory", fault.Invalid},
		"link to its own place": {bytes.NewReader(packed(t, tar.FormatPAX, plain("d/f", 1), hard("d", "d/f"))), "hard link to", fault.Invalid},
		"name that is too long": {bytes.NewReader(packed(t, tar.FormatPAX, plain(strings.Repeat("n", 256), 1))), "does not allow", fault.Invalid},
		"large attribute":       {bytes.NewReader(packed(t, tar.FormatPAX, with(plain("f", 1), "user.a", strings.Repeat("x", 1<<16+1)))), "does not allow", fault.Invalid},
		"bad capabilities":      {bytes.NewReader(packed(t, tar.FormatPAX, with(plain("f", 1), "security.capability", "x"))), "does not allow", fault.Invalid},
		"link to nothing":       {bytes.NewReader(packed(t, tar.FormatPAX, link("l", ""))), "without a target", fault.Invalid},
		"missing target":        {bytes.NewReader(packed(t, tar.FormatPAX, hard("h", "nothing"))), "hard link to", fault.Invalid},
		"whiteout of ..":        {bytes.NewReader(packed(t, tar.FormatPAX, plain("d/.wh...", 0))), "hides no file", fault.Invalid},
		"sparse with a bad map": {bytes.NewReader(crafted(header("p", tar.TypeXHeader, sparse(-1)), header("f", '0', ""))), "no tar archive", fault.Invalid},
	} {
		if _, err := extractTo(t, t.TempDir(), test.content, lenient{}); !errors.Is(err, test.want) || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
	w := &watch{refuse: "d/f"}
	u, err := extractTo(t, t.TempDir(), bytes.NewReader(good), w)
	if _, statErr := os.Lstat(filepath.Join(u.dir, "d/f")); !errors.Is(err, errRefused) || !os.IsNotExist(statErr) {
		t.Errorf("refused by the check: %v, and its file: %v", err, statErr)
	}
}

type failing struct{ error }

func (f failing) Read([]byte) (int, error) { return 0, f.error }

// Neither names nor links of any kind lead out of the directory, and nothing outside changes.
func TestNothingLeadsOut(t *testing.T) {
	t.Parallel()
	for name, entries := range map[string][]tar.Header{
		"name":             {plain("../../../../../../../../../../../../OUTSIDE", 1)},
		"link":             {link("l", "/OUTSIDE"), plain("l/secret", 1)},
		"link upwards":     {link("l", "../../../../../../../../../../../../../OUTSIDE"), plain("l/secret", 1), dir("l", 0o777)},
		"link to the file": {link("l", "/OUTSIDE/secret"), plain("l", 1)},
		"hard link":        {hard("h", "/OUTSIDE/secret")},
		"hard link behind": {link("l", "/OUTSIDE"), hard("h", "l/secret")},
		"mode":             {link("l", "/OUTSIDE"), dir("l/", 0o777)},
		"whiteout":         {link("l", "/OUTSIDE"), plain("l/.wh.secret", 0), plain("l/.wh..wh..opq", 0)},
		"proc":             {link("l", "/proc/self/cwd/../../../OUTSIDE"), plain("l/secret", 1)},
	} {
		outside, inside := t.TempDir(), t.TempDir()
		secret := filepath.Join(outside, "secret")
		err := os.WriteFile(secret, []byte("untouched"), 0o600)
		if err == nil { // reading it must not change its times
			err = os.Chtimes(secret, time.Now().Add(time.Hour), time.Unix(1e9, 0))
		}
		if err != nil {
			t.Fatal(err)
		}
		_ = files(t, outside) // the first read changes the time of access
		before := files(t, outside)
		for i := range entries {
			for _, field := range []*string{&entries[i].Name, &entries[i].Linkname} {
				*field = strings.ReplaceAll(*field, "/OUTSIDE", outside)
			}
		}
		u, err := extractTo(t, inside, bytes.NewReader(packed(t, tar.FormatPAX, entries...)), lenient{})
		if err != nil && !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
		if after := files(t, outside); !slices.Equal(before, after) {
			t.Errorf("%s: outside %q became %q", name, before, after)
		}
		for _, line := range files(t, u.dir) {
			if strings.Contains(line, "untouched") {
				t.Errorf("%s: it has the file from outside: %s", name, line)
			}
		}
	}
}

// What a layer says twice, and what it hides and has, is what it says last, or has.
func TestLastEntryWins(t *testing.T) {
	t.Parallel()
	u, err := extractTo(t, t.TempDir(), bytes.NewReader(packed(t, tar.FormatPAX,
		plain("f", 10), plain("./f", 2), plain("w", 3), plain(".wh.w", 0), plain(".wh.w", 0), plain(".wh.v", 0), plain(".wh.v", 0), dir("d", 0o700), plain("d/f", 1), plain("d/.wh..wh..opq", 0), plain("d/.wh..wh..opq", 0),
		plain(".wh.d", 0), link("l", "d"), link("l", "e"), dir("d", 0o711),
	)), lenient{})
	if err != nil {
		t.Fatal(err)
	}
	all := strings.Join(files(t, u.dir), "\n")
	for _, want := range []string{`"f" 100644 0:0 0 {1000000001 0}`, `"w" 100644`, "3 bytes", `"v" 20000`, `"d" 40711`, "trusted.overlay.opaque=y", `"l" 120777`, `1 bytes "e"`} {
		if !strings.Contains(all, want) {
			t.Errorf("%s is missing in:\n%s", want, all)
		}
	}
}

// A directory of the layer is replaced by what a later entry makes of its path, whatever was in it,
// and what is behind a new link keeps its own attributes.
func TestLastEntryReplacesDirectory(t *testing.T) {
	t.Parallel()
	at := func(h tar.Header, seconds int64) tar.Header {
		h.ModTime = time.Unix(seconds, 0)
		return h
	}
	u, err := extractTo(t, t.TempDir(), bytes.NewReader(packed(t, tar.FormatPAX,
		dir("file", 0o755), dir("file/sub", 0o700), plain("file/sub/x", 1), plain("file", 2),
		plain("implied/a/b/x", 1), plain("implied/a", 3),
		at(dir("target", 0o711), 1_100_000_000), at(dir("target/sub", 0o711), 1_100_000_001),
		at(dir("link", 0o755), 1_200_000_000), at(dir("link/sub", 0o755), 1_200_000_000), plain("link/sub/x", 1), link("link", "target"), plain("link/y", 4),
		plain("one", 5), dir("hard", 0o755), plain("hard/x", 1), hard("hard", "one"),
		dir("pipe", 0o755), plain("pipe/.wh..wh..opq", 0), device("pipe", tar.TypeFifo, 0, 0), dir("pipe", 0o750), plain("pipe/z", 6),
		at(dir("again", 0o755), 1_200_000_000), link("again", "target"), plain("again", 7), at(dir("again", 0o701), 1_300_000_000), plain("again/f", 8),
	)), lenient{})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, line := range files(t, u.dir) {
		got = append(got, strings.Join(strings.Fields(line)[:2], " "))
	}
	want := []string{
		`"." 40755`, `"again" 40701`, `"again/f" 100644`, `"file" 100644`, `"hard" 100640`, `"implied" 40755`, `"implied/a" 100644`, `"link" 120777`,
		`"one" 100640`, `"pipe" 40750`, `"pipe/z" 100644`, `"target" 40711`, `"target/sub" 40711`, `"target/y" 100644`,
	}
	got[0] = want[0] // the directory of the test
	if !slices.Equal(got, want) {
		t.Errorf("%q, want\n%q", got, want)
	}
	for name, seconds := range map[string]int64{"target": 1_100_000_000, "target/sub": 1_100_000_001, "again": 1_300_000_000} {
		if info, err := os.Stat(filepath.Join(u.dir, name)); err != nil || info.ModTime().Unix() != seconds {
			t.Errorf("%s: %v, %v", name, info.ModTime(), err)
		}
	}
	if got := xattrs(t, filepath.Join(u.dir, "pipe")); slices.Contains(got, "trusted.overlay.opaque=y") {
		t.Errorf("the new directory has %q of the old one", got)
	}
}

// Entries that make something else of the root are left out: it is a directory.
func TestRootStaysDirectory(t *testing.T) {
	t.Parallel()
	for name, entry := range map[string][]byte{
		"file": header("./", '0', "content"), "file without a name": header("", '0', "content"), "link": header("/", '2', ""), "hard link": header("a/..", '1', ""), "pipe": header(".", '6', ""),
	} {
		u, err := extractTo(t, t.TempDir(), bytes.NewReader(crafted(entry, header("f", '0', "x"))), lenient{})
		if err != nil || len(u.Implied) != 1 {
			t.Errorf("%s: %v, implied %v", name, err, u.Implied)
			continue
		}
		if all := files(t, u.dir); len(all) != 2 || !strings.HasPrefix(all[1], `"f" 100755`) {
			t.Errorf("%s: %q", name, all)
		}
	}
}

// Attributes by which overlayfs would show something else, and those that the kernel does not
// accept, are left out.
func TestUnwantedAttributes(t *testing.T) {
	t.Parallel()
	u, err := extractTo(t, t.TempDir(), bytes.NewReader(packed(t, tar.FormatPAX,
		with(dir("d", 0o755), "trusted.overlay.redirect", "/", "user.a", "b", "security.selinux", "x"), with(plain("f", 1), "trusted.a", "b", "user.a", "b"),
		with(link("l", "f"), "user.a", "b"), with(hard("h", "l"), "user.a", "b"), with(device("p", tar.TypeFifo, 0, 0), "user.a", "b"),
	)), lenient{})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string][]string{"d": {"user.a=b"}, "f": {"user.a=b"}, "l": nil, "h": nil, "p": nil} {
		got := slices.DeleteFunc(xattrs(t, filepath.Join(u.dir, name)), func(x string) bool { return strings.HasPrefix(x, "security.") && !strings.HasSuffix(x, "=x") })
		if !slices.Equal(got, want) {
			t.Errorf("%s has %q", name, got)
		}
	}
}

// A record can hide nothing: what is checked is what is made.
func TestWhatIsCheckedIsMade(t *testing.T) {
	t.Parallel()
	const whole = 310 // a parser that reads only 20 digits of a length takes this record for a shorter one
	records := pax("path", "other") + pax("uid", "7")
	first := "000000000000000000310 k=abcdef\n"
	second := fmt.Sprintf("%d j=", whole+len(records)-len(first))
	hidden := first + second + strings.Repeat("z", whole-1-len(first)-len(second)) + "\n" + records
	oldDirectory := header("old/", 0, "")
	copy(oldDirectory[124:], "00000010000\x00") // its size, which means nothing
	seal(oldDirectory)
	w := &watch{}
	u, err := extractTo(t, t.TempDir(), bytes.NewReader(crafted(
		header("p", tar.TypeXHeader, hidden), header("f", '0', "x"), oldDirectory, header("old/f", '0', "y"),
		header("g", tar.TypeXGlobalHeader, pax("uid", "x")), header("p", tar.TypeXHeader, sparse(1000)), header("holes", '0', ""),
	)), w)
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"other", "old/", "old/f", "g", "holes"}; !slices.Equal(w.names, want) || w.holes != 1000 {
		t.Errorf("checked %q, and %d bytes of holes", w.names, w.holes)
	}
	var names []string
	for _, line := range files(t, u.dir) {
		names = append(names, strings.Fields(line)[0])
	}
	if want := []string{`"."`, `"holes"`, `"old"`, `"old/f"`, `"other"`}; !slices.Equal(names, want) {
		t.Errorf("made %q", names)
	}
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(u.dir, "other"), &st); err != nil || st.Uid != 7 {
		t.Errorf("owner %d, %v", st.Uid, err)
	}
}

// Whatever an archive has, it ends, changes nothing outside, and what was written down of an
// accepted one has all of its bytes.
func FuzzLayer(f *testing.F) {
	for _, s := range corpus(f) {
		f.Add(s, 124, byte('7'), true)
		f.Add(s, 156, byte('S'), false)
	}
	f.Add(crafted(header("p", tar.TypeXHeader, sparse(1000)), header("f", '0', "")), 0, byte('f'), true)
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
		outside := t.TempDir()
		inside := filepath.Join(outside, "layer")
		if err := os.Mkdir(inside, 0o755); err != nil {
			t.Fatal(err)
		}
		w := &bounded{}
		u, err := extractTo(t, inside, bytes.NewReader(s), w)
		if left, readErr := os.ReadDir(outside); readErr != nil || len(left) != 1 {
			t.Fatalf("outside are %v, %v", left, readErr)
		}
		if err != nil || w.holes > 0 {
			return
		}
		total := int64(0)
		for from := json.NewDecoder(bytes.NewReader(u.split.Bytes())); ; {
			var e tarsplit.Entry
			if err := from.Decode(&e); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			total += e.Size
			if e.Type == tarsplit.SegmentType {
				total += int64(len(e.Payload))
			}
		}
		if total != int64(len(s)) || u.Size != int64(len(s)) {
			t.Fatalf("%d bytes were written down, and %d counted, of %d", total, u.Size, len(s))
		}
	})
}

// bounded refuses more holes than a test has room for.
type bounded struct{ watch }

func (b *bounded) Holes(bytes int64) error {
	if b.holes += bytes; b.holes > 1<<20 {
		return errRefused
	}
	return nil
}
