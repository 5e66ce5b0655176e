package monitor

import (
	"syscall"
	"unsafe"

	"github.com/crius-run/crius/conmon/wire"
)

// The capabilities of which a monitor keeps some.
const (
	dacOverride = 1 << 1 // for directories in which root may not write, or search
	killOthers  = 1 << 5 // the container's processes may be anybody's

	setNoNewPrivs = 38 // of prctl(2)
)

// capabilities are a thread's, in the form of capset(2): the low and the high 32 bits.
type capabilities [2]struct{ effective, permitted, inheritable uint32 }

// capabilityHeader says which form, and that the calling thread is meant.
type capabilityHeader struct {
	version uint32
	pid     int32
}

const capabilityVersion = 0x20080522

// dropCapabilities leaves this process, in all its threads, with the capabilities that it
// needs to the end of its container; children that it starts later get no more. It stays
// root, to whom the logs and the exit file belong.
func dropCapabilities(opt *wire.Options) error {
	header := capabilityHeader{version: capabilityVersion}
	var now capabilities
	_, _, errno := syscall.RawSyscall(syscall.SYS_CAPGET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&now)), 0)
	if errno != 0 {
		return errno
	}
	rest := now.without(^uint32(dacOverride | killOthers))
	less := rest.without(dacOverride)
	// In this thread alone, and not for good: as long as it has it among the permitted ones
	// it can take it back.
	try := less
	try[0].permitted = rest[0].permitted
	_, _, errno = syscall.RawSyscall(syscall.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&try)), 0)
	if errno == 0 && mayWrite(opt) {
		rest = less
	}
	_, _, errno = syscall.AllThreadsSyscall(syscall.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&rest)), 0)
	return failed(errno)
}

// without is c with only the low capabilities that are not in some, and no inheritable ones.
func (c capabilities) without(some uint32) (rest capabilities) {
	rest[0].effective, rest[0].permitted = c[0].permitted&^some, c[0].permitted&^some
	return rest
}

// mayWrite reports whether the effective capabilities of this thread suffice for the
// directories in which files will be made. For those of shims they do not: containerd's make
// that of their sockets so that root itself may not search it.
func mayWrite(opt *wire.Options) bool {
	return !opt.Fifos && writable(opt.Dir) && writable(wire.Parent(opt.ExitFile)) && (opt.LogFile == "" || writable(wire.Parent(opt.LogFile)))
}

// writable is true also of a directory that is not there: permissions are not what it lacks.
func writable(dir string) bool {
	const faccessat2, cwd, writeAndSearch, effective = 439, -100, 2 | 1, 0x200 // on every architecture
	path, err := syscall.BytePtrFromString(dir)
	if err != nil {
		return true
	}
	at := cwd
	_, _, errno := syscall.RawSyscall6(faccessat2, uintptr(at), uintptr(unsafe.Pointer(path)), writeAndSearch, effective, 0, 0)
	return errno == 0 || errno == syscall.ENOENT || errno == syscall.EROFS
}

// refusePrivileges keeps programs that this process starts from having more privileges than
// it has.
func refusePrivileges() error {
	_, _, errno := syscall.AllThreadsSyscall(syscall.SYS_PRCTL, setNoNewPrivs, 1, 0)
	return failed(errno)
}
