package monitor

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/crius-run/crius/conmon/wire"
)

// A file that is no longer at the log's path is noticed at a second look, whatever has become
// of it, and reopening the log ends that. Between the first look and the second the kubelet
// may be rotating the log.
func TestLogIsNotAtItsPath(t *testing.T) {
	t.Parallel()
	other := func(path string) error { return os.WriteFile(path, nil, 0o600) }
	for what, c := range map[string]struct {
		change func(path string) error
		want   place
		says   string
	}{
		"nothing":  {func(string) error { return nil }, inPlace, ""},
		"deleted":  {os.Remove, deleted, "was deleted"},
		"no dir":   {func(path string) error { return os.RemoveAll(filepath.Dir(path)) }, deleted, "was deleted"},
		"moved":    {func(path string) error { return os.Rename(path, path+".1") }, moved, "was moved away"},
		"replaced": {func(path string) error { return errors.Join(os.Remove(path), other(path)) }, replaced, "was replaced"},
		"a link":   {func(path string) error { return errors.Join(os.Rename(path, path+".1"), os.Symlink(path+".1", path)) }, replaced, "was replaced"},
	} {
		t.Run(strings.ReplaceAll(what, " ", "-"), func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "pod", "log")
			if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil {
				t.Fatal(err)
			}
			l := logFile{records: make([]byte, 0, 64)}
			if err := l.open("", path); err != nil {
				t.Fatal(err)
			}
			defer func() { syscall.Close(l.fd) }()
			l.records = append(l.records, "record\n"...)
			l.flush()
			if !l.where.due(true) {
				t.Error("no look is due after a write")
			}
			if err := c.change(path); err != nil {
				t.Fatal(err)
			}
			l.look()
			if l.where.place != inPlace || l.where.unseen != (c.want != inPlace) {
				t.Errorf("at the first look: %+v", l.where)
			}
			l.look()
			if m := l.trouble(); l.where.place != c.want || l.where.unseen || !strings.Contains(m.Text, c.says) || (m.Num[0] == wire.LogDetached) != (c.want != inPlace) {
				t.Errorf("at the second look: %+v, %+v", l.where, m)
			}
			if c.want == replaced && what == "a link" || what == "no dir" {
				return // it is not reopened
			}
			if err := l.reopen(); err != nil {
				t.Fatal(err)
			}
			if l.look(); l.where.place != inPlace || l.where.unseen {
				t.Errorf("after it was reopened: %+v", l.where)
			}
		})
	}
}

// The log is moved and comes back, as in a rotation, between two looks.
func TestRotationIsNoTrouble(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "log")
	l := logFile{records: make([]byte, 0, 64)}
	if err := l.open("", path); err != nil {
		t.Fatal(err)
	}
	defer func() { syscall.Close(l.fd) }()
	for range 3 {
		l.records = append(l.records, "record\n"...)
		l.flush()
		if err := os.Rename(path, path+".1"); err != nil {
			t.Fatal(err)
		}
		l.look()
		if err := l.reopen(); err != nil {
			t.Fatal(err)
		}
		l.records = append(l.records, "record\n"...)
		l.flush()
		l.look()
		if l.where.place != inPlace || l.where.unseen {
			t.Errorf("%+v", l.where)
		}
	}
}
