package monitor

import (
	"syscall"

	"github.com/crius-run/crius/conmon/wire"
)

// logFile is the container's log. But for a limit it never gives a byte up: what the
// file system refuses is kept and tried again, and as long as it is kept nothing
// more is read from the container, which then waits in its own write(2).
type logFile struct {
	path    string // empty: everything is thrown away
	base    string // the directory above the pod's; below it no link is followed
	fd      int
	records []byte // whole records, written up to done
	done    int
	written uint64 // bytes, over all files
	err     error  // why the last write was refused; nil: all is well
	where   whereabouts
	limit   logLimit
	journal journal // which gets all records, whatever the limit
}

// count sends how much has been written and, if there is a limit, discarded, and, if there
// is a journal, lost to it.
func (l *logFile) count(send func(wire.Message)) {
	send(wire.Message{Verb: wire.Logged, Num: [4]uint64{l.written}})
	if l.limit.on() {
		send(wire.Message{Verb: wire.LogDiscarded, Num: [4]uint64{l.limit.total}})
	}
	if l.journal.on() {
		send(wire.Message{Verb: wire.JournalLost, Num: [4]uint64{l.journal.total}})
	}
}

// openLog opens the log and makes it where there is none. Pods may write where
// logs are, so it must be what it seems: a regular file at its path and at no
// other, with no link on the way (CVE-2025-0750).
func openLog(base, path string) (int, error) {
	const flags = syscall.O_WRONLY | syscall.O_APPEND | syscall.O_CREAT |
		syscall.O_NONBLOCK // a FIFO would block, and is refused below
	fd, err := wire.OpenBelow(base, path, flags, 0o640)
	if err != nil {
		return -1, wire.Fail("open log "+path, err)
	}
	var st syscall.Stat_t
	err = syscall.Fstat(fd, &st)
	switch {
	case err != nil:
	case st.Mode&syscall.S_IFMT != syscall.S_IFREG:
		err = wire.Text("not a regular file")
	case st.Nlink != 1:
		err = wire.Text("the file has other hard links")
	}
	if err != nil {
		syscall.Close(fd)
		return -1, wire.Fail("open log "+path, err)
	}
	return fd, nil
}

// open opens the log of a container whose pod has its logs in dir; empty: in that
// of the log itself.
func (l *logFile) open(dir, path string) (err error) {
	dir = l.place(dir, path)
	if path == "" {
		return nil
	}
	if len(path) <= len(dir) || path[:len(dir)] != dir || path[len(dir)] != '/' {
		return wire.Text("log " + path + " is not below " + dir)
	}
	l.fd, err = openLog(l.base, path)
	return err
}

// place says where the log is, and returns dir.
func (l *logFile) place(dir, path string) string {
	if dir == "" || dir == "/" {
		dir = wire.Parent(path)
	}
	l.path, l.base = path, wire.Parent(dir)
	return dir
}

// add takes the beginning of a stream's bytes and says how much of them, and
// whether it wants to be flushed before it takes more.
func (l *logFile) add(stream string, in []byte, eof bool) (used int, full bool) {
	if l.path == "" {
		return len(in), false
	}
	if len(in) == 0 {
		return 0, false
	}
	if l.limit.on() {
		return l.addLimited(stream, in, eof)
	}
	var head [wire.StampLen + len(" stdout ")]byte
	from := len(l.records)
	l.records, used, full = appendRecords(l.records, in, appendHead(head[:0], stream), eof)
	l.journal.take(l.records[from:])
	return used, full
}

func (l *logFile) blocked() bool { return l.err != nil }
func (l *logFile) empty() bool   { return len(l.records) == 0 }

// flush writes what there is; it stops at the first error, exactly where the
// file system did, and goes on from there when it is called again.
func (l *logFile) flush() {
	l.err = nil
	for l.done < len(l.records) {
		n, err := syscall.Write(l.fd, l.records[l.done:])
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			l.err = wire.Fail("write log "+l.path, err)
			return
		}
		l.done += n
		l.written += uint64(n)
		l.where.unseen = true
	}
	l.records, l.done = l.records[:0], 0
}

// reopen goes over to a file newly opened at the log's path: log rotation. On
// an error the old file stays the log, and there is no new one (CRI:
// ReopenContainerLog).
func (l *logFile) reopen() error {
	if l.path == "" {
		return nil
	}
	if err := l.takeBack(); err != nil {
		return err
	}
	fd, err := openLog(l.base, l.path)
	if err != nil {
		return err
	}
	syscall.Close(l.fd)
	l.fd = fd
	l.where = whereabouts{}
	l.limit.nextFile(len(l.records) - l.done)
	l.flush()
	return nil
}

// takeBack removes from the end of the file the record of which a refused
// write has left only the beginning there: a record is never spread over two
// files.
func (l *logFile) takeBack() error {
	start := l.done
	for start > 0 && l.records[start-1] != '\n' {
		start--
	}
	if start == l.done {
		return nil
	}
	var st syscall.Stat_t
	err := syscall.Fstat(l.fd, &st)
	if err == nil {
		err = syscall.Ftruncate(l.fd, max(st.Size-int64(l.done-start), 0))
	}
	if err != nil {
		return wire.Fail("remove an incomplete line from the end of log "+l.path, err)
	}
	l.written -= uint64(l.done - start)
	l.done = start
	return nil
}
