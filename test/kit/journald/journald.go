// Package journald is a journald for tests: a socket that speaks its native
// protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL), strictly, and that can be left
// full, killed and restarted.
package journald

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"regexp"
	"syscall"
	"testing"
)

// Journald listens at Path and does not read by itself: unread entries stay in
// its socket until it is full.
type Journald struct {
	Path string

	t    testing.TB
	conn *net.UnixConn
}

// Entry is the fields of an entry by their names.
type Entry map[string]string

// New starts a Journald, which ends with the test.
func New(t testing.TB) *Journald {
	t.Helper()
	d := &Journald{Path: filepath.Join(t.TempDir(), "socket"), t: t}
	d.Start()
	t.Cleanup(d.Stop)
	return d
}

// Start listens at Path, which must not exist.
func (d *Journald) Start() {
	d.t.Helper()
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: d.Path, Net: "unixgram"})
	if err != nil {
		d.t.Fatal(err)
	}
	d.conn = conn
}

// Stop leaves the socket's file, like a killed journald.
func (d *Journald) Stop() { d.conn.Close() }

// Read returns the entries that have arrived until now.
func (d *Journald) Read() (entries []Entry) {
	d.t.Helper()
	raw, err := d.conn.SyscallConn()
	if err != nil {
		d.t.Fatal(err)
	}
	buf := make([]byte, 1<<20)
	read := func(fd uintptr) {
		for {
			n, _, err := syscall.Recvfrom(int(fd), buf, syscall.MSG_DONTWAIT)
			if errors.Is(err, syscall.EAGAIN) {
				return
			}
			if err != nil {
				d.t.Fatal(err)
			}
			e, err := Parse(buf[:n])
			if err != nil {
				d.t.Fatal(err)
			}
			entries = append(entries, e)
		}
	}
	if err := raw.Control(read); err != nil {
		d.t.Fatal(err)
	}
	return entries
}

var fieldName = regexp.MustCompile(`^[A-Z][A-Z0-9_]{0,63}$`)

// Parse parses one datagram.
func Parse(datagram []byte) (Entry, error) {
	e := Entry{}
	for len(datagram) > 0 {
		line, rest, ended := bytes.Cut(datagram, []byte("\n"))
		if !ended {
			return nil, fmt.Errorf("a field without end: %.80q", line)
		}
		name, value, text := bytes.Cut(line, []byte("="))
		if !text { // the value follows, after its length
			if len(rest) < 8 {
				return nil, fmt.Errorf("field %q has no length", name)
			}
			size := binary.LittleEndian.Uint64(rest)
			if size >= uint64(len(rest)-8) || rest[8+size] != '\n' {
				return nil, fmt.Errorf("field %q has %d bytes of %d", name, len(rest)-8, size)
			}
			value, rest = rest[8:8+size], rest[8+size+1:]
		}
		if !fieldName.Match(name) {
			return nil, fmt.Errorf("field name %.80q", name)
		}
		if _, twice := e[string(name)]; twice {
			return nil, fmt.Errorf("field %s is there twice", name)
		}
		e[string(name)] = string(value)
		datagram = rest
	}
	return e, nil
}
