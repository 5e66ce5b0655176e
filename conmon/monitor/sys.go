package monitor

import (
	"strconv"
	"syscall"
	"unsafe"

	"github.com/crius-run/crius/conmon/wire"
)

// The system calls that package syscall lacks. Numbers from 403 on are the same
// on every architecture.
const (
	sysPidfdSendSignal = 424
	sysPidfdOpen       = 434
	sysCloseRange      = 436

	prSetChildSubreaper = 36
	setPipeSize         = 1031
	getPipeSize         = 1032
	waitNoReap          = 0x1000000
	clockRealtime       = 0
	clockMonotonic      = 1

	// edgeTriggered is syscall.EPOLLET with the sign it has in an event.
	edgeTriggered = 1 << 31
)

func becomeSubreaper() error {
	_, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, prSetChildSubreaper, 1, 0)
	return failed(errno)
}

// closeInherited closes what this process was born with and has no use for: it
// could reach a container (CVE-2024-21626), and whoever waits for its end would
// wait for the monitor's.
func closeInherited() error {
	syscall.CloseOnExec(wire.ListenFD)
	syscall.CloseOnExec(wire.EnvironFD)
	if _, _, errno := syscall.RawSyscall(sysCloseRange, wire.EnvironFD+1, 1<<31-1, 0); errno == 0 {
		return nil
	}
	open, err := numbersIn("/proc/self/fd") // before Linux 5.9
	for _, fd := range open {
		if fd > wire.EnvironFD {
			syscall.Close(fd)
		}
	}
	return err
}

// sigaction is the kernel's struct: handler, flags, restorer, mask. The mask has
// 64 bits, which are two words on 32-bit architectures.
type sigaction [5]uintptr

// Handlers that the kernel itself provides. They survive exec.
const (
	byDefault = 0 // SIG_DFL
	ignored   = 1 // SIG_IGN
)

// ignoreSignals makes this process deaf to every signal a service manager or a
// terminal might send. It must not be called before the runtime has been
// started, which would be as deaf.
func ignoreSignals() {
	for _, s := range [...]syscall.Signal{
		syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGPIPE, syscall.SIGALRM,
		syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGTSTP, syscall.SIGTTIN, syscall.SIGTTOU, syscall.SIGXFSZ,
	} {
		setSignal(s, &sigaction{ignored}, nil)
	}
}

// hearSignals undoes what the server has inherited (from nohup, from a shell's
// &) and passed on: containers begin with no signal ignored.
func hearSignals() {
	const last = 64
	for s := syscall.Signal(1); s <= last; s++ {
		var now sigaction
		if setSignal(s, nil, &now); now[0] == ignored {
			setSignal(s, &sigaction{byDefault}, nil)
		}
	}
}

func setSignal(s syscall.Signal, action, old *sigaction) {
	_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(s),
		uintptr(unsafe.Pointer(action)), uintptr(unsafe.Pointer(old)), 8, 0, 0)
}

func pidfdOpen(pid int) (int, error) {
	fd, _, errno := syscall.RawSyscall(sysPidfdOpen, uintptr(pid), 0, 0)
	return int(fd), failed(errno)
}

// pidfdKill sends SIGKILL.
func pidfdKill(pidfd int) {
	_, _, _ = syscall.RawSyscall6(sysPidfdSendSignal, uintptr(pidfd), uintptr(syscall.SIGKILL), 0, 0, 0, 0)
}

// readableWithin waits some seconds for a descriptor to become readable, as a
// pidfd does when its process dies.
func readableWithin(fd int, seconds int64) bool {
	const pollIn = 1
	for end := uptime() + seconds*1000; ; {
		left := max(end-uptime(), 0)
		poll := struct {
			fd              int32
			events, revents int16
		}{int32(fd), pollIn, 0}
		limit := syscall.NsecToTimespec(left * 1e6)
		n, _, errno := syscall.Syscall6(syscall.SYS_PPOLL, uintptr(unsafe.Pointer(&poll)), 1, uintptr(unsafe.Pointer(&limit)), 0, 0, 0)
		if errno == 0 || left == 0 {
			return errno == 0 && n > 0
		}
	}
}

// isChild reports whether pid is an unreaped child of this process.
func isChild(pid int) bool {
	const byPID = 1
	var info [128]byte
	_, _, errno := syscall.RawSyscall6(syscall.SYS_WAITID, byPID, uintptr(pid), uintptr(unsafe.Pointer(&info)),
		syscall.WEXITED|syscall.WNOHANG|waitNoReap, 0, 0)
	return errno == 0
}

