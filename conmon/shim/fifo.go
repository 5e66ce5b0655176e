package shim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/backoff"
	"github.com/crius-run/crius/internal/poll"
)

// Fifo is a named pipe. Its maker keeps both ends open, so that a reader does not see
// the end of the stream before the shim has opened its own end.
type Fifo struct {
	Path        string
	Read, Write *os.File
}

// NewFifo makes a named pipe.
func NewFifo(path string) (*Fifo, error) {
	if err := unix.Mkfifo(path, 0o600); err != nil {
		return nil, fmt.Errorf("make fifo %s: %w", path, err)
	}
	read, err := openFifo(path, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	write, err := openFifo(path, unix.O_WRONLY) // which requires a reader
	if err != nil {
		return nil, errors.Join(err, read.Close())
	}
	return &Fifo{Path: path, Read: read, Write: write}, nil
}

func openFifo(path string, mode int) (*os.File, error) {
	fd, err := unix.Open(path, mode|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open fifo %s: %w", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// AwaitReader waits until the shim has opened the pipe for reading, which it may do after it
// has answered, and closes its maker's read end. The stream must not end earlier: the shim
// would wait for ever for a writer, and the process for the end of its input. If ctx ends
// first, the read end is opened again, and the error says so.
func (f *Fifo) AwaitReader(ctx context.Context) error {
	_ = f.Read.Close() // otherwise it is the reader, as are its copies
	syscall.ForkLock.RLock()
	syscall.ForkLock.RUnlock() //nolint:staticcheck // no child is between its fork and its program any more
	for pauses := backoff.New(time.Millisecond, 50*time.Millisecond); ; {
		probe, err := openFifo(f.Path, unix.O_WRONLY)
		if err == nil {
			return probe.Close()
		}
		if !errors.Is(err, unix.ENXIO) {
			return err
		}
		if !pauses.Pause(ctx) {
			break
		}
	}
	var err error
	if f.Read, err = openFifo(f.Path, unix.O_RDONLY); err != nil {
		return err
	}
	return fmt.Errorf("the shim has not opened %s for reading: %w", f.Path, context.Cause(ctx))
}

// Discard reads what nobody else reads from a pipe, until its end or that of ctx, and calls came for each part. It
// reads slowly: a writer that nobody listens to shall not keep a CPU busy.
func Discard(ctx context.Context, path string, came func()) {
	const pace = 20 * time.Millisecond
	f, err := openFifo(path, unix.O_RDONLY)
	if err != nil {
		return // it has gone with its writer
	}
	defer f.Close()
	defer context.AfterFunc(ctx, func() { _ = f.SetReadDeadline(time.Now()) })()
	for part := make([]byte, 16<<10); ; {
		if _, err := f.Read(part); err != nil {
			return
		}
		came()
		if !poll.Pause(ctx, pace) {
			return
		}
	}
}

// Close closes what is still open.
func (f *Fifo) Close() {
	if f == nil {
		return
	}
	_ = f.Read.Close()
	_ = f.Write.Close()
}

// Unread returns how many bytes are in a pipe.
func Unread(path string) int {
	f, err := openFifo(path, unix.O_RDONLY)
	if err != nil {
		return 0
	}
	defer f.Close()
	raw, err := f.SyscallConn()
	if err != nil {
		return 0
	}
	var n uint32
	_ = raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetUint32(int(fd), unix.TIOCINQ) })
	return int(n)
}
