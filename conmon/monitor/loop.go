package monitor

import (
	"cmp"
	"syscall"

	"github.com/crius-run/crius/conmon/wire"
)

// state is how far the container's life has come.
type state uint8

const (
	creating state = iota // the runtime is making the container
	running               // it exists; whether it has been started is not the monitor's business
	exited                // its init is dead, others may still hold its pipes
	states
)

// event is what can happen.
type event uint8

const (
	connected event = iota // a client waits to be accepted
	asked                  // a client has sent a packet, or has gone
	ended                  // the runtime, or the container's init, is dead
	spoken                 // there is output of the container, or of the runtime
	starved                // the kernel has counted an OOM kill
	helped                 // a command of the runtime that acts for a remote container has ended
	events
)

// reaction is what the monitor does about it. The argument is the number of
// the client or stream. Where there is none, nothing has to be done.
func (s state) reaction(e event) func(*monitor, int) {
	return [states][events]func(*monitor, int){
		creating: {connected: (*monitor).accept, asked: (*monitor).serve, spoken: (*monitor).ready, ended: (*monitor).runtimeEnded},
		running:  {connected: (*monitor).accept, asked: (*monitor).serve, spoken: (*monitor).ready, ended: (*monitor).initEnded, starved: (*monitor).countKills, helped: (*monitor).helperEnded},
		exited:   {connected: (*monitor).accept, asked: (*monitor).serve, spoken: (*monitor).ready},
	}[s][e]
}

// monitor is all there is.
type monitor struct {
	opt   wire.Options
	env   []string // of the runtime
	state state

	poll     poller
	listener int
	clients  clients

	self      wire.Process
	runtime   int // pid, while creating
	container wire.Process
	watched   int  // pidfd of the runtime, then of the container's init or its runtime sandbox
	orphans   bool // the container's orphans become children of the monitor

	remote         remote
	held           held
	fifos          fifos
	stdin          int // what is written here the container reads; -1: nothing
	stdout, stderr stream
	console        console
	log            logFile
	oom            oomCounter
	group          group

	exit     wire.Exit
	ended    int64 // uptime when the container ended
	moved    int64 // uptime when it ended, or output of it came after that
	quiet    bool  // nothing of the dead container is alive, or waited for any longer
	recorded bool  // in the exit file
	told     bool  // to the clients
	attempts int   // to write the exit file
	released bool  // nobody is interested any more
	left     bool

	active    int64 // uptime when something last happened
	questions int   // of clients in this turn of the loop, which do not count as that
	patience  int64 // for how many milliseconds nothing must have happened before the monitor rests

	trouble    int  // of the log, as told: of wire.LogWell and the following
	losing     bool // it has been complained that journald does not take what the container writes
	complaints complaints
}

func newMonitor(opt wire.Options, env []string) *monitor {
	m := &monitor{
		opt: opt, env: env, poll: poller{-1},
		listener: wire.ListenFD, console: console{-1}, watched: -1, stdin: -1,
		stdout: stream{name: "stdout", fd: -1, buf: make([]byte, bufferSize)},
		stderr: stream{name: "stderr", fd: -1, buf: make([]byte, bufferSize)},
		log:    logFile{fd: -1, records: make([]byte, 0, bufferSize), limit: newLogLimit(opt), journal: noJournal},
		oom:    oomCounter{own: counter{fd: -1}, pod: counter{fd: -1}},
		remote: remote{pidfd: -1, result: -1, client: -1},
		fifos:  noFifos,
		held:   notHeld,
		active: uptime(), patience: int64(cmp.Or(opt.RestAfter, usualPatience)),
	}
	for i := range m.clients {
		m.clients[i].fd = -1
	}
	for i := range m.clients {
		m.stdout.taps[i], m.stderr.taps[i] = -1, -1
	}
	m.stdout.tooSlow, m.stderr.tooSlow = m.dropLaggard, m.dropLaggard
	m.stdout.patience = int64(cmp.Or(opt.AttachWait, wire.UsualAttachWait))
	m.stderr.patience = m.stdout.patience
	return m
}

// poller is what the loop waits with.
type poller struct{ fd int }

func (p poller) add(fd int, what uint32, e event, number int) error {
	return syscall.EpollCtl(p.fd, syscall.EPOLL_CTL_ADD, fd,
		&syscall.EpollEvent{Events: what, Fd: int32(e), Pad: int32(number)})
}

