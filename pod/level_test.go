package pod

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
)

func TestLaterRecordsAreLeftAlone(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := errors.Join(CheckLevel(dir), NoteLevel(dir, "1.0.0"), CheckLevel(dir), NoteLevel(dir, "1.1.0")); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, LevelFile)
	if text, err := os.ReadFile(file); err != nil || string(text) != `{"level":1,"version":"1.0.0"}`+"\n" {
		t.Errorf("%s: %v", text, err)
	}
	if err := os.WriteFile(file, []byte(`{"level":2,"version":"2.0.0","more":true}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := CheckLevel(dir); !errors.Is(err, ErrLevel) || !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), `written by crius "2.0.0"`) {
		t.Errorf("later records: %v", err)
	}
	if err := os.WriteFile(file, []byte(`{`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := CheckLevel(dir); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("damaged: %v", err)
	}
}
