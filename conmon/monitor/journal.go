package monitor

import (
	"strconv"
	"syscall"
	"unsafe"

	"github.com/crius-run/crius/conmon/wire"
)

// journal writes the records of the log to journald as well, each as a datagram of
// journald's native protocol. The container never waits for it: what journald does not
// take at once is kept, up to a bound, and offered again; what exceeds that is lost, and
// so is all that follows until nothing is kept any more. Then the journal is told how
// much is missing.
//
// The socket is not connected: another journald at its path gets what comes next. No
// record is too long for a datagram, so that journald's way for long ones, a sealed file,
// is not needed.
type journal struct {
	fd      int // -1: there is no journal
	address syscall.RawSockaddrUnix
	length  uint32 // of address
	fields  []byte // of every entry

	kept    []byte // whole records that journald has not taken yet, from done on
	done    int
	refused error // why journald did not take the last one; nil: it did
	pause   int   // milliseconds until it is offered again

	losing  bool
	streams [2]struct {
		begun bool // the last record that was taken or kept is not the end of its line
		cut   bool // and that end is lost
		lost  bool // the line goes on, and is lost
	}
	untold uint64 // bytes lost of which the journal does not know yet
	total  uint64 // bytes lost
	until  int64  // uptime at which a dead container's records are given up; 0: it lives
}

const (
	journalRoom  = 256 << 10 // bytes that are kept
	journalQueue = 128 << 10 // bytes that the kernel has for journald, which it doubles
	// firstPause and longestPause are milliseconds. Of a journald that is alive the kernel
	// takes from 10 to 512 records at once, as the sysctl net.unix.max_dgram_qlen says.
	firstPause, longestPause = 10, 5120
	// patience is how many milliseconds the monitor of a dead container stays for journald.
	patience = 5000
)

var noJournal = journal{fd: -1}

// open prepares for the journal of the options, if they have one. It makes the socket,
// which this process may not do later (lockDown).
func (j *journal) open(opt *wire.Options) error {
	if opt.Journal == "" || opt.LogFile == "" {
		return nil
	}
	if len(opt.Journal) >= len(j.address.Path) {
		return wire.Fail("open journal "+opt.Journal, syscall.ENAMETOOLONG)
	}
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return wire.Fail("open journal "+opt.Journal, err)
	}
	_ = syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_SNDBUFFORCE, journalQueue) // whatever the node's default
	j.fd, j.pause = fd, firstPause
	j.place(opt)
	return nil
}

// place prepares all but the socket.
func (j *journal) place(opt *wire.Options) {
	if !j.on() {
		return
	}
	j.address.Family = syscall.AF_UNIX
	for i := range len(opt.Journal) {
		j.address.Path[i] = int8(opt.Journal[i])
	}
	j.length = uint32(unsafe.Offsetof(j.address.Path)) + uint32(len(opt.Journal)) + 1
	for _, field := range opt.JournalFields {
		j.fields = append(append(j.fields, field...), '\n')
	}
	j.kept = make([]byte, 0, journalRoom)
}

func (j *journal) on() bool { return j.fd >= 0 }

// owes reports whether journald has yet to take something.
func (j *journal) owes() bool { return len(j.kept) > 0 || j.untold > 0 }

// take gets records that are new in the log.
func (j *journal) take(records []byte) {
	if !j.on() || len(records) == 0 {
		return
	}
	j.flush()
	for len(records) > 0 {
		size := indexNewline(records) + 1
		j.add(records[:size])
		records = records[size:]
	}
}

func (j *journal) add(record []byte) {
	r := parseRecord(record)
	line := &j.streams[r.stream]
	if line.lost || j.losing {
		j.lose(r)
		return
	}
	if j.untold > 0 { // of the end of a line whose beginning is lost
		j.flush()
	}
	if !j.owes() && j.send(r) || j.keep(record) {
		line.begun = r.partial
		return
	}
	j.losing = true
	j.lose(r)
}

func (j *journal) lose(r parsed) {
	line := &j.streams[r.stream]
	line.cut, line.begun = line.cut || line.begun, false
	line.lost = r.partial
	j.untold += uint64(len(r.content)) + 1
	j.total += uint64(len(r.content)) + 1
}

