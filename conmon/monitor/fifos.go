package monitor

import (
	"syscall"

	"github.com/crius-run/crius/conmon/wire"
)

// fifos are the container's streams where the runtime opens them by name. The
// monitor holds both ends of each until the container has ended: none of them
// comes to an end because somebody has not opened it yet, or was killed and is to
// come again.
type fifos struct {
	read  [3]int // of stdin the end that the runtime reads; -1: not open
	write [3]int
	// leash is held by whoever waits for the container. It ends with the container's
	// input, of which the runtime is to be told.
	leash [2]int
}

var noFifos = fifos{read: [3]int{-1, -1, -1}, write: [3]int{-1, -1, -1}, leash: [2]int{-1, -1}}

// open makes the FIFOs in the container's directory. Input is where its input is
// written, -1 if it has none.
func (f *fifos) open(dir string, stdin bool) (input int, err error) {
	for i, name := range [...]string{wire.StdinFifo, wire.StdoutFifo, wire.StderrFifo} {
		if i == 0 && !stdin {
			continue
		}
		path := dir + "/" + name
		err := syscall.Mkfifo(path, 0o600)
		if err == nil {
			f.read[i], err = wire.Open(syscall.O_RDONLY|syscall.O_NONBLOCK, 0, path)
		}
		if err == nil {
			f.write[i], err = wire.Open(syscall.O_WRONLY|syscall.O_NONBLOCK, 0, path)
		}
		if err != nil {
			return -1, wire.Fail("make fifo "+path, err)
		}
	}
	if !stdin {
		return -1, nil
	}
	input, f.write[0] = f.write[0], -1
	return input, wire.Fail("open pipe", syscall.Pipe2(f.leash[:], syscall.O_CLOEXEC))
}

// connect turns the streams from the pipes of the runtime that creates the
// container to those of the container.
func (f *fifos) connect(p poller, streams ...*stream) error {
	for _, s := range streams {
		s.close()
		s.fd = f.read[s.number()]
		f.read[s.number()] = -1
		_ = growPipe(s.fd, pipeSize)
		if err := s.watch(p); err != nil {
			return wire.Fail("watch fifo", err)
		}
	}
	return nil
}

// close lets go of the ends that are the runtime's, so that the streams end when
// it has written all.
func (f *fifos) close() {
	for _, fd := range [...]int{f.read[0], f.write[0], f.read[1], f.write[1], f.read[2], f.write[2], f.leash[0], f.leash[1]} {
		if fd >= 0 {
			syscall.Close(fd)
		}
	}
	*f = noFifos
}

// endInput tells who waits for the container that its input has ended.
func (f *fifos) endInput() {
	if f.leash[1] >= 0 {
		syscall.Close(f.leash[1])
		f.leash[1] = -1
	}
}

// outputPause is for how many milliseconds the runtime of a container that has ended may pass on nothing
// of what the container has written. It may go on passing on for wire.OutputTime: a process that has
// escaped from the container might write for ever.
const outputPause = 5000

// underway reports whether output of a container that has ended is still to come:
// it goes through a process of the runtime's, which is given some time for that.
func (m *monitor) underway() bool {
	open := m.stdout.fd >= 0 || m.stderr.fd >= 0
	return m.opt.Fifos && !m.released && open && uptime() < min(m.moved+outputPause, m.ended+wire.OutputTime)
}
