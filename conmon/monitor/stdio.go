package monitor

import (
	"syscall"

	"github.com/crius-run/crius/conmon/wire"
)

const (
	// bufferSize is room for the longest held-back line and a good deal more.
	bufferSize = 64 << 10
	// pipeSize lets a container run ahead of a busy disk; a pipe's page table is
	// kernel memory even while it is empty, so not more.
	pipeSize = 256 << 10
	// turn is how much of one stream is moved before others get their turn.
	turn = 256 << 10
)

// stream is one way out of the container: a pipe, or the terminal.
//
// It is watched edge-triggered: an event means that reading is worth a try
// (ready) until a try comes up empty. So neither a hung-up pipe that must not
// be read yet, nor a terminal that nobody has open, ever keeps the loop busy.
type stream struct {
	name     string
	fd       int // -1: at its end
	terminal bool
	last     bool // the init is dead: a terminal nobody has open will never be opened again
	ready    bool
	pause    int  // for so many milliseconds nothing is read, since a client has to read first
	touched  bool // buf has pages of its own
	buf      []byte
	pos, n   int // buf[pos:n] is not in the log yet

	taps     [maxClients]int // pipes of clients, to which the stream is copied; -1: none
	tapped   int             // of them that are in use
	laggards [maxClients]laggard
	patience int64 // for how many milliseconds a client that does not read is waited for
	looked   int64 // uptime of the last look at laggards
	tooSlow  func(client int)
}

func (s *stream) ended() bool { return s.fd < 0 && s.pos == s.n }

// readable reports whether reading is worth a try now.
func (s *stream) readable() bool { return s.ready && s.pause == 0 }

func (s *stream) close() {
	if s.fd >= 0 {
		syscall.Close(s.fd)
	}
	s.fd, s.ready, s.pause = -1, false, 0
	s.untap()
}

// fill reads once.
func (s *stream) fill() int {
	if s.pos > 0 {
		s.n = copy(s.buf, s.buf[s.pos:s.n])
		s.pos = 0
	}
	n, err := syscall.Read(s.fd, s.buf[s.n:])
	switch {
	case n > 0:
		s.touched = true
		s.n += n
		return n
	case err == syscall.EINTR:
	case err == syscall.EAGAIN, err == syscall.EIO && s.terminal && !s.last:
		s.ready = false
	default:
		s.close()
	}
	return 0
}

// pump moves bytes from the stream into the log, and to those who have attached,
// until there are none, the log refuses, a client has to read first, or about budget
// bytes have been moved.
//
// Who writes a line at a time, and fast, would be read a line at a time, each for
// the price of several system calls. After two reads that brought little the
// writer is let to get ahead; a single line goes out at once.
func (s *stream) pump(log *logFile, budget int) { s.move(log, budget, s.await) }

func (s *stream) move(log *logFile, budget int, await func() bool) {
	const little = 8 << 10
	for drips := 0; !log.blocked(); {
		used, full := log.add(s.name, s.buf[s.pos:s.n], s.fd < 0)
		s.pos += used
		if full {
			log.flush()
			continue
		}
		if !s.ready || budget <= 0 || await() {
			log.flush()
			return
		}
		if drips > 0 {
			if log.flush(); log.blocked() {
				return
			}
		}
		if drips > 1 && !s.last {
			giveWay()
		}
		n := s.fill()
		s.share(s.buf[s.n-n : s.n])
		budget -= n
		switch {
		case n >= little:
			drips = 0
		case n > 0:
			drips++
		}
	}
}

// collect keeps the last of what the runtime says while it creates the
// container: bounded, however much it says.
func (s *stream) collect() {
	for budget := turn; s.ready && budget > 0; {
		budget -= s.fill()
		s.pos = max(0, s.n-wire.MaxText)
	}
}

// said is what collect has kept; it is forgotten.
func (s *stream) said() string {
	text := printable(s.buf[s.pos:s.n])
	s.pos, s.n = 0, 0
	return text
}

// stdio are the ends of the pipes that become the standard descriptors of the
// runtime, and by its hands of the container.
type stdio [3]int

func (c *stdio) close() {
	for _, fd := range c {
		if fd > 2 {
			syscall.Close(fd)
		}
	}
}

func (s *stream) number() int {
	if s.name == "stdout" {
		return 1
	}
	return 2
}

// openStdio makes the pipes. With a terminal they serve the runtime's own words
// only.
func (m *monitor) openStdio() (child stdio, err error) {
	for _, s := range []*stream{&m.stdout, &m.stderr} {
		var p [2]int
		if err = syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
			break
		}
		s.fd, child[s.number()] = p[0], p[1]
		_ = growPipe(p[0], pipeSize)
		if err = m.give(p[0]); err != nil {
			break
		}
		if err = s.watch(m.poll); err != nil {
			break
		}
	}
	if err == nil && m.opt.Stdin && !m.opt.Terminal && !m.opt.Fifos {
		var p [2]int
		if err = syscall.Pipe2(p[:], syscall.O_CLOEXEC); err == nil {
			child[0], m.stdin = p[0], p[1]
			if err = m.give(p[0]); err == nil {
				err = syscall.SetNonblock(m.stdin, true)
			}
		}
	}
	if err != nil {
		child.close()
	}
	return child, wire.Fail("open stdio", err)
}

// give makes the container's user the owner of a pipe. A runtime does so as well, but cannot
// where it is root in a user namespace only, to which the pipe's owner does not belong.
func (m *monitor) give(pipe int) error {
	return syscall.Fchown(pipe, int(m.opt.OwnerUID), int(m.opt.OwnerGID))
}

// watch has the loop told of what comes out of the stream.
func (s *stream) watch(p poller) error {
	s.ready = true
	if err := syscall.SetNonblock(s.fd, true); err != nil {
		return err
	}
	return p.add(s.fd, syscall.EPOLLIN|edgeTriggered, spoken, s.number())
}

// trim gives the pages of the buffers back to the kernel, and those that the
// stack has grown into.
func trim(log *logFile, streams ...*stream) {
	for _, s := range streams {
		if s.pos == s.n {
			s.pos, s.n = 0, 0
		}
		discard(s.buf[s.n:])
		s.touched = false
	}
	if log.empty() {
		discard(log.records[:cap(log.records)])
	}
	if !log.journal.owes() {
		discard(log.journal.kept[:cap(log.journal.kept)])
	}
	trimStack()
}
