package monitor

import (
	"syscall"

	"github.com/crius-run/crius/conmon/wire"
)

const (
	// ensureVerb in the place of the first argument makes this program the
	// process that ensureDirs starts.
	ensureVerb = "ensure-dirs"
	// answerTime is how many seconds all of a container's paths may take: a file
	// server that is slower serves no container.
	answerTime = 30
)

// ensureDirs makes the missing sources of mounts, in a process of its own: one
// that looks at a path of a dead file server cannot even be killed until that
// server is back. It is left behind then, and keeps neither this process nor the
// container's name nor its files.
func (m *monitor) ensureDirs() error {
	dirs := m.opt.EnsureDirs
	if len(dirs) == 0 {
		return nil
	}
	var done [2]int // a byte for each path that has been seen to
	if err := syscall.Pipe2(done[:], syscall.O_CLOEXEC|syscall.O_NONBLOCK); err != nil {
		return wire.Fail("open pipe", err)
	}
	defer syscall.Close(done[0])
	pidfd, own := -1, wire.Environ()
	pid, err := syscall.ForkExec("/proc/self/exe", append([]string{"crius-conmon", ensureVerb}, dirs...), &syscall.ProcAttr{
		Env:   own[:],
		Files: []uintptr{0, uintptr(done[1]), 2},
		Sys:   &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, PidFD: &pidfd},
	})
	syscall.Close(done[1])
	if err != nil {
		return wire.Fail("look at host paths", err)
	}
	defer syscall.Close(pidfd)
	ended := readableWithin(pidfd, answerTime)
	at := unread(done[0])
	if !ended {
		pidfdSignal(pidfd, syscall.SIGKILL)
		return wire.Silence("host path " + dirs[min(at, len(dirs)-1)] + " does not answer within " + itoa(answerTime) + " s: is its file server alive?")
	}
	var status syscall.WaitStatus
	if _, err := syscall.Wait4(pid, &status, 0, nil); err != nil {
		return wire.Fail("look at host paths", err)
	}
	switch {
	case status.Signaled():
		return wire.Text("look at host paths: killed by signal " + itoa(int(status.Signal())))
	case status.ExitStatus() != 0:
		return wire.Fail("create missing directory "+dirs[min(at, len(dirs)-1)], syscall.Errno(status.ExitStatus()))
	}
	return nil
}

// ensure is that process. Its exit code is the error number.
func ensure(dirs []string) int {
	for _, dir := range dirs {
		if err := ensureDir(dir); err != nil {
			if errno, ok := err.(syscall.Errno); ok {
				return int(errno)
			}
			return int(syscall.EIO)
		}
		_, _ = syscall.Write(1, []byte{'.'})
	}
	return 0
}

// ensureDir makes a directory and its parents where there is nothing yet.
// Whatever exists is good: the source of a mount may be a file.
func ensureDir(path string) error {
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != syscall.ENOENT {
		return err
	}
	for i := 1; i <= len(path); i++ {
		if i < len(path) && path[i] != '/' {
			continue
		}
		if err := syscall.Mkdir(path[:i], 0o755); err != nil && err != syscall.EEXIST {
			return err
		}
	}
	return nil
}

// look is the process that conmon.Look starts. What it asks for, somebody is about
// to ask for who must not wait: it reads directories, and looks at what is in them.
func look(paths []string) int {
	for _, path := range paths {
		answer := byte(wire.Present)
		if err := lookAt(path); err == syscall.ENOENT || err == syscall.ENOTDIR {
			answer = wire.Absent
		}
		_, _ = syscall.Write(1, []byte{answer})
	}
	return 0
}

func lookAt(path string) error {
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil || st.Mode&syscall.S_IFMT != syscall.S_IFDIR {
		return err
	}
	fd, err := wire.Open(syscall.O_RDONLY|syscall.O_DIRECTORY, 0, path)
	if err != nil {
		return nil // but it is there
	}
	defer syscall.Close(fd)
	var buf [2048]byte
	for {
		n, err := syscall.ReadDirent(fd, buf[:])
		if err != nil || n <= 0 {
			return nil
		}
		_, _, names := syscall.ParseDirent(buf[:n], -1, nil)
		for _, name := range names {
			_ = syscall.Stat(path+"/"+name, &st)
		}
	}
}
