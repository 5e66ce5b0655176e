package main

import (
	"bytes"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// floodRole makes this program the one in the container, which writes.
const floodRole = "--flood"

// ready and done are what it writes once it can be signalled, and at the end of
// each pass on both streams.
const (
	ready = "ready"
	done  = "done"
)

// A shape is how a container writes.
type shape struct {
	name string
	line int  // bytes, with the newline
	each int  // bytes in one write
	both bool // every other write goes to stderr
}

func (s shape) args() []string {
	return []string{floodRole, strconv.Itoa(s.line), strconv.Itoa(s.each), strconv.FormatBool(s.both)}
}

// passSize is the number of bytes written between two pauses, in which the log
// is emptied.
const passSize = 128 << 20

// flood writes a pass at each SIGUSR1, for ever.
func flood(args []string) {
	line, err1 := strconv.Atoi(args[0])
	each, err2 := strconv.Atoi(args[1])
	both, err3 := strconv.ParseBool(args[2])
	if err1 != nil || err2 != nil || err3 != nil {
		os.Exit(64)
	}
	again := make(chan os.Signal, 1)
	signal.Notify(again, syscall.SIGUSR1)
	fmt.Println(ready)
	for range again {
		pass(line, each, both)
	}
}

func pass(line, each int, both bool) {
	text := bytes.Repeat([]byte{'l'}, line)
	text[line-1] = '\n'
	// A write may begin anywhere in a line, as with a buffered writer.
	text = bytes.Repeat(text, (each+line-1)/line+1)
	var at [2]int
	for left, turn := passSize, 0; left > 0; left -= each {
		n := min(each, left)
		put(1+turn, text[at[turn]:][:n])
		at[turn] = (at[turn] + n) % line
		if both {
			turn = 1 - turn
		}
	}
	// The last bytes of one stream may overtake those of the other, so done must
	// not be written until everything has been read.
	for fd := range at {
		for unread(1+fd) > 0 {
			time.Sleep(time.Millisecond)
		}
	}
	put(1, []byte("\n"+done+"\n"))
	put(2, []byte("\n"+done+"\n"))
}

func put(fd int, b []byte) {
	for len(b) > 0 {
		n, err := syscall.Write(fd, b)
		if err != nil && err != syscall.EINTR {
			os.Exit(74)
		}
		b = b[max(n, 0):]
	}
}

func unread(pipe int) int {
	n, err := unix.IoctlGetUint32(pipe, unix.TIOCINQ)
	if err != nil {
		os.Exit(74)
	}
	return int(n)
}
