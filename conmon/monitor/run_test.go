package monitor

import (
	"errors"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"github.com/crius-run/crius/conmon/wire"
)

func TestReadWords(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "words")
	for text, want := range map[string][]string{
		"":                    {},
		"a\x00":               {"a"},
		"a\x00\x00b c\x00":    {"a", "", "b c"},
		"unended":             {"unended"},
		"\x00":                {""},
		"--log-file=/a=b\x00": {"--log-file=/a=b"},
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		one, other, err := readWords(path, path)
		if err != nil || !slices.Equal(one, want) || !slices.Equal(other, want) {
			t.Errorf("%q: %q and %q, %v", text, one, other, err)
		}
	}
	for size, want := range map[int]error{32<<10 - 1: nil, 32 << 10: nil, 64 << 10: nil, 1 << 20: nil, 2 << 20: syscall.E2BIG, 4 << 20: syscall.E2BIG} {
		text := strings.Repeat("x", size-2) + "\x00\x00"
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		one, other, err := readWords(path, path)
		if !errors.Is(err, want) || err == nil && (len(one) != 2 || !slices.Equal(one, other) || other[0] != text[:size-2]) {
			t.Errorf("%d bytes: %d and %d words, %v, want %v", size, len(one), len(other), err, want)
		}
	}
	if _, _, err := readWords(path, path+"-not"); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("a missing file: %v", err)
	}
}

func TestCommandLine(t *testing.T) {
	for _, own := range wire.Environ() {
		name, value, _ := strings.Cut(own, "=")
		t.Setenv(name, value) // too late for /proc/self/environ, which is what counts
	}
	args, env, err := commandLine("/proc/self/environ")
	if err != nil || !slices.Equal(args, os.Args[1:]) || len(env) == 0 {
		t.Errorf("%q, %q, %v", args, env, err)
	}
	if got := without([]string{"GOGC=off", "A=1", "GOGC=off", "GOGC=offset"}, "GOGC=off"); !slices.Equal(got, []string{"A=1", "GOGC=offset"}) {
		t.Errorf("%q", got)
	}
}

func TestMakeDir(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := dir + "/file"
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]error{
		dir:              nil,
		dir + "/a/b/c":   nil,
		dir + "//d//e//": nil,
		file:             nil,
		file + "/below":  syscall.ENOTDIR,
		"/proc/no/such":  syscall.ENOENT,
	} {
		for range 2 {
			if err := makeDir(path); !errors.Is(err, want) {
				t.Errorf("%s: %v, want %v", path, err, want)
			}
		}
		if _, err := os.Stat(path); want == nil && err != nil {
			t.Error(err)
		}
	}
}

func TestPrintable(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"":                         "",
		" \r\n\t ":                 "",
		"\n a reason\nin two \r\n": "a reason\nin two",
		"\xff\xfe":                 "\uFFFD\uFFFD",
		"caf\xc3\xa9 \xc3":         "café \uFFFD",
	} {
		if got := printable([]byte(text)); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

// Pages are given back, and only those that are wholly in the slice.
func TestDiscard(t *testing.T) {
	t.Parallel()
	b := make([]byte, 4*os.Getpagesize())
	for i := range b {
		b[i] = 1
	}
	inner := b[10 : len(b)-10]
	discard(inner)
	if b[0] != 1 || b[9] != 1 || b[len(b)-1] != 1 || b[len(b)-10] != 1 {
		t.Error("bytes outside are gone")
	}
	if slices.Index(inner, 0) < 0 {
		t.Error("nothing was given back")
	}
	discard(nil)
	discard(b[:1])
	discard(b[1:2])
}

// What a deep call has left in the stack is given back.
func TestTrimStack(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // a collection may move the stack
	growStack(false)
	low := soilStack()
	if !resident(t, low) {
		t.Fatal("the stack has no page where it was written to")
	}
	trimStack()
	if resident(t, low) {
		t.Error("the page is still there")
	}
}

// soilStack writes to the stack beneath the caller, and tells where.
//
//go:noinline
func soilStack() uintptr {
	var room [16 << 10]byte
	for i := range room {
		room[i] = byte(i) | 1
	}
	page := uintptr(os.Getpagesize())
	return (uintptr(unsafe.Pointer(&room)) + page - 1) / page * page
}

// resident tells whether a page is in memory.
func resident(t *testing.T, address uintptr) bool {
	t.Helper()
	fd, err := syscall.Open("/proc/self/pagemap", syscall.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)
	var entry [8]byte
	if _, err := syscall.Pread(fd, entry[:], int64(address)/int64(os.Getpagesize())*8); err != nil {
		t.Fatal(err)
	}
	return entry[7]&0x80 != 0
}

func TestCloseInheritedByListing(t *testing.T) {
	t.Parallel()
	numbers, err := numbersIn("/proc/self/fd")
	if err != nil || !slices.Contains(numbers, 0) || !slices.Contains(numbers, 2) {
		t.Errorf("%v, %v", numbers, err)
	}
	pids, err := numbersIn("/proc")
	if err != nil || !slices.Contains(pids, os.Getpid()) || !slices.Contains(pids, 1) {
		t.Errorf("%v, %v", pids, err)
	}
	if _, err := numbersIn("/no/such"); err == nil {
		t.Error("no error")
	}
}
