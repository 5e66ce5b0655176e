package logx

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// journalFile is a file that passes for the stream to the journal.
func journalFile(t *testing.T) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "journal"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	t.Setenv("JOURNAL_STREAM", fmt.Sprintf("%d:%d", st.Dev, st.Ino))
	return f
}

func TestJournalPriorities(t *testing.T) {
	f := journalFile(t)
	l, err := New(f, "text", slog.LevelDebug)
	if err != nil {
		t.Fatal(err)
	}
	l = l.With("a", 1)
	l.Debug("d")
	l.Info("i")
	l.Warn("w")
	l.WithGroup("g").Error("e\n<7>forged", "b", 2)
	text, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	want := "<7>level=DEBUG msg=d a=1\n<6>level=INFO msg=i a=1\n<4>level=WARN msg=w a=1\n" + `<3>level=ERROR msg="e\n<7>forged" a=1 g.b=2` + "\n"
	if string(text) != want {
		t.Errorf("the journal gets %q, want %q", text, want)
	}
}

func TestJournalTakesJSON(t *testing.T) {
	f := journalFile(t)
	l, err := New(f, "json", slog.LevelInfo)
	if err != nil {
		t.Fatal(err)
	}
	l.Warn("w")
	text, err := os.ReadFile(f.Name())
	if err != nil || !strings.HasPrefix(string(text), `<4>{"time":"`) || !strings.HasSuffix(string(text), `"level":"WARN","msg":"w"}`+"\n") {
		t.Errorf("the journal gets %q, %v", text, err)
	}
}

// Programs whose standard error goes elsewhere inherit the variable.
func TestLogElsewhereIsWithoutPriority(t *testing.T) {
	journalFile(t)
	other, err := os.Create(filepath.Join(t.TempDir(), "other"))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	for name, w := range map[string]io.Writer{"another file": other, "no file": new(strings.Builder)} {
		if Journal(w) {
			t.Errorf("%s is taken for the journal", name)
		}
	}
	l, err := New(other, "text", slog.LevelInfo)
	if err != nil {
		t.Fatal(err)
	}
	l.Info("i")
	text, err := os.ReadFile(other.Name())
	if err != nil || !strings.HasPrefix(string(text), "time=") {
		t.Errorf("the log is %q, %v", text, err)
	}
}
