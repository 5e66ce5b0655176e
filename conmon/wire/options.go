package wire

import "strconv"

// Options are all settings of a monitor, on a command line that is readable in
// ps(1).
type Options struct {
	ID       string
	Dir      string // run directory of the container
	PidFile  string // where the runtime writes the pid of the container's init
	ExitFile string
	LogFile  string // empty: output is discarded
	LogDir   string // of the pod, at or above that of LogFile; empty: that of LogFile
	LogRate  uint64 // bytes per second by which the log may grow; 0: no limit
	LogBurst uint64 // bytes by which it may exceed that at once
	LogMost  uint64 // maximum size in bytes of one file of the log; 0: no limit

	Journal       string   // socket of journald; empty: output goes to the log alone
	JournalFields []string // of all journal entries, as NAME=value

	OwnerUID, OwnerGID uint64 // of the container's pipes

	AttachWait uint64 // milliseconds for which the container waits for an attached client that does not read; 0: UsualAttachWait
	RestAfter  uint64 // milliseconds of idleness after which the monitor rests; 0: its default; or NoRest

	Terminal  bool
	Stdin     bool
	StdinOnce bool
	Helpers   bool // the runtime leaves processes behind that die with the container
	Fifos     bool // the runtime opens the container's streams by name, in Dir
	Guest     bool // the pid is a stand-in's: processes in its cgroup are not the container's
	Held      bool // the runtime restores the container, which must not run before it is started

	Start   []string // complete command that starts the container; empty: the monitor does not start it
	Wait    []string // complete command that prints how it ended; empty: its init is a child of the monitor
	Runtime []string // complete command that creates the container
}

// Remote reports whether the container has no process of its own on this
// machine.
func (o *Options) Remote() bool { return len(o.Wait) > 0 }

type stringFlag struct {
	name  string
	value *string
}

type boolFlag struct {
	name  string
	value *bool
}

type numberFlag struct {
	name  string
	value *uint64
}

type listFlag struct {
	name  string
	value *[]string
}

const required = 4

// maxNumber is the size of a number in bits, so that computations fit into 64.
const maxNumber = 40

// UsualAttachWait is the AttachWait of a monitor that was not given one.
const UsualAttachWait = 30_000

// NoRest as RestAfter keeps the monitor from resting.
const NoRest = 1<<maxNumber - 1

// strings returns the flags with a value, required ones first.
func (o *Options) strings() [7]stringFlag {
	return [...]stringFlag{
		{"--id", &o.ID},
		{"--dir", &o.Dir},
		{"--pid-file", &o.PidFile},
		{"--exit-file", &o.ExitFile},
		{"--log-file", &o.LogFile},
		{"--log-dir", &o.LogDir},
		{"--journal", &o.Journal},
	}
}

func (o *Options) bools() [7]boolFlag {
	return [...]boolFlag{
		{"--terminal", &o.Terminal},
		{"--stdin", &o.Stdin},
		{"--stdin-once", &o.StdinOnce},
		{"--helpers", &o.Helpers},
		{"--fifos", &o.Fifos},
		{"--guest", &o.Guest},
		{"--held", &o.Held},
	}
}

// numbers returns the flags that are left out if they are 0.
func (o *Options) numbers() [7]numberFlag {
	return [...]numberFlag{
		{"--log-rate", &o.LogRate},
		{"--log-burst", &o.LogBurst},
		{"--log-most", &o.LogMost},
		{"--owner-uid", &o.OwnerUID},
		{"--owner-gid", &o.OwnerGID},
		{"--attach-wait", &o.AttachWait},
		{"--rest-after", &o.RestAfter},
	}
}

// lists returns the flags that are repeated, once for each item.
func (o *Options) lists() [3]listFlag {
	return [...]listFlag{
		{"--journal-field", &o.JournalFields},
		{"--start", &o.Start},
		{"--wait", &o.Wait},
	}
}

// Args returns the command line that ParseArgs parses.
func (o *Options) Args() []string {
	var args []string
	for _, f := range o.strings() {
		if *f.value != "" {
			args = append(args, f.name+"="+*f.value)
		}
	}
	for _, f := range o.numbers() {
		if *f.value != 0 {
			args = append(args, f.name+"="+strconv.FormatUint(*f.value, 10))
		}
	}
	for _, f := range o.bools() {
		if *f.value {
			args = append(args, f.name)
		}
	}
	for _, f := range o.lists() {
		for _, item := range *f.value {
			args = append(args, f.name+"="+item)
		}
	}
	args = append(args, "--")
	return append(args, o.Runtime...)
}

// ParseArgs parses the result of Args.
func ParseArgs(args []string) (o Options, err error) {
	for i, arg := range args {
		if arg == "--" {
			o.Runtime = args[i+1:]
			return o, o.check()
		}
		if !o.set(arg) {
			return o, Text("unknown argument " + arg)
		}
	}
	return o, Text("no runtime command: the arguments end without --")
}

// Identity returns the id and directory of the container whose monitor has
// these arguments; they may be those of another version, with options that this
// one does not know.
func Identity(args []string) (id, dir string) {
	for _, arg := range args {
		if arg == "--" {
			return id, dir
		}
		switch name, value, _ := cutFlag(arg); name {
		case "--id":
			id = value
		case "--dir":
			dir = value
		}
	}
	return "", "" // not a monitor's: they have no runtime
}

func (o *Options) set(arg string) bool {
	for _, f := range o.bools() {
		if arg == f.name {
			*f.value = true
			return true
		}
	}
	name, value, ok := cutFlag(arg)
	if !ok {
		return false
	}
	for _, f := range o.lists() {
		if name == f.name {
			*f.value = append(*f.value, value)
			return true
		}
	}
	for _, f := range o.strings() {
		if name == f.name {
			*f.value = value
			return true
		}
	}
	for _, f := range o.numbers() {
		if name == f.name {
			n, err := strconv.ParseUint(value, 10, maxNumber)
			*f.value = n
			return err == nil
		}
	}
	return false
}

func (o *Options) check() error {
	if len(o.Runtime) == 0 {
		return Text("no runtime command after --")
	}
	for i, f := range o.strings() {
		if i < required && *f.value == "" {
			return Text(f.name + " is missing")
		}
	}
	return nil
}

func cutFlag(arg string) (name, value string, ok bool) {
	for i := range len(arg) {
		if arg[i] == '=' {
			return arg[:i], arg[i+1:], true
		}
	}
	return arg, "", false
}

// Environ returns a monitor's environment. It tunes the Go runtime: one
// processor, whatever the cgroup allows; garbage collection only when there is
// a lot of garbage; and no huge page of 2 MiB in place of one of 4 KiB, as with
// transparent_hugepage=always.
func Environ() [4]string {
	return [...]string{"GOMAXPROCS=1", "GOGC=off", "GOMEMLIMIT=12MiB", "GODEBUG=disablethp=1,containermaxprocs=0,updatemaxprocs=0"}
}
