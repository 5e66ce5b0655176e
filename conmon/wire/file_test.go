package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestWriteFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	for _, content := range []string{"old and long", "new", "", strings.Repeat("x", 1<<20)} {
		if err := WriteFile(path, []byte(content), true); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != content {
			t.Errorf("%d bytes, %v", len(got), err)
		}
	}
	st, err := os.Stat(path)
	if err != nil || st.Mode() != 0o600 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 1 {
		t.Errorf("left over: %v", entries)
	}
}

// After a failed write the file has its old content, and no other file is left.
func TestWriteFileFails(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	target := filepath.Join(dir, "target")
	path := filepath.Join(dir, "file")
	if err := errors.Join(os.WriteFile(path, []byte("old"), 0o600), os.Symlink(target, path+".tmp")); err != nil {
		t.Fatal(err)
	}
	if err := WriteFile(path, []byte("new"), true); !errors.Is(err, syscall.ELOOP) || !strings.Contains(err.Error(), path) {
		t.Errorf("through a link: %v", err)
	}
	if _, err := os.Stat(target); err == nil {
		t.Error("the link was followed")
	}
	if err := WriteFile(filepath.Join(dir, "missing", "file"), nil, true); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("into nowhere: %v", err)
	}
	if err := os.Mkdir(filepath.Join(dir, "directory"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := WriteFile(filepath.Join(dir, "directory"), nil, false); !errors.Is(err, syscall.EISDIR) && !errors.Is(err, syscall.EEXIST) {
		t.Errorf("onto a directory: %v", err)
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != "old" {
		t.Errorf("%q, %v", got, err)
	}
	if entries, _ := filepath.Glob(dir + "/*.tmp"); entries != nil {
		t.Errorf("left over: %v", entries)
	}
	if got := Parent("file") + Parent("/file") + Parent("/a/file") + Parent("a/b/file"); got != "."+"/"+"/a"+"a/b" {
		t.Error(got)
	}
}

func TestReadFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/file", bytes.Repeat([]byte("0123456789"), 1000), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, room := range []int{0, 1, 9999, 10000, 10001, 50000} {
		got, err := ReadFile(make([]byte, room), dir, "/fi", "le")
		if err != nil || len(got) != min(room, 10000) {
			t.Errorf("%d bytes of %d, %v", len(got), room, err)
		}
	}
	if _, err := ReadFile(make([]byte, 1), dir, "/missing"); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("missing: %v", err)
	}
	if _, err := ReadFile(make([]byte, 1), dir); !errors.Is(err, syscall.EISDIR) {
		t.Errorf("directory: %v", err)
	}
	if _, err := Open(0, 0, strings.Repeat("/x", 3000)); !errors.Is(err, syscall.ENAMETOOLONG) {
		t.Errorf("long path: %v", err)
	}
	fd, err := Open(syscall.O_RDONLY, 0, dir, "/file")
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)
	flags, _, _ := syscall.Syscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_GETFD, 0)
	if flags&syscall.FD_CLOEXEC == 0 {
		t.Error("a descriptor is inherited")
	}
}

func TestStatField(t *testing.T) {
	t.Parallel()
	numbers := " S 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24\n"
	for _, name := range []string{"sh", "a b", ") S 1 2 3", "(((", ")", "", "x\ny"} {
		stat := []byte("17 (" + name + ")" + numbers)
		for field := uint64(4); field < 24; field++ {
			if got, ok := StatField(stat, int(field)); !ok || got != field {
				t.Errorf("%q: field %d is %d, %v", stat, field, got, ok)
			}
		}
	}
	for _, stat := range []string{"", "17", "17 (sh)", "17 (sh) S", "17 (sh) S 4 5", "17 (sh) S 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 x"} {
		if got, ok := StatField([]byte(stat), 22); ok {
			t.Errorf("%q: %d", stat, got)
		}
	}
	self, err := Find(os.Getpid())
	if err != nil || self.PID != os.Getpid() || self.StartTime == 0 {
		t.Errorf("%+v, %v", self, err)
	}
	if _, err := Find(1 << 22); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no process: %v", err)
	}
}

