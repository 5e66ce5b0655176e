// Package rest lets a program wait without its memory.
//
// A waiting Go process keeps about half a megabyte for the Go runtime: heap,
// tables, stacks, threads. Until gives that back. A few instructions of
// assembly wait on the kernel's own stack, with 16 KiB of private memory in
// total; when there is something to do, the program begins again at its first
// instruction.
//
// An execve(2) of its own program would have the same effect, but not for a
// process that must not be able to do that (see conmon/monitor), and it is
// fatal if it fails late.
//
// The package works for a program that is linked statically and at a fixed
// address, as the Go linker does without cgo, on amd64. Elsewhere Until returns
// an error.
package rest

import (
	"cmp"
	"strconv"
	"syscall"
	"unsafe"

	"github.com/crius-run/crius/conmon/wire"
)

// Until ends the program and leaves its process waiting for an event of the
// epoll descriptor. Then the program starts again, without any of its
// variables. It keeps what belongs to the process: pid, children, open
// descriptors, arguments, environment, ignored signals, seccomp filters. It
// must have written to a file what else it needs. Most signals stay blocked
// from then on.
//
// Events of descriptors that are watched edge-triggered have been consumed by
// then.
//
// Until must be called on the main thread, while no other goroutine works. It
// returns only if it cannot begin, with everything unchanged.
func Until(epoll int) error {
	if !supported {
		return wire.Text("the program cannot rest on this architecture")
	}
	if syscall.Gettid() != syscall.Getpid() {
		return wire.Text("only the main thread can rest")
	}
	p, err := newPlan(epoll)
	if err != nil {
		return wire.Fail("rest", err)
	}
	resetSignals()
	enter(p)
	panic("unreachable")
}

// plan is the input of enter. It is in memory unknown to Go.
type plan struct {
	stack uintptr // the stack pointer at the program's start
	entry uintptr // the program's first instruction
	epoll uintptr

	// The threads exit one after the other, by a signal, until one is left.
	pid   uintptr
	tasks uintptr // descriptor of /proc/self/task, whose link count is the number of threads plus two
	leave action  // on the signal

	before [3]call    // while there are other threads
	after  [most]call // when there are none

	// The rest of the last page of the data must read as zeros; the file has
	// something else there.
	tail, tailSize uintptr

	// Arguments to which calls point.
	signal, blocked uint64 // masks: the signal alone, and the signals blocked from then on
	ignore          action
	noStack         [3]uintptr // stack_t: no stack for signal handlers
}

const (
	most      = 80  // maximum number of calls, including the one that ends the list
	leaveWith = 64  // the last signal, which nothing else uses
	scratch   = 512 // bytes of the stack that enter uses
)

// call is a system call; number -1 ends a list.
type call struct {
	number int
	args   [4]uintptr
}

// action is the kernel's struct sigaction.
type action struct{ handler, flags, restorer, mask uintptr }

// allowed are the signals that are not blocked: those by which the kernel and
// the Go runtime report faults, and the one that ends threads. From Until until
// the runtime has started again, the handlers of all others are not installed;
// by default they would end the process.
const allowed = 1<<(syscall.SIGILL-1) | 1<<(syscall.SIGTRAP-1) | 1<<(syscall.SIGABRT-1) | 1<<(syscall.SIGBUS-1) |
	1<<(syscall.SIGFPE-1) | 1<<(syscall.SIGSEGV-1) | 1<<(syscall.SIGSYS-1) | 1<<(syscall.SIGURG-1) | 1<<(leaveWith-1)

const (
	sigBlock, sigSetMask = 0, 2
	defaultAction        = 0          // SIG_DFL
	ignored              = 1          // SIG_IGN
	onStack              = 0x08000000 // SA_ONSTACK
	hasRestorer          = 0x04000000 // SA_RESTORER, which amd64 requires
	noAltStack           = 2          // SS_DISABLE
	maskSize             = 8          // bytes
)

