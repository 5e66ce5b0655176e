// Package terminal has terminals for tests of what people see.
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

// Terminal is a terminal and the person in front of it.
type Terminal struct {
	*os.File // what programs get

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
		_, _ = person.WriteString("\n") // ends a Read of the program's
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

// Shown is all that programs have written and the person has seen so far, without the
// carriage returns that a terminal adds to the ends of lines.
func (t *Terminal) Shown() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.ReplaceAll(t.shown.String(), "\r\n", "\n")
}

// Type is what the person types.
func (t *Terminal) Type(tb testing.TB, text string) {
	tb.Helper()
	if _, err := t.person.WriteString(text); err != nil {
		tb.Fatal(err)
	}
}

// Resize gives the terminal another size; a program that is to know at once gets
// SIGWINCH from the caller.
func (t *Terminal) Resize(tb testing.TB, width, height uint16) {
	tb.Helper()
	if err := unix.IoctlSetWinsize(int(t.person.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: width, Row: height}); err != nil {
		tb.Fatal(err)
	}
}
