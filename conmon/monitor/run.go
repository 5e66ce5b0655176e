package monitor

import (
	"strconv"
	"syscall"
	"unsafe"

	"github.com/crius-run/crius/conmon/wire"
)

// Run is the whole of crius-conmon. The result is the exit code of the process.
//
// It expects to be started by conmon.Launch: the listening socket as descriptor
// wire.ListenFD, the environment for the runtime in the file wire.EnvironFD.
func Run() int {
	if dir, ok := syscall.Getenv(wire.HoldDir); ok {
		return hold(dir)
	}
	growStack(false)
	environ := "/proc/self/fd/" + itoa(wire.EnvironFD)
	older := syscall.Access(environ, 0) == syscall.ENOENT // is the server: there is nowhere to put notes
	if older {
		environ = "/proc/self/environ"
	}
	args, env, err := commandLine(environ)
	if err != nil {
		return usage(err)
	}
	if len(env) > 0 && env[0] == atRest {
		return goOn(args, env[1:])
	}
	if err := closeInherited(); err != nil {
		return usage(wire.Fail("close inherited descriptors", err))
	}
	if len(args) > 0 && args[0] == forwardVerb {
		return forward(args[1:])
	}
	if len(args) > 0 && pathVerb(args[0]) != nil {
		return answer(args[1:], pathVerb(args[0]))
	}
	opt, err := wire.ParseArgs(args)
	if err != nil {
		return usage(err)
	}
	m := newMonitor(opt, env)
	if older {
		m.patience = never
	}
	clearNotes()
	if err := m.begin(); err != nil {
		m.accept(0) // Launch
		m.fail(0, err.Error())
		return 1
	}
	m.loop()
	return 0
}

// goOn is the whole of a further life of a monitor that has rested.
func goOn(args, notes []string) int {
	opt, err := wire.ParseArgs(args)
	m := newMonitor(opt, nil)
	clearNotes()
	if err == nil {
		err = m.resume(notes)
	}
	if err != nil {
		return usage(err)
	}
	m.loop()
	return 0
}

func usage(err error) int {
	text := "crius-conmon: " + err.Error() + "\n" +
		"This is an internal helper of crius, which starts it once for each container; do not run it by hand.\n"
	_, _ = syscall.Write(2, []byte(text))
	return 2
}

// begin is everything up to the start of the runtime.
func (m *monitor) begin() (err error) {
	if err := syscall.SetNonblock(m.listener, true); err != nil {
		return wire.Fail("set up socket", err)
	}
	if m.poll.fd, err = syscall.EpollCreate1(syscall.EPOLL_CLOEXEC); err != nil {
		return wire.Fail("open epoll", err)
	}
	if err := m.poll.add(m.listener, syscall.EPOLLIN, connected, 0); err != nil {
		return wire.Fail("watch socket", err)
	}
	if m.self, err = wire.Find(syscall.Getpid()); err != nil {
		return err
	}
	if err := m.writeProcesses(nil); err != nil {
		return err
	}
	if !m.opt.Fifos { // those who make the container and stay are the server's orphans
		if err := becomeSubreaper(); err != nil {
			return wire.Fail("become subreaper", err)
		}
	}
	if err := m.log.open(m.opt.LogDir, m.opt.LogFile); err != nil {
		return err
	}
	if err := m.log.journal.open(&m.opt); err != nil { // the log has it all
		m.complaints.add(err)
	}
	return m.start()
}

// start runs the runtime's create.
func (m *monitor) start() (err error) {
	if m.opt.Terminal {
		if err := m.console.listen(m.opt.Dir); err != nil {
			return err
		}
	}
	if m.opt.Fifos {
		if m.stdin, err = m.fifos.open(m.opt.Dir, m.opt.Stdin); err != nil {
			return err
		}
	}
	child, err := m.openStdio()
	if err != nil {
		return err
	}
	if len(m.opt.Start) > 0 && !m.opt.Terminal {
		m.remote.stdio = child // which the container gets when it is started
	} else {
		defer child.close()
	}
	hearSignals()
	if err := m.spawn(child); err != nil {
		return err
	}
	// Both are inherited, and neither is meant for a container.
	ignoreSignals()
	protectFromOOM()
	return nil
}

