package wire

import (
	"strconv"
	"syscall"
)

// Process names a process in a way that a reused pid cannot forge.
type Process struct {
	PID       int    `json:"pid"`
	StartTime uint64 `json:"start_time"` // field 22 of /proc/PID/stat: clock ticks since boot
}

// Find returns the process that has the pid now, including dead but unreaped
// ones.
func Find(pid int) (Process, error) {
	var buf [512]byte
	stat, err := ReadFile(buf[:], "/proc/", strconv.Itoa(pid), "/stat")
	if err != nil {
		return Process{}, Fail("read /proc/"+strconv.Itoa(pid)+"/stat", err)
	}
	start, ok := StatField(stat, 22)
	if !ok {
		return Process{}, Text("/proc/" + strconv.Itoa(pid) + "/stat has no start time")
	}
	return Process{pid, start}, nil
}

// StatField returns a numeric field, 4 or later, from a line of /proc/PID/stat.
// The process chooses the command name, field 2: what follows its last
// parenthesis is the kernel's own.
func StatField(stat []byte, n int) (uint64, bool) {
	end := len(stat) - 1
	for end >= 0 && stat[end] != ')' {
		end--
	}
	if end < 0 {
		return 0, false
	}
	_, rest, more := Cut(stat[end:], ' ')
	for field := 3; field < n && more; field++ {
		_, rest, more = Cut(rest, ' ')
	}
	word, _, _ := Cut(rest, ' ')
	return Number(word)
}

// Rest is what a resting monitor would report.
type Rest struct {
	Logged    uint64 `json:"logged"`    // bytes by which the log has grown
	Discarded uint64 `json:"discarded"` // bytes that exceeded the log's limit

	JournalLost uint64 `json:"journal_lost"` // bytes that journald has not accepted

	Trouble uint64 `json:"log_trouble"` // of the log, as in the message LogTrouble
}

// AppendProcesses appends the content of the file Processes: the monitor and,
// once it exists, the container's init; for a resting monitor also the counts
// of its log.
func AppendProcesses(b []byte, monitor, container Process, rest *Rest) []byte {
	b = strconv.AppendInt(append(b, `{"version":`...), Version, 10)
	b = appendProcess(append(b, `,"monitor":`...), monitor)
	b = appendProcess(append(b, `,"container":`...), container)
	if rest != nil {
		b = strconv.AppendUint(append(b, `,"rests":{"logged":`...), rest.Logged, 10)
		b = strconv.AppendUint(append(b, `,"discarded":`...), rest.Discarded, 10)
		b = strconv.AppendUint(append(b, `,"journal_lost":`...), rest.JournalLost, 10)
		b = strconv.AppendUint(append(b, `,"log_trouble":`...), rest.Trouble, 10)
		b = append(b, '}')
	}
	return append(b, "}\n"...)
}

func appendProcess(b []byte, p Process) []byte {
	b = strconv.AppendInt(append(b, `{"pid":`...), int64(p.PID), 10)
	b = strconv.AppendUint(append(b, `,"start_time":`...), p.StartTime, 10)
	return append(b, '}')
}

// Exit is how a container's init ended.
type Exit struct {
	Code     int   // its exit code, or 128 + Signal
	Signal   int   // the signal that ended it, 0 if none did
	Sec      int64 // Unix time
	Nsec     int
	OOMKills uint64 // processes of the container killed because memory ran out
	// OOMSeen of them were noticed before the end, the last one at the Unix time OOMSeenAt.
	OOMSeen   uint64
	OOMSeenAt int64

	Message string // about processes that could not be killed; it needs no quoting
}

// ExitOf converts a wait status.
func ExitOf(status syscall.WaitStatus) Exit {
	if status.Signaled() {
		return Exit{Code: 128 + int(status.Signal()), Signal: int(status.Signal())}
	}
	return Exit{Code: status.ExitStatus()}
}

// Packet returns the packet that reports e, without its message.
func (e Exit) Packet() Message {
	nano := uint64(e.Sec)*1e9 + uint64(e.Nsec)
	return Message{Verb: Exited, Num: [4]uint64{uint64(e.Code), uint64(e.Signal), nano, e.OOMKills}}
}

// AppendDocument appends the content of the exit file. The id must need no
// quoting.
func (e Exit) AppendDocument(b []byte, id string) []byte {
	b = strconv.AppendInt(append(b, `{"version":`...), Version, 10)
	b = append(append(append(b, `,"id":"`...), id...), '"')
	b = strconv.AppendInt(append(b, `,"exit_code":`...), int64(e.Code), 10)
	b = strconv.AppendInt(append(b, `,"signal":`...), int64(e.Signal), 10)
	b = append(AppendStamp(append(b, `,"finished_at":"`...), e.Sec, e.Nsec), '"')
	b = strconv.AppendUint(append(b, `,"oom_kills":`...), e.OOMKills, 10)
	if e.OOMSeen > 0 {
		b = strconv.AppendUint(append(b, `,"oom_seen":{"kills":`...), e.OOMSeen, 10)
		b = append(strconv.AppendInt(append(b, `,"at":`...), e.OOMSeenAt, 10), '}')
	}
	if e.Message != "" {
		b = append(append(append(b, `,"message":"`...), e.Message...), '"')
	}
	return append(b, "}\n"...)
}
