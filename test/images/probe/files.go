package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func write(args []string) error {
	if len(args) != 2 {
		return errUsage
	}
	return os.WriteFile(args[0], []byte(args[1]), 0o644)
}

func sparse(args []string) error {
	if len(args) != 2 {
		return errUsage
	}
	size, err := strconv.ParseInt(args[1], 10, 64)
	if err != nil {
		return errUsage
	}
	return errors.Join(os.WriteFile(args[0], nil, 0o644), os.Truncate(args[0], size))
}

func fill(args []string) error {
	if len(args) != 2 {
		return errUsage
	}
	mib, err := strconv.Atoi(args[1])
	if err != nil {
		return errUsage
	}
	f, err := os.OpenFile(args[0], os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	for range mib {
		if _, err := f.Write(make([]byte, 1<<20)); errors.Is(err, unix.ENOSPC) {
			break
		} else if err != nil {
			return err
		}
	}
	size, err := f.Seek(0, io.SeekCurrent)
	fmt.Println(size >> 20)
	return err
}

func fifo(args []string) error {
	if len(args) != 1 {
		return errUsage
	}
	return unix.Mkfifo(args[0], 0o644)
}

func cat(args []string) error {
	in := os.Stdin
	if len(args) == 1 {
		f, err := os.Open(args[0])
		if err != nil {
			return err
		}
		defer f.Close()
		in = f
	}
	_, err := io.Copy(os.Stdout, in)
	return err
}

func copyFile(args []string) error {
	if len(args) != 2 {
		return errUsage
	}
	from, err := os.Open(args[0])
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := os.Create(args[1])
	if err != nil {
		return err
	}
	_, err = io.Copy(to, from)
	return errors.Join(err, to.Close())
}

func list(args []string) error {
	if len(args) != 1 {
		return errUsage
	}
	entries, err := os.ReadDir(args[0])
	for _, e := range entries {
		fmt.Println(e.Name())
	}
	return err
}

func sum(args []string) error {
	if len(args) != 1 {
		return errUsage
	}
	h := sha256.New()
	err := filepath.WalkDir(args[0], func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		st, err := f.Stat()
		if err != nil {
			return err
		}
		fmt.Fprintf(h, "%s %d\n", path, st.Size())
		_, err = io.Copy(h, f)
		return err
	})
	if err == nil {
		_, err = fmt.Printf("%x\n", h.Sum(nil))
	}
	return err
}

func stat(args []string) error {
	if len(args) != 1 {
		return errUsage
	}
	var st syscall.Stat_t
	if err := syscall.Lstat(args[0], &st); err != nil {
		return fmt.Errorf("stat %s: %w", args[0], err)
	}
	_, err := fmt.Printf("%o %d %d %d\n", st.Mode, st.Uid, st.Gid, st.Size)
	return err
}

func inode(args []string) error {
	if len(args) != 1 {
		return errUsage
	}
	var st syscall.Stat_t
	if err := syscall.Stat(args[0], &st); err != nil {
		return fmt.Errorf("stat %s: %w", args[0], err)
	}
	_, err := fmt.Printf("%d:%d\n", st.Dev, st.Ino)
	return err
}

func open(args []string) error {
	modes := map[string]int{"r": os.O_RDONLY, "w": os.O_WRONLY, "rw": os.O_RDWR}
	if len(args) != 2 {
		return errUsage
	}
	mode, ok := modes[args[1]]
	if !ok {
		return errUsage
	}
	f, err := os.OpenFile(args[0], mode|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	fmt.Println("ok")
	return f.Close()
}

func await(args []string) error {
	if len(args) != 1 {
		return errUsage
	}
	for {
		if _, err := os.Stat(args[0]); err == nil {
			return nil
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// try makes calls with deliberately wrong arguments, so that a call that is not
// filtered has no effect: it fails with EINVAL or the like and prints that.
func try(args []string) error {
	if len(args) != 1 {
		return errUsage
	}
	var err error
	switch args[0] {
	case "mount":
		err = unix.Mount("", "/proc/self/none", "", 1<<31, "")
	case "keyctl":
		_, err = unix.KeyctlInt(-1, 0, 0, 0, 0)
	case "unshare-user":
		err = unix.Unshare(unix.CLONE_NEWUSER)
	case "unshare-uts":
		err = unix.Unshare(unix.CLONE_NEWUTS)
	case "reboot":
		_, _, e := unix.Syscall(unix.SYS_REBOOT, 0, 0, 0)
		err = e
	case "af-alg":
		_, err = unix.Socket(unix.AF_ALG, unix.SOCK_SEQPACKET, 0)
	case "io-uring":
		_, _, e := unix.Syscall(unix.SYS_IO_URING_SETUP, 0, 0, 0)
		err = e
	case "mkdir":
		err = unix.Mkdir("/tried", 0o755)
	case "chmod":
		err = unix.Chmod("/proc/self/none", 0o755)
	case "sethostname":
		err = unix.Sethostname([]byte("tried"))
	case "raw-socket":
		_, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP)
	default:
		return errUsage
	}
	if e, isErrno := errors.AsType[syscall.Errno](err); isErrno && e != 0 {
		_, err = fmt.Println(unix.ErrnoName(e))
		return err
	}
	_, err = fmt.Println("ok")
	return err
}

func tty([]string) error {
	ws, err := unix.IoctlGetWinsize(0, unix.TIOCGWINSZ)
	if err != nil {
		return fmt.Errorf("standard input is no terminal: %w", err)
	}
	_, err = fmt.Println(ws.Row, ws.Col)
	return err
}

func diary(args []string) error {
	if len(args) != 1 {
		return errUsage
	}
	f, err := os.OpenFile(args[0], os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o666)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(f, time.Now().Format(time.RFC3339Nano))
	return errors.Join(err, f.Close())
}

func note(args []string) error {
	if len(args) < 2 {
		return errUsage
	}
	f, err := os.OpenFile(args[0], os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o666)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(f, strings.Join(args[1:], " "))
	return errors.Join(err, f.Close())
}

// ring never ends by itself. The number has a fixed width, so that it is never seen half written.
func ring(args []string) error {
	if len(args) != 3 {
		return errUsage
	}
	own, err := strconv.Atoi(args[1])
	all, nErr := strconv.Atoi(args[2])
	if err = errors.Join(err, nErr); err != nil {
		return err
	}
	f, err := os.OpenFile(args[0], os.O_RDWR|os.O_CREATE, 0o666)
	if err != nil {
		return err
	}
	defer f.Close()
	for last := own - all; ; time.Sleep(2 * time.Millisecond) {
		var text [8]byte
		_, _ = f.ReadAt(text[:], 0) // a new file has none
		number, _ := strconv.Atoi(strings.TrimLeft(string(text[:]), "\x00"))
		if number%all != own {
			continue
		}
		if number != last+all {
			return fmt.Errorf("the number is %d, and was %d at the last turn", number, last)
		}
		fmt.Println("turn", number)
		if _, err := f.WriteAt(fmt.Appendf(nil, "%08d", number+1), 0); err != nil {
			return err
		}
		last = number
	}
}

func remove(args []string) error {
	if len(args) != 1 {
		return errUsage
	}
	return os.Remove(args[0])
}