func newPlan(epoll int) (*plan, error) {
	var buf [1024]byte
	vector, err := wire.ReadFile(buf[:], "/proc/self/auxv")
	if err != nil {
		return nil, wire.Fail("read /proc/self/auxv", err)
	}
	entry, dataEnd := program(vector)
	if entry == 0 || dataEnd == 0 {
		return nil, wire.Text("the program is not linked statically")
	}
	stat, err := wire.ReadFile(buf[:], "/proc/self/stat")
	if err != nil {
		return nil, wire.Fail("read /proc/self/stat", err)
	}
	stack, known := wire.StatField(stat, 28)
	if !known || stack == 0 {
		return nil, wire.Text("/proc/self/stat does not say where the stack is")
	}
	var mask uint64
	_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, sigBlock, 0, uintptr(unsafe.Pointer(&mask)), maskSize, 0, 0)
	if mask&(1<<(leaveWith-1)) != 0 { // as in the process that started the program
		return nil, wire.Text("the signal that ends threads is blocked")
	}
	size := unsafe.Sizeof(plan{})
	// Shared, so that the kernel does not merge it with its neighbours.
	memory, err := mmap(size, syscall.MAP_ANON|syscall.MAP_SHARED)
	if err != nil {
		return nil, wire.Fail("map memory", err)
	}
	p := (*plan)(memory)
	*p = plan{
		stack: uintptr(stack), entry: entry, epoll: uintptr(epoll),
		pid:    uintptr(syscall.Getpid()),
		leave:  action{flags: onStack | hasRestorer}, // enter knows the handler
		signal: 1 << (leaveWith - 1), blocked: ^uint64(allowed),
		ignore: action{handler: ignored}, noStack: [3]uintptr{0, noAltStack, 0},
		tail: dataEnd, tailSize: -dataEnd & (pageSize() - 1),
	}
	if err := p.fill(); err != nil {
		_, _, _ = syscall.RawSyscall(syscall.SYS_MUNMAP, uintptr(memory), size, 0)
		return nil, err
	}
	return p, nil
}

func mmap(size uintptr, flags uintptr) (unsafe.Pointer, error) {
	at, _, errno := syscall.Syscall6(syscall.SYS_MMAP, 0, size, syscall.PROT_READ|syscall.PROT_WRITE, flags, ^uintptr(0), 0)
	if errno != 0 {
		return nil, errno
	}
	return *(*unsafe.Pointer)(unsafe.Pointer(&at)), nil
}

// header is an Elf64_Phdr.
type header struct {
	kind, flags uint32
	_, address  uint64
	_, fileSize uint64
	_, _        uint64
}

// program finds, in what the kernel has passed to the program, its entry point
// and the end of the part of its data that is in the file; zero for a program
// with a dynamic linker.
func program(vector []byte) (entry, dataEnd uintptr) {
	const atHeaders, atCount, atBase, atEntry, pair = 3, 5, 7, 9, 16
	var value [atEntry + 1]uintptr
	for ; len(vector) >= pair; vector = vector[pair:] {
		if p := (*[2]uint64)(unsafe.Pointer(&vector[0])); p[0] < uint64(len(value)) {
			value[p[0]] = uintptr(p[1])
		}
	}
	if value[atHeaders] == 0 || value[atBase] != 0 {
		return 0, 0
	}
	const load, writable = 1, 2
	at := *(**header)(unsafe.Pointer(&value[atHeaders]))
	for _, h := range unsafe.Slice(at, value[atCount]) {
		if h.kind == load && h.flags&writable != 0 {
			dataEnd = max(dataEnd, uintptr(h.address+h.fileSize))
		}
	}
	return value[atEntry], dataEnd
}

