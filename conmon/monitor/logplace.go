package monitor

import (
	"errors"
	"syscall"

	"github.com/crius-run/crius/conmon/wire"
)

// place is where the file is that the monitor writes to.
type place int

const (
	inPlace  place = iota // at the log's path, as far as is known
	deleted               // at no path
	moved                 // at another path, with nothing at the log's
	replaced              // at another path or none, with another file at the log's
)

// whereabouts is what is known of the place. A file that is not in place counts as such
// only at a second look, a second later: a kubelet that rotates the log moves it first and
// asks for another file then.
type whereabouts struct {
	place   place
	suspect bool  // at the first look it was not in place
	unseen  bool  // something has been written since the last look
	at      int64 // uptime of the last look
}

// due reports whether it is time for another look: when nothing more is written for now,
// or each second.
func (w *whereabouts) due(quiet bool) bool {
	return w.unseen && (quiet && !w.suspect || uptime()-w.at >= silence)
}

// look finds out where the log is.
func (l *logFile) look() {
	found := l.find()
	w := &l.where
	w.suspect = found != inPlace && w.place == inPlace && !w.suspect
	w.at, w.unseen = uptime(), w.suspect
	if !w.suspect {
		w.place = found
	}
}

func (l *logFile) find() place {
	var own, other syscall.Stat_t
	if l.fd < 0 || syscall.Fstat(l.fd, &own) != nil {
		return inPlace
	}
	const opath = 0x200000 // O_PATH
	fd, err := wire.OpenBelow(l.base, l.path, opath|syscall.O_NOFOLLOW, 0)
	if err == nil {
		err = syscall.Fstat(fd, &other)
		syscall.Close(fd)
	}
	switch {
	case err == nil && own.Dev == other.Dev && own.Ino == other.Ino:
		return inPlace
	case err == nil:
		return replaced
	case own.Nlink == 0:
		return deleted
	case errors.Is(err, syscall.ENOENT):
		return moved
	}
	return inPlace
}

// state returns the kind of the log's trouble. It allocates nothing, since the loop asks at each turn.
func (l *logFile) state() int {
	switch {
	case l.blocked():
		return wire.LogBlocked
	case l.where.place != inPlace:
		return wire.LogDetached
	}
	return wire.LogWell
}

// trouble returns what the clients are to know of the log.
func (l *logFile) trouble() wire.Message {
	m := wire.Message{Verb: wire.LogTrouble}
	m.Num[0] = uint64(l.state())
	switch {
	case m.Num[0] == wire.LogBlocked:
		m.Text = l.err.Error()
	case l.where.place == deleted:
		m.Text = "log " + l.path + " was deleted"
	case l.where.place == moved:
		m.Text = "log " + l.path + " was moved away"
	case l.where.place == replaced:
		m.Text = "log " + l.path + " was replaced by another file"
	}
	return m
}

// watchLog tells the clients when the state of the log has changed.
func (m *monitor) watchLog(quiet bool) {
	if m.log.where.due(quiet) {
		m.log.look()
	}
	before := m.trouble
	if m.trouble = m.log.state(); m.trouble == before {
		return
	}
	now := m.log.trouble()
	switch {
	case m.trouble == wire.LogBlocked:
		m.complaints.add(wire.Fail("container output blocked", m.log.err))
	case before == wire.LogBlocked:
		m.complaints.add(wire.Text("container output no longer blocked"))
	case m.trouble == wire.LogDetached:
		m.complaints.add(wire.Text(now.Text))
	}
	m.tell(now)
}
