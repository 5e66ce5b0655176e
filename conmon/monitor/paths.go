package monitor

import (
	"errors"
	"syscall"

	"github.com/crius-run/crius/conmon/wire"
)

// pathVerb is what one of wire's verbs does with a path, in a process of its own
// that package conmon starts: one that asks a dead file server for a path cannot
// even be killed until that server is back, and must keep nobody else.
func pathVerb(verb string) func(path string) error {
	if n := len(wire.RelabelVerb); len(verb) > n && verb[:n] == wire.RelabelVerb {
		return relabel(verb[n:])
	}
	switch verb {
	case wire.StatVerb:
		return stat
	case wire.LookVerb:
		return look
	case wire.MakeVerb:
		return makeDir
	}
	return nil
}

// answer is that process.
func answer(paths []string, do func(path string) error) int {
	for _, path := range paths {
		code := byte(0)
		if err := do(path); err != nil {
			code = byte(syscall.EIO)
			if errno, ok := errors.AsType[syscall.Errno](err); ok {
				code = byte(errno)
			}
		}
		_, _ = syscall.Write(1, []byte{code})
	}
	return 0
}

func stat(path string) error {
	var st syscall.Stat_t
	return syscall.Stat(path, &st)
}

// makeDir makes a directory and its parents where there is nothing yet.
// Whatever exists is good: the source of a mount may be a file.
func makeDir(path string) error {
	if err := stat(path); !errors.Is(err, syscall.ENOENT) {
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
	return stat(path) // ENOENT if a link on the way leads to nothing
}

// look asks for what somebody is about to ask for who must not wait: it reads
// directories, and looks at what is in them.
func look(path string) error {
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
