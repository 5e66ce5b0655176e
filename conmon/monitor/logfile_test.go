package monitor

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// A write refused in the middle of a record: whatever the place, rotation leaves
// whole records in both files, all of them and each once.
func TestNoTornRecord(t *testing.T) {
	t.Parallel()
	const records = "first record\nsecond\n\nlast one\n"
	for written := range len(records) {
		path := filepath.Join(t.TempDir(), "log")
		l := logFile{records: make([]byte, 0, 4096)}
		if err := l.open(path); err != nil {
			t.Fatal(err)
		}
		const earlier = "from earlier\n"
		if _, err := syscall.Write(l.fd, []byte(earlier+records[:written])); err != nil {
			t.Fatal(err)
		}
		l.records, l.done, l.err = append(l.records, records...), written, syscall.ENOSPC

		old := path + ".1"
		if err := os.Rename(path, old); err != nil {
			t.Fatal(err)
		}
		if err := l.reopen(); err != nil || l.blocked() || !l.empty() {
			t.Errorf("reopen: %v, blocked: %v, empty: %v", err, l.blocked(), l.empty())
		}
		one, two := read(t, old), read(t, path)
		if one+two != earlier+records || !strings.HasSuffix(one, "\n") {
			t.Errorf("after %d bytes: %q and %q", written, one, two)
		}
		syscall.Close(l.fd)
	}
}

// The old file may have been cut by somebody else, who wanted room.
func TestTornRecordGone(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "log")
	l := logFile{records: make([]byte, 0, 4096)}
	if err := l.open(path); err != nil {
		t.Fatal(err)
	}
	defer func() { syscall.Close(l.fd) }()
	l.records, l.done, l.err = append(l.records, "a record\n"...), 5, syscall.ENOSPC
	if err := l.reopen(); err != nil {
		t.Error(err)
	}
	if got := read(t, path); got != "a record\n" {
		t.Errorf("%q", got)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestLogMode(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "log")
	l := logFile{}
	if err := l.open(path); err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(l.fd)
	st, err := os.Stat(path)
	if err != nil || st.Mode() != 0o640 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	flags, _, errno := syscall.Syscall(syscall.SYS_FCNTL, uintptr(l.fd), syscall.F_GETFL, 0)
	if errno != 0 || flags&syscall.O_APPEND == 0 {
		t.Errorf("flags %#x, %v", flags, errno)
	}
}
