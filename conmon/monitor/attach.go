package monitor

import (
	"errors"
	"syscall"

	"github.com/crius-run/crius/conmon/wire"
)

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
			return wire.Text("attach: unknown stream, use stdin, stdout or stderr")
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
	case m.clients.attached() >= maxAttached:
		err = wire.Text("too many clients are attached")
	case len(sent) != wanted:
		err = wire.Text("attach: send one descriptor each for stdout and stderr")
	}
	if err != nil {
		closeAll(sent)
		return err
	}
	if stdout {
		m.stdout.tap(i, sent[0])
		sent = sent[1:]
	}
	if stderr {
		m.stderr.tap(i, sent[0])
	}
	m.clients[i].attached, m.clients[i].input = true, stdin && m.inputFD() >= 0
	return nil
}

// detachAfter ends the output of a client after what the container has written until
// now: all that its pipe holds, unless the log does not take it. No client is awaited:
// their pipes have room for that.
func (s *stream) detachAfter(log *logFile, i int) {
	if s.taps[i] >= 0 {
		s.ready = true // the event may be still to come
		s.move(log, turn, func() bool { return false })
		s.detach(i)
	}
}

// tap begins to copy the stream to fd. One that has ended, as the standard error
// of a container with a terminal has, ends at once.
func (s *stream) tap(i, fd int) {
	if s.fd < 0 || syscall.SetNonblock(fd, true) != nil {
		syscall.Close(fd)
		return
	}
	s.taps[i], s.laggards[i] = fd, laggard{}
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
func lend(client, input int) error {
	var buf [16]byte
	packet := wire.Append(buf[:0], wire.Message{Verb: wire.OK})
	return syscall.Sendmsg(client, packet, syscall.UnixRights(input), nil, syscall.MSG_DONTWAIT|syscall.MSG_NOSIGNAL)
}

// laggard is a client that leaves so much unread that the container is not read.
type laggard struct {
	unread int   // as little as it has had unread since then; 0: it is none
	waited int64 // for how many milliseconds it has read nothing
}

// Milliseconds between two looks at laggards, at most, and the least patience with them:
// with less, none is waited for.
const (
	lookPause     = 32
	leastPatience = 10
)

// await reports whether a client has to read before more is read from the container: one
// that reads, however slowly, gets everything. One that has read nothing for all of the
// patience is too slow. A dead container is not held up: what its pipe holds has room.
func (s *stream) await() bool {
	if s.tapped == 0 || s.last || s.patience < leastPatience {
		s.pause = 0
		return false
	}
	now := uptime()
	passed := min(now-s.looked, 2*lookPause) // more means that this process has not run
	s.looked = now
	lags := false
	for i, fd := range s.taps {
		if fd >= 0 && s.lags(i, passed) {
			lags = true
		}
	}
	if lags {
		s.pause = min(max(1, 2*s.pause), lookPause)
	} else {
		s.pause = 0
	}
	return lags
}

// laggards reports whether the container has to wait for a client.
func (m *monitor) laggards() bool { return m.stdout.pause > 0 || m.stderr.pause > 0 }

// lags reports whether a client has to be waited for. Passed is the time since the last look.
func (s *stream) lags(i int, passed int64) bool {
	l, left := &s.laggards[i], unread(s.taps[i])
	switch {
	case left <= mostUnread(s.taps[i], left):
		*l = laggard{}
		return false
	case l.unread == 0, left < l.unread:
		*l = laggard{unread: left}
		return true
	}
	if l.waited += passed; l.waited < s.patience {
		return true
	}
	s.tooSlow(i)
	return false
}

// mostUnread is how much a client may leave unread in its pipe, which grows as it fills. A
// page of a pipe is more than half full at least, so that the rest has room for one turn and
// for all that the container's own pipe can hold when the container ends.
func mostUnread(pipe, unread int) int {
	const usual = 16 << 10 // far less than any pipe holds
	for {
		size := capacity(pipe)
		if size < 0 {
			return unread
		}
		most := max(size/2-pipeSize-bufferSize, min(usual, size/4))
		if unread <= most || size >= wire.MostBehind || growPipe(pipe, 2*size) != nil {
			return most
		}
	}
}

// share gives what has just been read to all clients that have attached. It never waits:
// a client whose pipe is full loses the rest.
func (s *stream) share(chunk []byte) {
	if s.tapped == 0 || len(chunk) == 0 {
		return
	}
	for i, fd := range s.taps {
		if fd < 0 {
			continue
		}
		switch err := writeAhead(fd, chunk); {
		case err == nil:
		case errors.Is(err, syscall.EAGAIN):
			s.tooSlow(i)
		default: // nobody reads it any more
			s.detach(i)
		}
	}
}

// writeAhead writes to a pipe, which grows up to MostBehind as it fills.
func writeAhead(fd int, chunk []byte) error {
	for len(chunk) > 0 {
		n, err := syscall.Write(fd, chunk)
		switch {
		case err == nil:
			chunk = chunk[n:]
		case err == syscall.EINTR:
		case err == syscall.EAGAIN:
			size := capacity(fd)
			if size <= 0 || size >= wire.MostBehind || growPipe(fd, 2*size) != nil {
				return err
			}
		default:
			return err
		}
	}
	return nil
}

// dropLaggard ends the output of a client that does not read, and its connection,
// unless the client has a share in the input: all that it has sent is to arrive, and the
// end of a connection may end the input.
func (m *monitor) dropLaggard(i int) {
	why := "it read the output too slowly"
	if m.stdout.patience >= leastPatience {
		why = "it read none of the output for " + seconds(m.stdout.patience)
	}
	m.send(i, wire.Message{Verb: wire.Dropped, Text: why + "; the container log is complete"})
	if !m.clients[i].input {
		m.drop(i)
		return
	}
	m.stdout.detach(i)
	m.stderr.detach(i)
}

func (s *stream) detach(i int) {
	if s.taps[i] < 0 {
		return
	}
	syscall.Close(s.taps[i])
	s.taps[i] = -1
	s.tapped--
	if s.tapped == 0 {
		s.pause = 0
	}
}

// untap lets everybody see the end of the stream.
func (s *stream) untap() {
	for i := range s.taps {
		s.detach(i)
	}
}

func seconds(milliseconds int64) string {
	if milliseconds%1000 != 0 {
		return itoa(int(milliseconds)) + "ms"
	}
	return itoa(int(milliseconds/1000)) + "s"
}

func closeAll(fds []int) {
	for _, fd := range fds {
		syscall.Close(fd)
	}
}
