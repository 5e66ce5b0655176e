package devnull

import (
	"io"
	"os"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

func stat(t *testing.T, f *os.File) (st unix.Stat_t) {
	t.Helper()
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	return st
}

func open(t *testing.T, from func() (*os.File, error)) *os.File {
	t.Helper()
	f, err := from()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func TestOpenReturnsAnInodeOfItsOwn(t *testing.T) {
	var node unix.Stat_t
	if err := unix.Stat(os.DevNull, &node); err != nil {
		t.Fatal(err)
	}
	first, second := open(t, directory.open), open(t, Open)
	for _, f := range []*os.File{first, second} {
		st := stat(t, f)
		if st.Mode != unix.S_IFCHR|0o666 || st.Rdev != node.Rdev || st.Uid != 0 {
			t.Errorf("mode %o, device %x, owner %d", st.Mode, st.Rdev, st.Uid)
		}
		if st.Dev == node.Dev {
			t.Error("it is in the file system of the node's /dev/null")
		}
		if st.Nlink != 0 {
			t.Error("it has a name")
		}
		if n, err := f.Write([]byte("word")); n != 4 || err != nil {
			t.Errorf("writing: %d, %v", n, err)
		}
		if rest, err := io.ReadAll(f); len(rest) > 0 || err != nil {
			t.Errorf("reading: %q, %v", rest, err)
		}
	}
	if err := first.Chmod(0o600); err != nil {
		t.Fatal(err)
	}
	if mode := stat(t, second).Mode; mode != unix.S_IFCHR|0o666 {
		t.Errorf("a change of one changes another, to %o", mode)
	}
	// Like a process that opens /dev/stdin.
	again, err := os.OpenFile("/proc/self/fd/"+strconv.Itoa(int(second.Fd())), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	again.Close()
}

func TestEmptyPipeIsAtItsEnd(t *testing.T) {
	if rest, err := io.ReadAll(open(t, emptyPipe)); len(rest) > 0 || err != nil {
		t.Errorf("reading: %q, %v", rest, err)
	}
}

func BenchmarkOpen(b *testing.B) {
	for b.Loop() {
		f, err := directory.open()
		if err != nil {
			b.Fatal(err)
		}
		f.Close()
	}
}
