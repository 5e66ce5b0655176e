package monitor

import (
	"strconv"
	"syscall"

	"github.com/crius-run/crius/conmon/wire"
)

// logLimit bounds how fast a log grows, and how large one file of it gets. Records take
// their bytes from a bucket, which fills up again by rate. One that finds too little
// there, or in the file, is discarded, and so is all that follows, until there is enough
// for a second, or another file; then the log says how much is missing. So a container
// that writes without end has whole passages in its log, and a gap is told about once a
// second. A file that is full says so once.
//
// A line is logged as a whole or ends early: no reader takes what comes after a gap for
// its rest.
type logLimit struct {
	rate, burst int64 // bytes per second, and bytes in a full bucket; rate 0: any
	left        int64 // in the bucket, in thousandths of a byte; a notice may make it less than nothing
	at          int64 // uptime at which it had that
	most, size  int64 // bytes that a file may have, 0: any; and that it has
	counted     int64 // uptime at which the file was last asked for its size

	dropping bool
	filled   bool // the last gap began since the file was full, not the bucket empty
	said     bool // the file says that it is full
	streams  [2]struct {
		begun bool // the last record that was kept is not the end of its line
		lost  bool // the line goes on, and is discarded
	}
	untold uint64 // bytes discarded of which the log does not say so yet
	total  uint64 // bytes discarded
}

func newLogLimit(opt wire.Options) logLimit {
	rate, burst := int64(opt.LogRate), int64(opt.LogBurst)
	return logLimit{rate: rate, burst: burst, left: burst * perByte, at: uptime(), most: int64(opt.LogMost)}
}

func (l *logLimit) on() bool { return l.rate > 0 || l.most > 0 }

// nextFile is called when a file is opened that gets what is not written yet, or when the file
// turns out to have only so much.
func (l *logLimit) nextFile(size int) {
	l.size, l.said = int64(size), false
}

// perByte is by what left is divided: the clock has milliseconds.
const perByte = 1000

// maxNotice is more than the record takes that tells of a gap.
const maxNotice = 256

// room is for the longest record behind a notice.
const room = int64(maxRecord + maxNotice)

// recount asks a file that is full how much it has, once a second: somebody may have emptied it,
// and whoever rotates logs by their size would never give it a successor.
func (l *logFile) recount(now int64) {
	if !l.limit.fills(room) || now-l.limit.counted < silence {
		return
	}
	l.limit.counted = now
	var st syscall.Stat_t
	if err := syscall.Fstat(l.fd, &st); err != nil {
		return
	}
	if size := st.Size + int64(len(l.records)-l.done); size < l.limit.size {
		l.limit.nextFile(int(size))
	}
}

// refill adds what has come since the last time, and ends a gap if that is enough.
func (l *logLimit) refill(now int64) {
	if l.rate > 0 {
		full, passed := l.burst*perByte, now-l.at
		l.at = now
		if passed > full/l.rate {
			l.left = full
		} else {
			l.left = min(l.left+passed*l.rate, full)
		}
	}
	if l.fits(min(l.burst, max(l.rate, room))) && !l.fills(room) {
		l.dropping = false
	}
}

// fits reports whether so many bytes are in the bucket, fills whether the file has no
// room for them.
func (l *logLimit) fits(bytes int64) bool  { return l.rate == 0 || bytes*perByte <= l.left }
func (l *logLimit) fills(bytes int64) bool { return l.most > 0 && l.size+bytes > l.most }

func (l *logLimit) take(bytes int) {
	l.left -= int64(bytes) * perByte
	l.size += int64(bytes)
}

// cut removes from the end of log, where records of one stream begin at from, those for
// which too little is left. Head is the length of what they have in common.
func (l *logLimit) cut(log []byte, from, head int, stream int) []byte {
	line := &l.streams[stream]
	to := from
	for at := from; at < len(log); {
		size := indexNewline(log[at:]) + 1
		record := log[at : at+size]
		at += size
		whole := record[head] == 'F'
		if filled := l.fills(int64(size)); !l.dropping && (filled || !l.fits(int64(size))) {
			l.dropping, l.filled = true, filled
		}
		if !line.lost && !l.dropping {
			to += copy(log[to:], record)
			l.take(size)
			line.begun = !whole
			continue
		}
		l.untold += uint64(size)
		l.total += uint64(size)
		line.lost = !whole
		if line.begun { // its beginning is in the log
			line.begun = false
			to += copy(log[to:], record[:head])
			to += copy(log[to:], "F \n")
		}
	}
	return log[:to]
}

// notice appends the record that tells of a gap.
func (l *logLimit) notice(log []byte) []byte {
	before := len(log)
	option, limit := "runtime.container_log_rate", l.rate
	if l.filled {
		option, limit = "runtime.container_log_max_size", l.most
	}
	log = append(appendHead(log, "stderr"), "F [crius: "...)
	log = strconv.AppendUint(log, l.untold, 10)
	log = append(log, " bytes of this log were discarded for "...)
	log = append(append(log, option...), " = "...)
	log = append(strconv.AppendInt(log, limit, 10), "]\n"...)
	l.take(len(log) - before)
	l.untold = 0
	return log
}

// addLimited is add for a log with a limit.
func (l *logFile) addLimited(stream string, in []byte, eof bool) (used int, full bool) {
	number := 0
	if stream == "stderr" {
		number = 1
	}
	line := &l.limit.streams[number]
	if line.lost { // the gap lasts as long as its line, and is told behind that
		if end := indexNewline(in) + 1; 0 < end && end < len(in) {
			if used, full = l.addLimited(stream, in[:end], false); used < end {
				return used, full
			}
			used, full = l.addLimited(stream, in[end:], eof)
			return end + used, full
		}
	}
	now := uptime()
	l.recount(now)
	l.limit.refill(now)
	if l.limit.untold > 0 && !l.limit.dropping && !line.lost {
		if cap(l.records)-len(l.records) < maxNotice {
			return 0, true
		}
		l.records = l.limit.notice(l.records)
	}
	var head [wire.StampLen + len(" stdout ")]byte
	common := appendHead(head[:0], stream)
	from := len(l.records)
	l.records, used, full = appendRecords(l.records, in, common, eof)
	l.journal.take(l.records[from:])
	l.records = l.limit.cut(l.records, from, len(common), number)
	return used, full
}

// owes reports whether the log has to tell of a gap. How much more is missing of a file
// that is full and says so, the next file tells.
func (l *logLimit) owes() bool { return l.untold > 0 && !(l.filled && l.said) }

// conclude tells of a gap that nothing follows, or not yet.
func (l *logFile) conclude() {
	if l.limit.owes() && !l.blocked() && cap(l.records)-len(l.records) >= maxNotice {
		l.records = l.limit.notice(l.records)
		l.limit.said = l.limit.filled
		l.flush()
	}
}
