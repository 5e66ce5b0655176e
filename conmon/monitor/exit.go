package monitor

import (
	"syscall"

	"github.com/crius-run/crius/conmon/wire"
)

// conclude takes down how the container ended. What it had written by then is
// put into the log first: who is told of the end finds the log complete, unless
// the disk is full or somebody else still holds the container's pipes.
func (m *monitor) conclude(exit wire.Exit) {
	m.state = exited
	m.exit = exit
	m.lastOutput = uptime() + outputTime
	m.exit.Sec, m.exit.Nsec = now()
	if m.watched >= 0 {
		syscall.Close(m.watched)
	}
	m.watched = -1
	// In a sandbox the kernel may have killed what was another container's.
	if !m.opt.Remote() || m.remote.gone || exit.Code == killed.Code {
		m.exit.OOMKills = max(exit.OOMKills, m.oom.kills(exit.Code))
	}
	m.remote.close()
	m.dropStdin()
	m.fifos.close()
	for _, s := range []*stream{&m.stdout, &m.stderr} {
		s.last = true
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
		var buf [256]byte
		err := wire.WriteFile(m.opt.ExitFile, m.exit.AppendDocument(buf[:0], m.opt.ID), true)
		m.recorded = err == nil
		if m.attempts++; err != nil && m.attempts == 1 {
			m.complaints.add(err)
		}
	}
	if !m.told && (m.recorded || m.released || m.attempts >= bearable) {
		m.told = true
		m.tell(m.exit.Message())
	}
}
