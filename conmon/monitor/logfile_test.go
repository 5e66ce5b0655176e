package monitor

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
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
		if err := l.open("", path); err != nil {
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
	if err := l.open("", path); err != nil {
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

// Whoever can write where logs are has the log lead nowhere else, when it is opened
// first and when it is opened again (CVE-2025-0750).
func TestLogFollowsNoLink_CVE_2025_0750(t *testing.T) {
	t.Parallel()
	for name, harm := range map[string]func(dir, outside string) error{
		"link for the log": func(dir, outside string) error {
			return os.Symlink(outside+"/c/log", dir+"/c/log")
		},
		"link for the log's directory": func(dir, outside string) error {
			return errors.Join(os.Remove(dir+"/c"), os.Symlink(outside+"/c", dir+"/c"))
		},
		"link for the pod's directory": func(dir, outside string) error {
			return errors.Join(os.RemoveAll(dir), os.Symlink(outside, dir))
		},
		"link that leads nowhere else": func(dir, outside string) error {
			return errors.Join(os.Rename(dir+"/c", dir+"/d"), os.Symlink("d", dir+"/c"))
		},
		"hard link": func(dir, outside string) error { return os.Link(outside+"/c/log", dir+"/c/log") },
		"fifo":      func(dir, _ string) error { return syscall.Mkfifo(dir+"/c/log", 0o600) },
		"directory": func(dir, _ string) error { return os.Mkdir(dir+"/c/log", 0o700) },
	} {
		logs := t.TempDir()
		all, dir, outside := filepath.Join(logs, "all"), filepath.Join(logs, "all", "pod"), filepath.Join(logs, "outside")
		real := filepath.Join(logs, "real")
		err := errors.Join(os.MkdirAll(real+"/pod/c", 0o700), os.Symlink("real", all), // as where all logs are on another disk
			os.MkdirAll(outside+"/c", 0o700), os.WriteFile(outside+"/c/log", []byte("untouched"), 0o600))
		if err != nil {
			t.Fatal(err)
		}
		path := dir + "/c/log"
		l := logFile{records: make([]byte, 0, 4096)}
		if err := l.open(dir, path); err != nil {
			t.Fatalf("%s: before: %v", name, err)
		}
		if err := errors.Join(os.Remove(path), harm(dir, outside)); err != nil {
			t.Fatal(err)
		}
		l.records = append(l.records, "a record\n"...)
		if err := l.reopen(); err == nil {
			t.Errorf("%s: it is opened again", name)
		}
		l.flush()
		if got := read(t, "/proc/self/fd/"+strconv.Itoa(l.fd)); got != "a record\n" {
			t.Errorf("%s: the old file has %q", name, got)
		}
		syscall.Close(l.fd)
		if err := l.open(dir, path); err == nil {
			t.Errorf("%s: it is opened", name)
		}
		if got := read(t, outside+"/c/log"); got != "untouched" {
			t.Errorf("%s: the file outside has %q", name, got)
		}
	}
}

func TestLogIsBelowItsDirectory(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, path := range []string{dir, dir + "x/log", "/log", "log"} {
		l := logFile{}
		if err := l.open(dir, path); err == nil {
			t.Errorf("a log at %s of a pod with its logs in %s is opened", path, dir)
		}
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
	if err := l.open("", path); err != nil {
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