func (m *monitor) loop() {
	var batch [16]syscall.EpollEvent
	for !m.left {
		n, err := syscall.EpollWait(m.poll.fd, batch[:], m.pollTimeout())
		if err != nil && err != syscall.EINTR {
			m.complaints.add(wire.Fail("wait for events", err))
			return
		}
		m.questions = 0
		for _, e := range batch[:max(n, 0)] {
			if react := m.state.reaction(event(e.Fd)); react != nil && !m.left {
				react(m, int(e.Pad))
			}
		}
		if n > m.questions {
			m.active = uptime()
		}
		m.proceed(n == 0 && !m.laggards())
	}
}

// silence is how many milliseconds of it mean that the buffers are not needed for now.
const silence = 1000

// pollTimeout is how many milliseconds the loop may wait for the next event.
func (m *monitor) pollTimeout() int {
	const (
		retry   = 200   // what the file system has refused
		helpers = 10    // helpers of the runtime are dying
		undead  = 10000 // nothing tells of the death of an orphan
		forever = -1
	)
	moving := !m.log.blocked() || m.state == creating
	switch {
	case moving && (m.stdout.readable() || m.stderr.readable()):
		return 0
	case m.laggards():
		return max(m.stdout.pause, m.stderr.pause)
	case m.state == exited && !m.quiet:
		return int(max(1, m.group.next-uptime()))
	case m.log.blocked(), m.state == exited && !m.recorded, m.remote.again, m.remote.gone && m.state == running:
		return retry
	case m.state == exited && m.opt.Helpers:
		return helpers
	case m.log.journal.owes():
		return m.log.journal.pause
	case m.stdout.touched, m.stderr.touched, m.log.limit.owes(), m.log.where.unseen && m.state == running:
		return silence
	case m.held.ended != 0:
		return int(max(1, m.held.overdue()))
	case m.orphans:
		return undead
	case m.mayRest():
		return int(max(1, m.patience-(uptime()-m.active)))
	}
	return forever
}

// proceed does what is due after any event, or after none in time.
func (m *monitor) proceed(quiet bool) {
	if m.state == creating {
		m.collect()
		return
	}
	if m.orphans {
		m.reap()
	}
	if m.held.ended != 0 && m.held.overdue() == 0 {
		pidfdKill(m.watched) // the runtime, which hangs
	}
	if m.opt.Remote() && m.state == running {
		m.persist()
	}
	if quiet && m.log.journal.owes() {
		quiet = m.log.journal.pause >= silence
		m.log.journal.retry()
	}
	silent := quiet && !m.stdout.ready && !m.stderr.ready // and not only polled in passing
	m.pump()
	m.watchLog(quiet)
	if silent || m.stdout.ended() && m.stderr.ended() {
		m.log.conclude()
	}
	if m.state == exited {
		if m.emptied() && !m.underway() { // the log is complete
			m.record()
		}
		drained := m.stdout.ended() && m.stderr.ended() && m.log.empty()
		if m.told && m.recorded && drained && m.log.journal.settled() || m.told && m.released {
			if !m.opt.Helpers || m.remote.reapedHelpers() {
				m.log.journal.giveUp()
				m.log.count(m.tell)
				m.left = true
			}
		}
	}
	if quiet {
		trim(&m.log, &m.stdout, &m.stderr)
		if m.mayRest() && uptime()-m.active >= m.patience {
			m.rest()
		}
	}
}

func (m *monitor) pump() {
	if m.log.blocked() {
		m.log.flush()
	}
	m.stdout.pump(&m.log, turn)
	m.stderr.pump(&m.log, turn)
	if losing := m.log.journal.losing; losing && !m.losing {
		m.complaints.add(wire.Fail("container output does not reach the journal "+m.opt.Journal, m.log.journal.refused))
	}
	m.losing = m.log.journal.losing
}

func (m *monitor) ready(number int) {
	m.moved = uptime()
	if number == m.stdout.number() {
		m.stdout.ready = true
	} else {
		m.stderr.ready = true
	}
}

func (m *monitor) collect() {
	m.stdout.collect()
	m.stderr.collect()
}

// complaints is how many lines are in the monitor's own log.
type complaints int

// add writes to that log, which is bounded.
func (c *complaints) add(err error) {
	const bearable = 100
	if *c++; *c > bearable {
		return
	}
	sec, nsec := now()
	line := append(wire.AppendStamp(nil, sec, nsec), ' ')
	_, _ = syscall.Write(2, append(append(line, err.Error()...), '\n'))
}
