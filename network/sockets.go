package network

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ns"
)

// Sockets counts the sockets in a network namespace. A protocol that the kernel
// lacks, or that was not requested, is nil.
type Sockets struct {
	TCP, TCP6 *TCPStates
	UDP, UDP6 *UDP
}

// TCPStates counts TCP sockets by state; the index is the state's number in the
// kernel (include/net/tcp_states.h): 1 is established, 10 is listening.
type TCPStates [12]uint64

// UDP counts UDP sockets, the bytes in their queues, and the packets that were dropped
// because these were full.
type UDP struct{ Sockets, RxQueued, TxQueued, Dropped uint64 }

// maxSockets is the maximum of sockets of a protocol that are counted in a
// namespace: the kernel takes a microsecond for each, and more for its own
// table.
const maxSockets = 100_000

// CountSockets counts the sockets in each of the network namespaces that are
// pinned at paths, as Usage does. It is expensive: the kernel walks the table
// of all namespaces' sockets each time.
func CountSockets(paths []string, tcp, udp bool) ([]*Sockets, error) {
	all := make([]*Sockets, len(paths))
	if len(paths) == 0 || !tcp && !udp {
		return all, nil
	}
	failed := ns.Each(paths, func(i int) error {
		s := &Sockets{}
		var errs [4]error
		if tcp {
			s.TCP, errs[0] = countTCP("tcp")
			s.TCP6, errs[1] = countTCP("tcp6")
		}
		if udp {
			s.UDP, errs[2] = countUDP("udp")
			s.UDP6, errs[3] = countUDP("udp6")
		}
		all[i] = s
		return errors.Join(errs[:]...)
	})
	var errs []error
	for i, err := range failed {
		if !errors.Is(err, fault.NotFound) {
			errs = append(errs, fmt.Errorf("count sockets in %s: %w", paths[i], err))
		}
	}
	return all, errors.Join(errs...)
}

func countTCP(protocol string) (*TCPStates, error) {
	states := &TCPStates{}
	ok, err := eachSocket(protocol, states.add)
	if !ok || err != nil {
		return nil, err
	}
	return states, nil
}

// add counts the socket of a line.
func (s *TCPStates) add(words [][]byte) error {
	state, err := strconv.ParseUint(string(words[3]), 16, 8)
	if err == nil && int(state) < len(s) {
		s[state]++
	}
	return err
}

func countUDP(protocol string) (*UDP, error) {
	u := &UDP{}
	ok, err := eachSocket(protocol, u.add)
	if !ok || err != nil {
		return nil, err
	}
	return u, nil
}

// add counts the socket of a line.
func (u *UDP) add(words [][]byte) error {
	tx, rx, _ := bytes.Cut(words[4], []byte(":"))
	for _, add := range []struct {
		to   *uint64
		text []byte
		base int
	}{{&u.TxQueued, tx, 16}, {&u.RxQueued, rx, 16}, {&u.Dropped, words[len(words)-1], 10}} {
		n, err := strconv.ParseUint(string(add.text), add.base, 64)
		if err != nil {
			return err
		}
		*add.to += n
	}
	u.Sockets++
	return nil
}

// eachSocket calls visit with the words of each line of a table in /proc/net,
// whose first line is a heading. It reports whether the table exists.
func eachSocket(protocol string, visit func(words [][]byte) error) (ok bool, err error) {
	f, err := os.Open("/proc/thread-self/net/" + protocol)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer f.Close()
	if err := scanSockets(f, visit); err != nil {
		return false, fmt.Errorf("%s: %w", f.Name(), err)
	}
	return true, nil
}

func scanSockets(table io.Reader, visit func(words [][]byte) error) error {
	lines := bufio.NewScanner(table)
	for n := 0; lines.Scan(); n++ {
		if n == 0 {
			continue
		}
		if n > maxSockets {
			return fmt.Errorf("more than %d sockets: %w", maxSockets, fault.Exhausted)
		}
		words := bytes.Fields(lines.Bytes())
		if len(words) < 10 {
			return fmt.Errorf("cannot parse socket line %q: %w", lines.Text(), fault.Invalid)
		}
		if err := visit(words); err != nil {
			return err
		}
	}
	return lines.Err()
}