func TestDocuments(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 2, 28, 23, 59, 59, 7, time.UTC)
	e := Exit{Code: 137, Signal: 9, Sec: at.Unix(), Nsec: at.Nanosecond(), OOMKills: 3, OOMSeen: 2, OOMSeenAt: 1_700_000_000}
	want := `{"version":1,"id":"abc","exit_code":137,"signal":9,"finished_at":"2026-02-28T23:59:59.000000007Z","oom_kills":3,"oom_seen":{"kills":2,"at":1700000000}}` + "\n"
	if got := string(e.AppendDocument(nil, "abc")); got != want || !json.Valid([]byte(got)) {
		t.Errorf("%s, want %s", got, want)
	}
	want = strings.TrimSuffix(want, "}\n") + `,"message":"still alive: 5"}` + "\n"
	withMessage := e
	withMessage.Message = "still alive: 5"
	if got := string(withMessage.AppendDocument(nil, "abc")); got != want || !json.Valid([]byte(got)) {
		t.Errorf("%s, want %s", got, want)
	}
	if m := e.Packet(); m.Num != [4]uint64{137, 9, uint64(at.UnixNano()), 3} || m.Verb != Exited {
		t.Errorf("%+v", m)
	}
	want = `{"version":1,"monitor":{"pid":1,"start_time":2},"container":{"pid":3,"start_time":4}}` + "\n"
	if got := string(AppendProcesses(nil, Process{1, 2}, Process{3, 4}, nil)); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	for status, want := range map[syscall.WaitStatus]Exit{
		0: {}, 7 << 8: {Code: 7}, 255 << 8: {Code: 255}, 9: {Code: 137, Signal: 9}, 6 | 128: {Code: 134, Signal: 6}, 64: {Code: 192, Signal: 64},
	} {
		if got := ExitOf(status); got != want {
			t.Errorf("status %d is %+v, want %+v", status, got, want)
		}
	}
}

func FuzzStamp(f *testing.F) {
	for _, sec := range []int64{0, -1, 1, 68169599, 68169600, 951782400, 951868799, 951868800, 4107542399, 4107542400, -62135596800, 253402300799, -2203891200} {
		f.Add(sec, 0)
		f.Add(sec, 999999999)
	}
	f.Fuzz(func(t *testing.T, sec int64, nsec int) {
		want := time.Unix(sec, int64(nsec)).UTC()
		if nsec < 0 || nsec >= 1e9 || want.Year() < 0 || want.Year() > 9999 || want.Unix() != sec || sec < -1e11 || sec > 1e12 {
			return
		}
		if got := string(AppendStamp(nil, sec, nsec)); got != want.Format("2006-01-02T15:04:05.000000000Z07:00") || len(got) != StampLen {
			t.Errorf("%d.%d is %s, want %s", sec, nsec, got, want)
		}
	})
}

// A process chooses its command name, and that must not change any other field.
func FuzzStatField(f *testing.F) {
	const rest = "S 1 2 3 0 -1 4194560 100 0 0 0 0 0 0 0 20 0 1 0 987654"
	for _, name := range []string{"sh", "a) S 1 1 (b", ") R", "\n", ""} {
		f.Add([]byte(name), []byte(rest), uint8(22))
	}
	f.Add([]byte("x"), []byte("S  01 18446744073709551616"), uint8(5))
	f.Fuzz(func(t *testing.T, name, rest []byte, number uint8) {
		n := 4 + int(number)%50
		if bytes.IndexByte(rest, ')') >= 0 {
			return // the kernel writes none after the name
		}
		got, ok := StatField(append(append(append([]byte("7 ("), name...), ") "...), rest...), n)
		var want uint64
		words := strings.Split(string(rest), " ") // the first one is field 3
		valid := n-3 < len(words)
		if valid {
			var err error
			want, err = strconv.ParseUint(words[n-3], 10, 64)
			valid = err == nil && strconv.FormatUint(want, 10) == words[n-3]
		}
		if ok != valid || ok && got != want {
			t.Errorf("field %d of %q is %d, %v; want %d, %v", n, rest, got, ok, want, valid)
		}
	})
}

// Reading a line of /proc/PID/stat ends, whatever it contains.
func FuzzStatLine(f *testing.F) {
	f.Add([]byte("1 (a) S 0"), 4)
	f.Add([]byte(")"), 22)
	f.Fuzz(func(t *testing.T, stat []byte, n int) {
		if _, ok := StatField(stat, n); ok && bytes.IndexByte(stat, ')') < 0 {
			t.Errorf("%q has a field %d", stat, n)
		}
	})
}
