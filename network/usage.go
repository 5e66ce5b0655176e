package network

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ns"
)

// Interface is the traffic of a network interface since it was made.
type Interface struct {
	Name                                    string
	RxBytes, RxPackets, RxErrors, RxDropped uint64
	TxBytes, TxPackets, TxErrors, TxDropped uint64
}

// Usage reads the counters of all interfaces except the loopback in each of the
// network namespaces that are pinned at paths: the result has their order, with
// nil for a namespace that is gone or could not be read. The error is about the
// latter.
//
// It visits the namespaces on one thread, and needs no kernel lock that changes
// to interfaces hold (docs/decisions/0006-stats.md).
func Usage(paths []string) ([][]Interface, error) {
	if len(paths) == 0 {
		return nil, nil
	}
	all := make([][]Interface, len(paths))
	buffer := make([]byte, 256*maxInterfaces) // a line has half of that
	failed := ns.Each(paths, func(i int) error {
		text, err := readInto(buffer, "/proc/thread-self/net/dev")
		if err == nil {
			all[i], err = interfaces(text)
		}
		return err
	})
	var errs []error
	for i, err := range failed {
		if !errors.Is(err, fault.NotFound) {
			errs = append(errs, fmt.Errorf("count traffic in %s: %w", paths[i], err))
		}
	}
	return all, errors.Join(errs...)
}

// readInto reads as much of a file as fits, without a partial line at the end.
func readInto(buffer []byte, file string) (text []byte, err error) {
	fd, err := unix.Open(file, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: file, Err: err}
	}
	defer unix.Close(fd)
	for len(text) < len(buffer) {
		n, err := unix.Read(fd, buffer[len(text):])
		switch {
		case err == unix.EINTR:
		case err != nil:
			return nil, &os.PathError{Op: "read", Path: file, Err: err}
		case n == 0:
			return text, nil
		default:
			text = buffer[:len(text)+n]
		}
	}
	return text[:bytes.LastIndexByte(text, '\n')+1], nil
}

// columns is the number of columns in /proc/net/dev after the name: eight for
// each direction; the first four are bytes, packets, errors and drops.
const columns = 16

// maxInterfaces bounds what is reported for one pod: with CAP_NET_ADMIN it can
// make any number, and all pods' must fit in one message.
const maxInterfaces = 64

// interfaces reads /proc/net/dev, which begins with two lines of headings.
func interfaces(text []byte) ([]Interface, error) {
	all := []Interface{}
	for line := range bytes.Lines(text) {
		name, rest, ok := bytes.Cut(line, []byte(":"))
		if !ok { // a heading
			continue
		}
		if len(all) >= maxInterfaces {
			break
		}
		i := Interface{Name: string(bytes.TrimSpace(name))}
		if i.Name == "lo" {
			continue
		}
		words := bytes.Fields(rest)
		if len(words) < columns {
			return nil, fmt.Errorf("/proc/net/dev: interface %q has %d columns instead of %d", i.Name, len(words), columns)
		}
		for column, counter := range []*uint64{
			&i.RxBytes, &i.RxPackets, &i.RxErrors, &i.RxDropped, nil, nil, nil, nil,
			&i.TxBytes, &i.TxPackets, &i.TxErrors, &i.TxDropped,
		} {
			if counter == nil {
				continue
			}
			n, err := strconv.ParseUint(string(words[column]), 10, 64)
			if err != nil {
				return nil, fmt.Errorf("/proc/net/dev: interface %q: %w", i.Name, err)
			}
			*counter = n
		}
		all = append(all, i)
	}
	return all, nil
}