// fill writes the calls into the plan.
func (p *plan) fill() error {
	address := func(of unsafe.Pointer) uintptr { return uintptr(of) } // it does not move
	p.before = [...]call{
		{syscall.SYS_RT_SIGACTION, [4]uintptr{leaveWith, address(unsafe.Pointer(&p.leave)), 0, maskSize}},
		{syscall.SYS_RT_SIGPROCMASK, [4]uintptr{sigBlock, address(unsafe.Pointer(&p.signal)), 0, maskSize}},
		{number: -1},
	}
	var text [16 << 10]byte
	maps, err := wire.ReadFile(text[:], "/proc/self/maps")
	if err != nil || len(maps) == len(text) {
		return wire.Fail("read /proc/self/maps", cmp.Or(err, error(syscall.E2BIG)))
	}
	tasks, err := wire.Open(syscall.O_RDONLY|syscall.O_DIRECTORY, 0, "/proc/self/task")
	if err != nil {
		return wire.Fail("open /proc/self/task", err)
	}
	p.tasks = uintptr(tasks)
	calls := append(p.after[:0:most-1],
		call{syscall.SYS_RT_SIGACTION, [4]uintptr{leaveWith, address(unsafe.Pointer(&p.ignore)), 0, maskSize}},
		call{syscall.SYS_RT_SIGPROCMASK, [4]uintptr{sigSetMask, address(unsafe.Pointer(&p.blocked)), 0, maskSize}},
		call{syscall.SYS_SIGALTSTACK, [4]uintptr{address(unsafe.Pointer(&p.noStack))}},
		call{syscall.SYS_CLOSE, [4]uintptr{p.tasks}},
	)
	for len(maps) > 0 && len(calls) < cap(calls) {
		var line []byte
		line, maps, _ = wire.Cut(maps, '\n')
		m, ok := parse(line)
		if !ok {
			syscall.Close(tasks)
			return wire.Text("unknown line in /proc/self/maps: " + string(line))
		}
		if clear, needed := p.clear(m); needed {
			calls = append(calls, clear)
		}
	}
	if len(maps) > 0 {
		syscall.Close(tasks)
		return wire.Text("too many mappings")
	}
	p.after[len(calls)].number = -1
	return nil
}

// mapping is a line of /proc/self/maps.
type mapping struct {
	start, end uintptr
	name       string
}

func parse(line []byte) (m mapping, ok bool) {
	limits, rest, _ := wire.Cut(line, ' ')
	start, end, ok := wire.Cut(limits, '-')
	if !ok {
		return m, false
	}
	from, err := strconv.ParseUint(string(start), 16, 64)
	to, err2 := strconv.ParseUint(string(end), 16, 64)
	for range 4 { // permissions, offset, device, inode
		_, rest, ok = wire.Cut(rest, ' ')
	}
	for len(rest) > 0 && rest[0] == ' ' {
		rest = rest[1:]
	}
	return mapping{uintptr(from), uintptr(to), string(rest)}, err == nil && err2 == nil && ok
}

// clear returns the call that restores a mapping to its state at the program's
// start: as in the file, zero, or unmapped.
func (p *plan) clear(m mapping) (c call, needed bool) {
	forget := func(start, end uintptr) call {
		return call{syscall.SYS_MADVISE, [4]uintptr{start, end - start, syscall.MADV_DONTNEED}}
	}
	page := pageSize()
	here := uintptr(unsafe.Pointer(p))
	zeros := (p.tail + page - 1) &^ (page - 1) // where the program's uninitialized variables begin
	switch {
	case here >= m.start && here < m.end:
		return c, false // enter unmaps it
	case m.name == "[stack]":
		low := (p.stack - scratch) &^ (page - 1)
		return forget(m.start, low), low > m.start
	case len(m.name) > 0 && m.name[0] == '/', m.start == zeros:
		return forget(m.start, m.end), true
	case len(m.name) > 0 && (len(m.name) < 5 || m.name[:5] != "[anon"):
		return c, false // the kernel's
	}
	return call{syscall.SYS_MUNMAP, [4]uintptr{m.start, m.end - m.start}}, true
}

// resetSignals removes the handlers that the runtime has installed.
func resetSignals() {
	for s := uintptr(1); s <= leaveWith; s++ {
		var now action
		_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, s, 0, uintptr(unsafe.Pointer(&now)), maskSize, 0, 0)
		if now.handler > ignored {
			none := action{handler: defaultAction}
			_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, s, uintptr(unsafe.Pointer(&none)), 0, maskSize, 0, 0)
		}
	}
}

func pageSize() uintptr { return uintptr(syscall.Getpagesize()) }
