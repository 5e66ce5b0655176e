package stdio

import (
	"io"
	"os"
	"strings"
	"testing"
)

// The pipe shows what a process has not read of its input.
func TestUnread(t *testing.T) {
	t.Parallel()
	process, stdin, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer process.Close()
	s := New(Ends{Stdin: stdin})
	for _, step := range []struct {
		writes string
		reads  int
		unread int
	}{{"", 0, 0}, {"12345", 0, 5}, {"678", 2, 6}, {"", 6, 0}} {
		if _, err := stdin.WriteString(step.writes); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(process, make([]byte, step.reads)); err != nil {
			t.Fatal(err)
		}
		if n := s.Unread(); n != step.unread {
			t.Errorf("after %+v: %d bytes are unread", step, n)
		}
	}
	if _, err := stdin.WriteString("more"); err != nil {
		t.Fatal(err)
	}
	s.Close()
	if n := s.Unread(); n != 0 {
		t.Errorf("%d bytes of a closed input are unread", n)
	}
	if n := (&Session{}).Unread(); n != 0 {
		t.Errorf("%d bytes of no input are unread", n)
	}
}

// A program that gets no threads writes a stack, and why before it.
func TestWordsBeforeAStack(t *testing.T) {
	t.Parallel()
	for said, want := range map[string]string{
		"runtime/cgo: pthread_create failed: Resource temporarily unavailable\n" + strings.Repeat("0x0000\n", 2000): "pthread_create failed: Resource temporarily unavailable",
		"warning\n" + "the error": "warning\nthe error",
	} {
		from, to, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer from.Close()
		if _, err := to.WriteString(said); err != nil {
			t.Fatal(err)
		}
		if err := to.Close(); err != nil {
			t.Fatal(err)
		}
		if got := outputTail(from); got != want {
			t.Errorf("%q", got)
		}
	}
}
