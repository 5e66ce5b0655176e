package monitor

import (
	"errors"
	"syscall"

	"github.com/crius-run/crius/conmon/wire"
)

// maxClients is one server, its attach sessions, and room for some people with
// socat. Who comes later is turned away. The last places are not for attach
// sessions: who ends the monitor comes by a connection of its own.
const (
	maxClients  = 32
	maxAttached = maxClients - 4
)

// client is one connection.
type client struct {
	fd       int  // -1: none
	knocks   bool // it wakes a monitor at rest by another connection: its own need not be watched then
	attached bool // it has a share in the container's streams
	input    bool // of which standard input is one
}

type clients [maxClients]client

// attached is how many of them have a share in the container's streams.
func (c *clients) attached() (n int) {
	for i := range c {
		if c[i].attached {
			n++
		}
	}
	return n
}

// accept lets one client in: the next gets its turn after those who leave.
func (m *monitor) accept(int) {
	fd, err := accept(m.listener)
	if err != nil {
		return
	}
	m.questions++ // who comes, or leaves, does not keep the monitor awake: only what it asks for may
	for i := range m.clients {
		if m.clients[i].fd >= 0 {
			continue
		}
		if m.poll.add(fd, syscall.EPOLLIN, asked, i) != nil {
			break
		}
		m.clients[i].fd = fd
		m.greet(i)
		return
	}
	_ = say(fd, wire.Message{Verb: wire.Error, Text: "too many clients"})
	syscall.Close(fd)
}

// greet tells a client everything it would know had it been here from the start.
func (m *monitor) greet(i int) {
	hello := wire.Message{Verb: wire.Hello, Num: [4]uint64{wire.Version}, Text: wire.StateCreating}
	switch {
	case m.told:
		hello.Text = wire.StateExited
	case m.state != creating:
		hello.Text = wire.StateRunning
	}
	m.send(i, hello)
	if m.state != creating {
		m.send(i, createdMessage(m.container))
		m.log.count(func(msg wire.Message) { m.send(i, msg) })
		if m.trouble != wire.LogWell {
			m.send(i, m.log.trouble())
		}
	}
	if m.told {
		m.tellExit(func(msg wire.Message) { m.send(i, msg) })
	}
}

func createdMessage(container wire.Process) wire.Message {
	return wire.Message{Verb: wire.Created, Num: [4]uint64{uint64(container.PID), container.StartTime}}
}

func (m *monitor) tell(msg wire.Message) {
	for i := range m.clients {
		m.send(i, msg)
	}
}

// send never waits: a client that does not read is none.
func (m *monitor) send(i int, msg wire.Message) {
	if m.clients[i].fd < 0 {
		return
	}
	if say(m.clients[i].fd, msg) != nil {
		m.drop(i)
	}
}

func say(fd int, msg wire.Message) error {
	var buf [128]byte // few are longer
	return transmit(fd, wire.Append(buf[:0], msg))
}

func (m *monitor) drop(i int) {
	c := &m.clients[i]
	syscall.Close(c.fd)
	m.stdout.detach(i)
	m.stderr.detach(i)
	once := c.input && m.opt.StdinOnce && !m.opt.Terminal
	if m.remote.client == i {
		m.remote.client = -1
	}
	if m.held.holder == i {
		m.holderLeft()
	}
	*c = client{fd: -1}
	if once {
		m.dropStdin()
	}
}

// serve reads one request and answers it.
func (m *monitor) serve(i int) {
	fd := m.clients[i].fd
	if fd < 0 {
		return
	}
	var buf [256]byte    // far longer than any request
	var control [64]byte // of which the kernel discards what does not fit
	n, controlled, err := receive(fd, buf[:], control[:])
	if errors.Is(err, syscall.EAGAIN) || errors.Is(err, syscall.EINTR) {
		return
	}
	if err != nil || n == 0 {
		m.questions++
		m.drop(i)
		return
	}
	msg, _ := wire.Parse(buf[:n])
	var sent []int
	if controlled > 0 {
		sent = sentDescriptors(append([]byte(nil), control[:controlled]...)) // of which some keep hold
	}
	if msg.Verb == wire.Attach {
		err = m.attach(i, msg.Text, sent)
	} else {
		closeAll(sent)
		err = m.obey(i, msg)
		if msg.Verb == wire.Start && err == nil && m.startFor(i) {
			return // it is answered when the start has ended
		}
		if msg.Verb == wire.Held && err == nil {
			return // it is answered when the container may run
		}
	}
	switch {
	case err != nil:
		m.send(i, wire.Message{Verb: wire.Error, Text: err.Error()})
	case msg.Verb == wire.Attach && m.clients[i].input:
		if lend(fd, m.inputFD()) != nil {
			m.drop(i)
		}
	case msg.Verb == wire.CountLog:
		m.log.count(func(msg wire.Message) { m.send(i, msg) })
		fallthrough
	default:
		m.send(i, wire.Message{Verb: wire.OK})
	}
}

func (m *monitor) obey(i int, msg wire.Message) error {
	switch msg.Verb {
	case wire.Detach:
		m.stdout.detachAfter(&m.log, i)
		m.stderr.detachAfter(&m.log, i)
		return nil
	case wire.ReopenLog:
		return m.log.reopen()
	case wire.Resize:
		return m.resize(msg.Num[0], msg.Num[1])
	case wire.CloseStdin:
		return m.closeStdin()
	case wire.Release:
		m.release()
		return nil
	case wire.CountLog: // who asks that every few seconds does not keep the monitor awake
		m.questions++
		return nil
	case wire.Knocks:
		m.questions++
		m.clients[i].knocks = true
		return nil
	case wire.Start:
		return m.startRemote()
	case wire.Held:
		return m.holdBack(i, msg.Num[0])
	}
	return wire.Text("unknown request")
}

func (m *monitor) resize(width, height uint64) error {
	switch {
	case !m.opt.Terminal:
		return wire.Text("the container has no terminal")
	case m.state == creating:
		return wire.Text("the container does not exist yet")
	case width > 1<<16-1 || height > 1<<16-1:
		return wire.Text("terminal size exceeds 65535 columns or rows")
	case m.stdout.fd < 0:
		return nil
	}
	return wire.Fail("resize terminal", setWindow(m.stdout.fd, uint16(width), uint16(height)))
}

func (m *monitor) closeStdin() error {
	if !m.opt.Stdin {
		return wire.Text("the container has no standard input")
	}
	if m.opt.Terminal {
		return wire.Text("standard input is a terminal and cannot be closed")
	}
	m.dropStdin()
	return nil
}

func (m *monitor) dropStdin() {
	if m.stdin >= 0 {
		syscall.Close(m.stdin)
		m.stdin = -1
	}
	m.fifos.endInput()
}

// release ends what is still alive. Of a container that exists the end is
// recorded as ever before the monitor leaves; who has attached is not waited for.
func (m *monitor) release() {
	m.released = true
	m.stdout.untap()
	m.stderr.untap()
	switch m.state {
	case creating:
		killChildren()
		m.left = true
	case running:
		if m.opt.Remote() { // whom nobody but the runtime can kill
			m.conclude(killed)
			return
		}
		pidfdKill(m.watched)
	}
}
