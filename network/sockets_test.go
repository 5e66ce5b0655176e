package network

import (
	"bytes"
	"errors"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ns"
)

const (
	tcpHead = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
	tcpLine = "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1234 1 0000000000000000 100 0 0 10 0\n"
)

func TestScanSockets(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		table string
		fault error
		want  int
	}{
		"none":     {tcpHead, nil, 0},
		"empty":    {"", nil, 0},
		"some":     {tcpHead + strings.Repeat(tcpLine, 3), nil, 3},
		"nonsense": {tcpHead + "0: x\n", fault.Invalid, 0},
		"too many": {tcpHead + strings.Repeat(tcpLine, maxSockets+1), fault.Exhausted, maxSockets},
	} {
		n := 0
		err := scanSockets(strings.NewReader(test.table), func([][]byte) error { n++; return nil })
		if !errors.Is(err, test.fault) || n != test.want {
			t.Errorf("%s: %d sockets, %v", name, n, err)
		}
	}
}

// Real sockets in a separate namespace.
func TestCountSockets(t *testing.T) {
	t.Parallel()
	spec := ns.Spec{Dir: t.TempDir(), Name: "sockets", Net: true}
	set, err := ns.Create(spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := ns.Remove(spec); err != nil {
			t.Error(err)
		}
	})
	path := set.Net
	var open []interface{ Close() error }
	err = ns.Do(path, func() error {
		for _, network := range []string{"tcp4", "tcp6", "tcp6"} {
			l, err := net.Listen(network, "")
			if err != nil {
				return err
			}
			open = append(open, l)
		}
		u, err := net.ListenPacket("udp4", "")
		if err == nil {
			open = append(open, u)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, o := range open {
			o.Close()
		}
	})
	all, err := CountSockets([]string{path, filepath.Join(t.TempDir(), "gone")}, true, true)
	if err != nil {
		t.Fatal(err)
	}
	const listening = 10
	s := all[0]
	if s == nil || s.TCP[listening] != 1 || s.TCP6[listening] != 2 || s.UDP.Sockets != 1 || s.UDP6.Sockets != 0 {
		t.Errorf("sockets are %+v", s)
	}
	if all[1] != nil {
		t.Errorf("sockets of a namespace that is gone are %+v", all[1])
	}
	if some, err := CountSockets([]string{path}, false, true); err != nil || some[0].TCP != nil || some[0].UDP == nil {
		t.Errorf("of UDP alone: %+v, %v", some[0], err)
	}
}

// Each line of a table after the heading counts as one socket, or the table is
// refused.
func FuzzSockets(f *testing.F) {
	f.Add([]byte(tcpHead + strings.Repeat(tcpLine, 3)))
	f.Add([]byte(tcpHead + strings.Replace(tcpLine, " 0A ", " FF ", 1)))
	f.Add([]byte(tcpHead + "1 2 3 4 5 6 7 8 9 10"))
	f.Add([]byte(tcpHead + "1 2 3 g x: 6 7 8 9 -1\n\n"))
	f.Add([]byte("\n"))
	f.Fuzz(func(t *testing.T, table []byte) {
		var u UDP
		var states TCPStates
		udpErr := scanSockets(bytes.NewReader(table), u.add)
		tcpErr := scanSockets(bytes.NewReader(table), states.add)
		lines := uint64(bytes.Count(bytes.TrimSuffix(table, []byte("\n")), []byte("\n")))
		if u.Sockets > lines || udpErr == nil && u.Sockets != lines {
			t.Errorf("%q has %d UDP sockets in %d lines, %v", table, u.Sockets, lines, udpErr)
		}
		var sum uint64
		for _, n := range states {
			sum += n
		}
		if sum > lines {
			t.Errorf("%q has %d TCP sockets in %d lines, %v", table, sum, lines, tcpErr)
		}
	})
}