// keep reports whether there is room for a record.
func (j *journal) keep(record []byte) bool {
	if cap(j.kept)-len(j.kept) < len(record) && j.done > journalRoom/2 {
		j.kept = j.kept[:copy(j.kept, j.kept[j.done:])]
		j.done = 0
	}
	if cap(j.kept)-len(j.kept) < len(record) {
		return false
	}
	j.kept = append(j.kept, record...)
	return true
}

// flush offers journald what it has not taken.
func (j *journal) flush() {
	for j.done < len(j.kept) {
		record := j.kept[j.done:]
		record = record[:indexNewline(record)+1]
		if !j.send(parseRecord(record)) {
			return
		}
		j.done += len(record)
	}
	j.kept, j.done = j.kept[:0], 0
	if j.untold > 0 {
		j.tell()
	}
}

// tell ends the lines that have no end, and says how much is missing.
func (j *journal) tell() {
	for i := range j.streams {
		line := &j.streams[i]
		if line.cut && !j.send(parsed{stream: i}) {
			return
		}
		line.cut = false
	}
	var buf [128]byte
	text := strconv.AppendUint(append(buf[:0], "[crius: "...), j.untold, 10)
	text = append(text, " bytes of output are missing here, which journald did not take]"...)
	if j.send(parsed{stream: notice, content: text}) {
		j.untold, j.losing = 0, false
	}
}

// retry is called when nothing else has happened for a pause.
func (j *journal) retry() {
	j.pause = min(2*j.pause, longestPause)
	j.flush()
}

// settled reports whether journald has taken all of a dead container's output, or has had
// the time for it.
func (j *journal) settled() bool {
	if !j.owes() {
		return true
	}
	if j.until == 0 {
		j.until, j.pause = uptime()+patience, firstPause
	}
	if j.flush(); !j.owes() {
		return true
	}
	j.pause = min(j.pause, patience/50)
	return uptime() >= j.until
}

// giveUp counts as lost what journald has not taken.
func (j *journal) giveUp() {
	for j.done < len(j.kept) {
		record := j.kept[j.done:]
		record = record[:indexNewline(record)+1]
		j.lose(parseRecord(record))
		j.done += len(record)
	}
}

// parsed is a record of the log in its parts.
type parsed struct {
	stream  int // 0: standard output, 1: standard error, or notice
	partial bool
	content []byte
}

// notice is the stream of what crius itself has to say.
const notice = 2

func parseRecord(record []byte) (r parsed) {
	const (
		stream  = wire.StampLen + len(" ")
		tag     = stream + len("stdout ")
		content = tag + len("F ")
	)
	if record[stream+len("std")] == 'e' {
		r.stream = 1
	}
	r.partial, r.content = record[tag] == 'P', record[content:len(record)-1]
	return r
}

// What stands before the content in an entry. Those of conmon and Docker have the same.
var heads = [...][2]string{
	0:      {"PRIORITY=6\nMESSAGE=", "PRIORITY=6\nCONTAINER_PARTIAL_MESSAGE=true\nMESSAGE="},
	1:      {"PRIORITY=3\nMESSAGE=", "PRIORITY=3\nCONTAINER_PARTIAL_MESSAGE=true\nMESSAGE="},
	notice: {"PRIORITY=4\nMESSAGE="},
}

// send reports whether journald has taken an entry. It never waits.
func (j *journal) send(r parsed) bool {
	head, end := heads[r.stream][0], "\n"
	if r.partial {
		head = heads[r.stream][1]
	}
	parts := [4]syscall.Iovec{
		{Base: unsafe.SliceData(j.fields)}, {Base: unsafe.StringData(head)}, {Base: unsafe.SliceData(r.content)}, {Base: unsafe.StringData(end)},
	}
	for i, size := range [4]int{len(j.fields), len(head), len(r.content), len(end)} {
		parts[i].SetLen(size)
	}
	message := syscall.Msghdr{Name: (*byte)(unsafe.Pointer(&j.address)), Namelen: j.length, Iov: &parts[0], Iovlen: 4}
	for {
		_, _, errno := syscall.RawSyscall(sysSendmsg, uintptr(j.fd), uintptr(unsafe.Pointer(&message)), syscall.MSG_DONTWAIT|syscall.MSG_NOSIGNAL)
		if errno == syscall.EINTR {
			continue
		}
		if j.refused = failed(errno); errno == 0 {
			j.pause = firstPause
		}
		return errno == 0
	}
}
