package monitor

import (
	"runtime"
	"strconv"
	"syscall"

	"github.com/crius-run/crius/conmon/rest"
	"github.com/crius-run/crius/conmon/wire"
)

// A monitor that has had nothing to do for a while rests (see package rest): it becomes a
// few pages that wait, and begins again when there is something to do. Its notes, by which
// it goes on as if nothing had been, are in the file that has brought it the runtime's
// environment.

const (
	// usualPatience is for how many milliseconds a monitor has nothing to do before it
	// rests: most containers are silent once they have started. It doubles each time, up
	// to mostPatience, for a beginning costs about a millisecond of CPU: a container that
	// writes a line now and then has a monitor that rests less and less.
	usualPatience = 10_000
	mostPatience  = 30 * 60_000
	never         = wire.NoRest
)

// atRest is the first of the notes. No variable of an environment looks like that.
const atRest = "at rest"

// Only the main thread can rest, and only here the program is certain to run on it.
func init() { runtime.LockOSThread() } //nolint:gochecknoinits // see above

// mayRest reports whether the notes have all that there is to know, and nobody but the
// kernel has to be waited for.
func (m *monitor) mayRest() bool {
	return m.state == running && m.patience < never && !m.released &&
		!m.opt.Remote() && !m.opt.Fifos && !m.orphans && !m.held.under &&
		m.stdout.quiet() && m.stderr.quiet() && m.log.empty() && !m.log.where.unseen && !m.log.limit.owes() && !m.log.journal.owes() &&
		m.clients.attached() == 0
}

func (s *stream) quiet() bool { return !s.ready && !s.touched && s.pos == s.n && s.tapped == 0 }

// rest ends this life of the monitor. If it cannot write what it needs for the next one, as on a
// full disk, it tries again later; if it cannot rest at all, there will be no further attempt.
func (m *monitor) rest() {
	patience := m.patience
	m.patience = min(2*patience, mostPatience)
	counts := wire.Rest{Logged: m.log.written, Discarded: m.log.limit.total, JournalLost: m.log.journal.total, Trouble: uint64(m.trouble)}
	m.tell(wire.Message{Verb: wire.Rests, Num: [4]uint64{counts.Logged, counts.Discarded, counts.JournalLost}})
	err := m.writeNotes()
	if err == nil {
		err = m.writeProcesses(&counts)
	}
	if err == nil {
		m.unwatch()
		err = rest.Until(m.poll.fd)
		m.watch()
		m.patience = never
	}
	m.complaints.add(wire.Fail("cannot rest", err))
	m.wake()
}

// unwatch lets clients that knock leave, or die, without a wake. The listener is watched, and
// so are other clients, which may be servers of an earlier release.
func (m *monitor) unwatch() {
	for i := range m.clients {
		if c := &m.clients[i]; c.fd >= 0 && c.knocks {
			_ = syscall.EpollCtl(m.poll.fd, syscall.EPOLL_CTL_DEL, c.fd, nil)
		}
	}
}

// watch undoes unwatch: what a client has sent meanwhile, or its end, comes as an event.
func (m *monitor) watch() {
	for i := range m.clients {
		if c := &m.clients[i]; c.fd >= 0 && c.knocks && m.poll.add(c.fd, syscall.EPOLLIN, asked, i) != nil {
			m.drop(i)
		}
	}
}

func (m *monitor) wake() {
	if err := m.writeProcesses(nil); err != nil {
		m.complaints.add(err) // who comes will wait for the container's end, or ask
	}
	m.tell(wire.Message{Verb: wire.Wakes})
}

// resume is where a monitor begins that has rested. Events have been taken and not been
// looked at.
func (m *monitor) resume(notes []string) error {
	ignoreSignals()
	if err := m.readNotes(notes); err != nil {
		return err
	}
	m.state = running
	m.active = uptime()
	m.stdout.ready, m.stderr.ready = m.stdout.fd >= 0, m.stderr.fd >= 0
	m.stdout.touched = true // as at the first beginning
	m.log.place(m.opt.LogDir, m.opt.LogFile)
	m.log.journal.place(&m.opt)
	m.countKills(0)
	m.watch()
	m.wake()
	return nil
}

// noted calls do with all that has to be known, in always the same order.
func (m *monitor) noted(do func(variable any)) {
	do(&m.poll.fd)
	for _, p := range []*wire.Process{&m.self, &m.container} {
		do(&p.PID)
		do(&p.StartTime)
	}
	do(&m.watched)
	do(&m.stdin)
	do(&m.stdout.fd)
	do(&m.stdout.terminal)
	do(&m.stderr.fd)
	do(&m.log.fd)
	do(&m.log.written)
	do((*int)(&m.log.where.place))
	do(&m.trouble)
	m.log.limit.noted(do)
	m.log.journal.noted(do)
	for _, c := range []*counter{&m.oom.own, &m.oom.pod} {
		do(&c.fd)
		do(&c.key)
		do(&c.first)
		do(&c.last)
	}
	do(&m.oom.seen)
	do(&m.oom.at)
	for i := range m.clients { // of whom none is attached
		do(&m.clients[i].fd)
		do(&m.clients[i].knocks)
	}
	do(&m.group.id)
	do(&m.group.table)
	do(&m.group.shared)
	do(&m.patience)
	do((*int)(&m.complaints))
}

func (l *logLimit) noted(do func(variable any)) {
	do(&l.left)
	do(&l.at)
	do(&l.size)
	for _, b := range []*bool{&l.dropping, &l.filled, &l.said} {
		do(b)
	}
	for i := range l.streams {
		do(&l.streams[i].begun)
		do(&l.streams[i].lost)
	}
	do(&l.untold)
	do(&l.total)
}

// noted leaves out what a journal has only as long as it owes something.
func (j *journal) noted(do func(variable any)) {
	do(&j.fd)
	do(&j.pause)
	for i := range j.streams {
		do(&j.streams[i].begun)
		do(&j.streams[i].cut)
		do(&j.streams[i].lost)
	}
	do(&j.total)
}

// clearNotes gives back the memory of what has been read.
func clearNotes() { _ = syscall.Ftruncate(wire.EnvironFD, 0) }

func (m *monitor) writeNotes() error {
	notes := append(make([]byte, 0, 2<<10), atRest+"\x00"...)
	m.noted(func(variable any) {
		switch v := variable.(type) {
		case *int:
			notes = strconv.AppendInt(notes, int64(*v), 10)
		case *int64:
			notes = strconv.AppendInt(notes, *v, 10)
		case *uint64:
			notes = strconv.AppendUint(notes, *v, 10)
		case *bool:
			notes = strconv.AppendBool(notes, *v)
		case *string:
			notes = append(notes, *v...)
		}
		notes = append(notes, 0)
	})
	n, err := syscall.Pwrite(wire.EnvironFD, notes, 0)
	if err == nil && n < len(notes) {
		err = syscall.EIO
	}
	return wire.Fail("write notes", err)
}

func (m *monitor) readNotes(notes []string) (err error) {
	m.noted(func(variable any) {
		if len(notes) == 0 || err != nil {
			err = wire.Text("notes of a monitor at rest are incomplete")
			return
		}
		switch v := variable.(type) {
		case *int:
			*v, err = strconv.Atoi(notes[0])
		case *int64:
			*v, err = strconv.ParseInt(notes[0], 10, 64)
		case *uint64:
			*v, err = strconv.ParseUint(notes[0], 10, 64)
		case *bool:
			*v, err = strconv.ParseBool(notes[0])
		case *string:
			*v = notes[0]
		}
		notes = notes[1:]
	})
	return err
}