// samePIDNamespace reports whether this process and pid are in one.
func samePIDNamespace(pid int) bool {
	mine, its := inode("/proc/self/ns/pid"), inode("/proc/", itoa(pid), "/ns/pid")
	return mine != 0 && mine == its
}

// inode is the number of the file whose path is made of parts; 0: unknown.
func inode(parts ...string) uint64 {
	fd, err := wire.Open(syscall.O_RDONLY, 0, parts...)
	if err != nil {
		return 0
	}
	defer syscall.Close(fd)
	var st syscall.Stat_t
	if syscall.Fstat(fd, &st) != nil {
		return 0
	}
	return st.Ino
}

func now() (sec int64, nsec int) {
	var t syscall.Timespec
	_, _, _ = syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, clockRealtime, uintptr(unsafe.Pointer(&t)), 0)
	s, n := t.Unix()
	return s, int(n)
}

// uptime is a clock in milliseconds that nobody sets.
func uptime() int64 {
	var t syscall.Timespec
	_, _, _ = syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, clockMonotonic, uintptr(unsafe.Pointer(&t)), 0)
	return t.Nano() / 1e6
}

// giveWay lets others run for a moment.
func giveWay() {
	moment := syscall.Timespec{Nsec: 200_000}
	_, _, _ = syscall.RawSyscall(syscall.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&moment)), 0, 0)
}

// unread is how many bytes a pipe or terminal holds.
func unread(fd int) int {
	var n int32
	_, _, _ = syscall.RawSyscall(syscall.SYS_IOCTL, uintptr(fd), syscall.TIOCINQ, uintptr(unsafe.Pointer(&n)))
	return int(n)
}

func isTerminal(fd int) bool {
	var t syscall.Termios
	_, _, errno := syscall.RawSyscall(syscall.SYS_IOCTL, uintptr(fd), syscall.TCGETS, uintptr(unsafe.Pointer(&t)))
	return errno == 0
}

func setWindow(fd int, width, height uint16) error {
	size := [4]uint16{height, width}
	_, _, errno := syscall.RawSyscall(syscall.SYS_IOCTL, uintptr(fd), syscall.TIOCSWINSZ, uintptr(unsafe.Pointer(&size)))
	return failed(errno)
}

func growPipe(fd, size int) error {
	_, _, errno := syscall.RawSyscall(syscall.SYS_FCNTL, uintptr(fd), setPipeSize, uintptr(size))
	return failed(errno)
}

// capacity is the room in a pipe, used or not; -1: it is no pipe.
func capacity(fd int) int {
	size, _, errno := syscall.RawSyscall(syscall.SYS_FCNTL, uintptr(fd), getPipeSize, 0)
	if errno != 0 {
		return -1
	}
	return int(size)
}

func accept(listener int) (int, error) {
	fd, _, errno := syscall.RawSyscall6(sysAccept4, uintptr(listener), 0, 0, syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC, 0, 0)
	return int(fd), failed(errno)
}

// transmit never waits.
func transmit(fd int, packet []byte) error {
	_, _, errno := syscall.RawSyscall6(sysSendto, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(packet))), uintptr(len(packet)),
		syscall.MSG_DONTWAIT|syscall.MSG_NOSIGNAL, 0, 0)
	return failed(errno)
}

// receive takes one packet, and the descriptors that came with it. In contrast
// to syscall.Recvmsg it leaves no garbage behind.
func receive(fd int, packet, control []byte) (n, controlled int, err error) {
	part := syscall.Iovec{Base: unsafe.SliceData(packet)}
	part.SetLen(len(packet))
	msg := syscall.Msghdr{Iov: &part, Iovlen: 1, Control: unsafe.SliceData(control)}
	msg.SetControllen(len(control))
	got, _, errno := syscall.RawSyscall(sysRecvmsg, uintptr(fd), uintptr(unsafe.Pointer(&msg)), syscall.MSG_CMSG_CLOEXEC)
	return int(got), int(msg.Controllen), failed(errno)
}

func failed(errno syscall.Errno) error {
	if errno != 0 {
		return errno
	}
	return nil
}

// numbersIn lists the entries of a directory whose names are numbers.
func numbersIn(dir string) ([]int, error) {
	fd, err := wire.Open(syscall.O_RDONLY|syscall.O_DIRECTORY, 0, dir)
	if err != nil {
		return nil, err
	}
	defer syscall.Close(fd)
	var numbers []int
	var buf [2048]byte
	for {
		n, err := syscall.ReadDirent(fd, buf[:])
		if err != nil || n <= 0 {
			return numbers, err
		}
		_, _, names := syscall.ParseDirent(buf[:n], -1, nil)
		for _, name := range names {
			if number, err := strconv.Atoi(name); err == nil {
				numbers = append(numbers, number)
			}
		}
	}
}