// protectFromOOM asks the OOM killer to take anybody else, as far as this
// process may: lowering the score takes CAP_SYS_RESOURCE.
func protectFromOOM() {
	fd, err := wire.Open(syscall.O_WRONLY, 0, "/proc/self/oom_score_adj")
	if err != nil {
		return
	}
	_, _ = syscall.Write(fd, []byte("-1000"))
	syscall.Close(fd)
}

// commandLine is what this process was started with: its arguments, and the
// environment for the runtime. This process's own, of which the Go runtime makes
// a copy, is another.
func commandLine(environ string) (args, env []string, err error) {
	if args, env, err = readWords("/proc/self/cmdline", environ); err != nil {
		return nil, nil, err
	}
	for _, own := range wire.Environ() {
		env = without(env, own)
	}
	return args[min(1, len(args)):], env, nil
}

// readWords reads two files of NUL-terminated words, whose pages they share.
func readWords(path, other string) (ours, others []string, err error) {
	const usual, most = 64 << 10, 4 << 20
	for size := usual; ; size *= 8 {
		room := make([]byte, size) // of which only the pages that are filled will count
		first, err := wire.ReadFile(room, path)
		if err != nil {
			return nil, nil, wire.Fail("read "+path, err)
		}
		second, err := wire.ReadFile(room[len(first):], other)
		if err == nil && len(first)+len(second) == size {
			if size < most {
				continue
			}
			err = syscall.E2BIG
		}
		if err != nil {
			return nil, nil, wire.Fail("read "+other, err)
		}
		return words(first), words(second), nil
	}
}

// words cuts text up, without a copy.
func words(text []byte) []string {
	count := 0
	for _, c := range text {
		if c == 0 {
			count++
		}
	}
	list := make([]string, 0, count)
	for len(text) > 0 {
		var word []byte
		word, text, _ = wire.Cut(text, 0)
		list = append(list, view(word))
	}
	return list
}

// view is a string that shares the bytes of b, which must not change as long as
// it is used.
func view(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

func without(list []string, word string) []string {
	kept := list[:0]
	for _, w := range list {
		if w != word {
			kept = append(kept, w)
		}
	}
	return kept
}

// stackRoom is more than this program ever needs of its stack.
const stackRoom = 20 << 10

// growStack makes the stack of the calling goroutine large at once, by the room
// that it claims and does not use. Grown by doubling, as the runtime does, it
// would leave behind a pool of stacks of each size on the way, some 50 KiB.
//
//go:noinline
func growStack(never bool) {
	if never {
		var room [stackRoom]byte
		_, _ = syscall.Read(-1, room[:])
	}
}

// trimStack gives back what lies beneath the caller in its stack: the start of a
// container needs it, and nothing after that.
func trimStack() {
	growStack(false) // so that it is there, whatever has become of the stack
	const near = 1 << 10
	var mark byte
	here, page := uintptr(unsafe.Pointer(&mark)), uintptr(syscall.Getpagesize())
	low, high := (here-stackRoom+page-1)/page*page, (here-near)/page*page
	if low < high { // not where pages are large
		_, _, _ = syscall.RawSyscall(syscall.SYS_MADVISE, low, high-low, syscall.MADV_DONTNEED)
	}
}

// discard gives whole pages of b back to the kernel; they read as zeros.
func discard(b []byte) {
	page := uintptr(syscall.Getpagesize())
	if len(b) == 0 {
		return
	}
	if over := uintptr(unsafe.Pointer(&b[0])) % page; over != 0 {
		b = b[min(page-over, uintptr(len(b))):]
	}
	if b = b[:uintptr(len(b))/page*page]; len(b) > 0 {
		_ = syscall.Madvise(b, syscall.MADV_DONTNEED)
	}
}

func itoa(n int) string { return strconv.Itoa(n) }
