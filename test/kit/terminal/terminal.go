// Package terminal provides terminals for tests of what users see.
package terminal

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// Terminal is a terminal and its user.
type Terminal struct {
	*os.File // for programs

	person *os.File
	mu     sync.Mutex
	shown  strings.Builder
	ended  chan struct{}
}

// Open makes a terminal, which is closed at the end of the test.
func Open(t testing.TB) *Terminal {
	t.Helper()
	person, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	number, err := unix.IoctlGetUint32(int(person.Fd()), unix.TIOCGPTN)
	if err := errors.Join(err, unix.IoctlSetPointerInt(int(person.Fd()), unix.TIOCSPTLCK, 0)); err != nil {
		t.Fatal(err)
	}
	file, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	term := &Terminal{File: file, person: person, ended: make(chan struct{})}
	go term.watch()
	t.Cleanup(func() {
		_, _ = person.WriteString("\n") // ends a pending Read of the program
		_ = file.Close()                // ends that of watch
		<-term.ended
		_ = person.Close()
	})
	return term
}

func (t *Terminal) watch() {
	defer close(t.ended)
	part := make([]byte, 4096)
	for {
		n, err := t.person.Read(part)
		t.mu.Lock()
		t.shown.Write(part[:n])
		t.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// Shown returns everything that programs have written and the user has seen so
// far, without the carriage returns that a terminal adds to the ends of lines.
func (t *Terminal) Shown() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.ReplaceAll(t.shown.String(), "\r\n", "\n")
}

// Type types text as the user.
func (t *Terminal) Type(tb testing.TB, text string) {
	tb.Helper()
	if _, err := t.person.WriteString(text); err != nil {
		tb.Fatal(err)
	}
}

// Resize gives the terminal another size; the caller must send SIGWINCH to a
// program that must know at once.
func (t *Terminal) Resize(tb testing.TB, width, height uint16) {
	tb.Helper()
	if err := unix.IoctlSetWinsize(int(t.person.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: width, Row: height}); err != nil {
		tb.Fatal(err)
	}
}
