package wire

import "strconv"

// Version is the protocol version of this build. A packet once defined never
// changes its form: later versions add packets, and both sides answer or ignore
// those they do not know.
const Version = 1

// MaxPacket bounds every packet in either direction; MaxText bounds the free
// text in it.
const (
	MaxPacket = 9 << 10
	MaxText   = 8 << 10
)

// MostBehind is the size in bytes of the pipe in which an attached client may leave
// output unread; smaller if the kernel does not let the pipe grow that far: beyond
// fs.pipe-max-size that needs CAP_SYS_RESOURCE. When more than some 40 % of it are unread
// the container waits (Options.AttachWait).
const MostBehind = 4 << 20

// OutputTime is for how many milliseconds after the end of a container its monitor may wait for output
// before it reports the end.
const OutputTime = 8_000

// Verb is the first word of a packet.
type Verb uint8

// From the monitor: events, in this order except for logged, log-discarded,
// journal-lost and log-trouble; every client gets all of them from the start, however late it
// connects.
const (
	Hello        Verb = iota + 1 // hello VERSION STATE
	Created                      // created PID START-TIME: of the container's init
	Failed                       // failed CODE TEXT: CODE is the runtime's exit code, 0 if something else failed
	Exited                       // exited CODE SIGNAL UNIXNANO OOM-KILLS
	Logged                       // logged BYTES: by which the log has grown until now
	LogDiscarded                 // log-discarded BYTES: discarded by the log's limit until now; follows logged if the log has a limit
	JournalLost                  // journal-lost BYTES: that did not reach the journal until now; follows logged if there is a journal

	OK    // ok: the oldest unanswered request is done
	Error // error TEXT: the oldest unanswered request has failed

	Dropped // dropped TEXT: the monitor closes this connection, and why

	Rests // rests BYTES BYTES BYTES: logged, discarded and lost to the journal, final until it wakes
	Wakes // wakes: it no longer rests

	Undead // undead TEXT: processes that could not be killed of the container whose exited follows

	LogTrouble // log-trouble KIND TEXT: what the container writes does not reach its log, or does again; see LogWell

	// From the client: requests, each answered once, in order.
	ReopenLog  // reopen-log
	Resize     // resize WIDTH HEIGHT: of the terminal, in characters
	CloseStdin // close-stdin
	Release    // release: kill the remaining processes, record the exit, exit
	Attach     // attach STREAMS: some of stdin, stdout and stderr, with a space between them
	CountLog   // count-log: report logged now
	Detach     // detach: pass on what the container has written until now, and end the output of this client
	Start      // start: run the command that starts the container, if the monitor has it
	Knocks     // knocks: this client makes a second connection for a moment when it sends a request to a monitor at rest
	Held       // held PID: the container, with that init, is restored and waits; answered when it may run
)

// States in a hello.
const (
	StateCreating = "creating"
	StateRunning  = "running" // created, at least
	StateExited   = "exited"
)

// Kinds of log-trouble.
const (
	LogWell     = iota // none, or no longer
	LogBlocked         // the file system refuses it; the container waits
	LogDetached        // the file is no longer at the log's path
)

// A form is a name, a fixed count of decimal numbers and, for some, free text
// up to the end of the packet; single spaces between them.
type form struct {
	name    string
	numbers int
	text    bool
}

var forms = [...]form{
	Hello:        {"hello", 1, true},
	Created:      {"created", 2, false},
	Failed:       {"failed", 1, true},
	Exited:       {"exited", 4, false},
	Logged:       {"logged", 1, false},
	LogDiscarded: {"log-discarded", 1, false},
	JournalLost:  {"journal-lost", 1, false},
	OK:           {"ok", 0, false},
	Error:        {"error", 0, true},
	Dropped:      {"dropped", 0, true},
	Rests:        {"rests", 3, false},
	Wakes:        {"wakes", 0, false},
	Undead:       {"undead", 0, true},
	LogTrouble:   {"log-trouble", 1, true},
	ReopenLog:    {"reopen-log", 0, false},
	Resize:       {"resize", 2, false},
	CloseStdin:   {"close-stdin", 0, false},
	Release:      {"release", 0, false},
	Attach:       {"attach", 0, true},
	CountLog:     {"count-log", 0, false},
	Detach:       {"detach", 0, false},
	Start:        {"start", 0, false},
	Knocks:       {"knocks", 0, false},
	Held:         {"held", 1, false},
}

func (v Verb) String() string {
	if int(v) < len(forms) {
		return forms[v].name
	}
	return ""
}

// Message is one packet.
type Message struct {
	Verb Verb
	Num  [4]uint64
	Text string
}

// Append appends the packet for m, which must have a verb of this package. It
// truncates the text at MaxText.
func Append(b []byte, m Message) []byte {
	f := forms[m.Verb]
	b = append(b, f.name...)
	for _, n := range m.Num[:f.numbers] {
		b = append(b, ' ')
		b = strconv.AppendUint(b, n, 10)
	}
	if f.text {
		b = append(b, ' ')
		b = append(b, m.Text[:min(len(m.Text), MaxText)]...)
	}
	return b
}

// Parse parses a packet. It accepts exactly what Append can produce.
func Parse(packet []byte) (Message, bool) {
	if len(packet) > MaxPacket {
		return Message{}, false
	}
	word, rest, more := Cut(packet, ' ')
	for v, f := range forms {
		if v == 0 || string(word) != f.name {
			continue
		}
		m := Message{Verb: Verb(v)}
		for i := range f.numbers {
			if !more {
				return Message{}, false
			}
			var ok bool
			word, rest, more = Cut(rest, ' ')
			if m.Num[i], ok = Number(word); !ok {
				return Message{}, false
			}
		}
		if more != f.text || len(rest) > MaxText {
			return Message{}, false
		}
		m.Text = string(rest)
		return m, true
	}
	return Message{}, false
}

// Cut splits b around the first sep, as bytes.Cut does.
func Cut(b []byte, sep byte) (before, after []byte, found bool) {
	for i, c := range b {
		if c == sep {
			return b[:i], b[i+1:], true
		}
	}
	return b, nil, false
}

// Number parses a decimal number as strconv.AppendUint writes it.
func Number(word []byte) (uint64, bool) {
	if len(word) == 0 || len(word) > 1 && word[0] == '0' {
		return 0, false
	}
	var n uint64
	for _, c := range word {
		digit := uint64(c) - '0'
		if digit > 9 || n > (1<<64-1-digit)/10 {
			return 0, false
		}
		n = n*10 + digit
	}
	return n, true
}
