package monitor

import (
	"syscall"

	"github.com/crius-run/crius/conmon/wire"
)

// lagTime is how many milliseconds an attached client may leave its pipe full
// before it is dropped. Until then the container waits for it, as a program
// waits for its terminal; a client that takes a little all the time may slow it.
// Of a container that has ended nobody may hold up the news for longer.
const lagTime = 2000

// tap is where a copy of a stream goes, besides the log.
type tap struct {
	fd   int    // a pipe of the client; -1: none
	rest []byte // of the stream's last read: what the pipe had no room for
}

// attach gives a client its share in the container's streams from now on: it
// has sent the descriptors to which its stdout and stderr are to be written.
func (m *monitor) attach(i int, streams string, sent []int) error {
	var stdin, stdout, stderr bool
	for rest, more := []byte(streams), true; more; {
		var word []byte
		word, rest, more = wire.Cut(rest, ' ')
		switch string(word) {
		case "stdin":
			stdin = true
		case "stdout":
			stdout = true
		case "stderr":
			stderr = true
		default:
			closeAll(sent)
			return wire.Text("attach: streams are stdin, stdout and stderr")
		}
	}
	wanted := 0
	for _, w := range [...]bool{stdout, stderr} {
		if w {
			wanted++
		}
	}
	var err error
	switch {
	case m.state == creating:
		err = wire.Text("the container does not exist yet")
	case m.state == exited, m.released:
		err = wire.Text("the container has exited")
	case m.clients[i].attached:
		err = wire.Text("this client is attached already")
	case m.attached() >= maxAttached:
		err = wire.Text("too many clients are attached")
	case len(sent) != wanted:
		err = wire.Text("attach: one descriptor each is to be sent for stdout and stderr")
	}
	if err != nil {
		closeAll(sent)
		return err
	}
	if stdout {
		m.tap(&m.stdout, i, sent[0])
		sent = sent[1:]
	}
	if stderr {
		m.tap(&m.stderr, i, sent[0])
	}
	m.clients[i].attached, m.clients[i].input = true, stdin && m.inputFD() >= 0
	return nil
}

func (m *monitor) attached() (n int) {
	for i := range m.clients {
		if m.clients[i].attached {
			n++
		}
	}
	return n
}

// tap begins to copy a stream to fd. One that has ended, as the standard error
// of a container with a terminal has, ends at once.
func (m *monitor) tap(s *stream, i, fd int) {
	err := syscall.SetNonblock(fd, true)
	if err == nil {
		err = m.listenTo(fd, syscall.EPOLLOUT|edgeTriggered, drained, 2*i+s.number()-1)
	}
	if err != nil || s.fd < 0 {
		syscall.Close(fd)
		return
	}
	s.taps[i].fd = fd
	s.tapped++
}

// inputFD is where the container's input is written: -1 if it has none any more.
func (m *monitor) inputFD() int {
	if m.opt.Terminal && m.opt.Stdin {
		return m.stdout.fd
	}
	return m.stdin
}

// lend is the answer to a client that attaches to the standard input: it gets
// the descriptor, and the bytes need not pass through the monitor.
func (m *monitor) lend(i int) {
	var buf [16]byte
	packet := wire.Append(buf[:0], wire.Message{Verb: wire.OK})
	if syscall.Sendmsg(m.clients[i].fd, packet, syscall.UnixRights(m.inputFD()), nil, syscall.MSG_DONTWAIT|syscall.MSG_NOSIGNAL) != nil {
		m.drop(i)
	}
}

// share offers what has just been read to all who have attached.
func (s *stream) share(chunk []byte) {
	if s.tapped == 0 || len(chunk) == 0 {
		return
	}
	for i := range s.taps {
		t := &s.taps[i]
		if t.fd < 0 {
			continue
		}
		t.rest = chunk
		if s.lagging == 0 && !s.last {
			s.deadline = uptime() + lagTime
		}
		s.lagging++
		s.push(i)
	}
}

// push writes to a tap what it still lacks.
func (s *stream) push(i int) {
	t := &s.taps[i]
	for len(t.rest) > 0 {
		n, err := syscall.Write(t.fd, t.rest)
		switch {
		case err == syscall.EINTR:
			continue
		case err == syscall.EAGAIN:
			return
		case err != nil: // nobody reads it any more
			s.detach(i)
			return
		}
		t.rest = t.rest[n:]
		if !s.last {
			s.deadline = uptime() + lagTime
		}
	}
	s.lagging--
}

// feed goes on where push has stopped.
func (m *monitor) feed(number int) {
	s := &m.stdout
	if number%2 == 1 {
		s = &m.stderr
	}
	if i := number / 2; len(s.taps[i].rest) > 0 {
		s.push(i)
	}
}

func (s *stream) detach(i int) {
	t := &s.taps[i]
	if t.fd < 0 {
		return
	}
	syscall.Close(t.fd)
	if len(t.rest) > 0 {
		s.lagging--
	}
	*t = tap{fd: -1}
	s.tapped--
}

// untap lets everybody see the end of the stream.
func (s *stream) untap() {
	for i := range s.taps {
		s.detach(i)
	}
}

// dropLaggards ends the attachment of who does not keep up.
func (m *monitor) dropLaggards() {
	for _, s := range []*stream{&m.stdout, &m.stderr} {
		if s.lagging == 0 || uptime() < s.deadline {
			continue
		}
		for i := range s.taps {
			if len(s.taps[i].rest) > 0 {
				m.drop(i)
			}
		}
	}
}

func closeAll(fds []int) {
	for _, fd := range fds {
		syscall.Close(fd)
	}
}
