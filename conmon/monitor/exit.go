package monitor

import (
	"syscall"

	"github.com/crius-run/crius/conmon/wire"
)

// conclude takes down how the container ended, and kills what it has left. What it had
// written by then is put into the log first: who is told of the end finds the log complete,
// unless the disk is full or somebody else still holds the container's pipes.
func (m *monitor) conclude(exit wire.Exit) {
	m.state = exited
	m.exit = exit
	m.ended = uptime()
	m.moved = m.ended
	m.exit.Sec, m.exit.Nsec = now()
	if m.watched >= 0 {
		syscall.Close(m.watched)
	}
	m.watched = -1
	// Before anything is killed here: a scope may go away with its last process, and its
	// counter with it. In a runtime sandbox the kernel may have killed another container's
	// processes.
	if !m.opt.Remote() || m.remote.gone || exit.Code == killed.Code {
		m.exit.OOMKills = max(exit.OOMKills, m.oom.kills(exit.Code))
		m.exit.OOMSeen, m.exit.OOMSeenAt = m.oom.seen, m.oom.at
	}
	m.remote.close()
	m.dropStdin()
	m.fifos.close()
	m.stdout.last, m.stderr.last = true, true
	m.group.begin()
	m.emptied()
}

// emptied reports whether nothing of a container that has ended is alive any more, or will
// be waited for. All that it has written is in the log then.
func (m *monitor) emptied() bool {
	if m.quiet {
		return true
	}
	if m.quiet = m.group.empty(m.released); m.quiet {
		if m.exit.Message = m.group.left(); m.exit.Message != "" {
			m.complaints.add(wire.Text(m.exit.Message))
		}
		m.drain()
	}
	return m.quiet
}

// drain takes in what the container has written until now.
func (m *monitor) drain() {
	for _, s := range []*stream{&m.stdout, &m.stderr} {
		if s.fd >= 0 {
			s.ready = true
			s.pump(&m.log, unread(s.fd))
		}
	}
}

// record writes the exit file, and only then are the clients told, so that
// nobody can know of an end that a power cut could take back. A disk that
// refuses the file does not keep a dead container alive for long; the monitor
// then stays, and knows, until the file is written.
func (m *monitor) record() {
	const bearable = 25 // attempts: five seconds
	if !m.recorded {
		var buf [320]byte
		err := wire.WriteFile(m.opt.ExitFile, m.exit.AppendDocument(buf[:0], m.opt.ID), true)
		m.recorded = err == nil
		if m.attempts++; err != nil && m.attempts == 1 {
			m.complaints.add(err)
		}
	}
	if !m.told && (m.recorded || m.released || m.attempts >= bearable) {
		m.told = true
		m.tellExit(m.tell)
	}
}

// tellExit sends how the container ended.
func (m *monitor) tellExit(send func(wire.Message)) {
	if m.exit.Message != "" {
		send(wire.Message{Verb: wire.Undead, Text: m.exit.Message})
	}
	send(m.exit.Packet())
}
