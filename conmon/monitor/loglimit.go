package monitor

import (
	"strconv"

	"github.com/crius-run/crius/conmon/wire"
)

// logLimit bounds how fast a log grows: records take their bytes from a bucket, which
// fills up again by rate. One that finds too little there is discarded, and so is all
// that follows, until there is enough for a second; then the log says how much is
// missing. So a container that writes without end has whole passages in its log, and a
// gap is told about once a second.
//
// A line is logged as a whole or ends early: no reader takes what comes after a gap for
// its rest.
type logLimit struct {
	rate, burst int64 // bytes per second, and bytes in a full bucket; rate 0: no limit
	left        int64 // in the bucket, in thousandths of a byte; a notice may make it less than nothing
	at          int64 // uptime at which it had that

	dropping bool
	streams  [2]struct {
		begun bool // the last record that was kept is not the end of its line
		lost  bool // the line goes on, and is discarded
	}
	untold uint64 // bytes discarded of which the log does not say so yet
	total  uint64 // bytes discarded
}

func newLogLimit(opt wire.Options) logLimit {
	rate, burst := int64(opt.LogRate), int64(opt.LogBurst)
	return logLimit{rate: rate, burst: burst, left: burst * perByte, at: uptime()}
}

// perByte is by what left is divided: the clock has milliseconds.
const perByte = 1000

// maxNotice is more than the record takes that tells of a gap.
const maxNotice = 256

// refill adds what has come since the last time.
func (l *logLimit) refill(now int64) {
	full, passed := l.burst*perByte, now-l.at
	l.at = now
	if passed > full/l.rate {
		l.left = full
	} else {
		l.left = min(l.left+passed*l.rate, full)
	}
	if l.left >= min(l.burst, max(l.rate, int64(maxRecord+maxNotice)))*perByte {
		l.dropping = false
	}
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
		l.dropping = l.dropping || int64(size)*perByte > l.left
		if !line.lost && !l.dropping {
			to += copy(log[to:], record)
			l.left -= int64(size) * perByte
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
	log = append(appendHead(log, "stderr"), "F [crius: "...)
	log = strconv.AppendUint(log, l.untold, 10)
	log = append(log, " bytes of this log were discarded, which is limited to "...)
	log = strconv.AppendInt(log, l.rate, 10)
	log = append(log, " bytes per second (runtime.container_log_rate)]\n"...)
	l.left -= int64(len(log)-before) * perByte
	l.untold = 0
	return log
}

// addLimited is add for a log with a limit.
func (l *logFile) addLimited(stream string, in []byte, eof bool) (used int, full bool) {
	l.limit.refill(uptime())
	if l.limit.untold > 0 && !l.limit.dropping {
		if cap(l.records)-len(l.records) < maxNotice {
			return 0, true
		}
		l.records = l.limit.notice(l.records)
	}
	var head [wire.StampLen + len(" stdout ")]byte
	common := appendHead(head[:0], stream)
	from, number := len(l.records), 0
	if stream == "stderr" {
		number = 1
	}
	l.records, used, full = appendRecords(l.records, in, common, eof)
	l.records = l.limit.cut(l.records, from, len(common), number)
	return used, full
}

// conclude tells of a gap that nothing follows, or not yet.
func (l *logFile) conclude() {
	if l.limit.untold > 0 && !l.blocked() && cap(l.records)-len(l.records) >= maxNotice {
		l.records = l.limit.notice(l.records)
		l.flush()
	}
}
