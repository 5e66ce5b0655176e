package network

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/test/kit/wait"
)

func TestInterfaces(t *testing.T) {
	t.Parallel()
	const head = `Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
`
	const lo = "    lo: 1000       2    0    0    0     0          0         0     1000       2    0    0    0     0       0          0\n"
	const wide = "  eth0:18446744073709551615 20    3    4    5     6          7         8     9000      10   11   12   13    14      15         16\n"
	const long = "verylongname123: 1 0 0 0 0 0 0 0 2 0 0 0 0 0 0 0\n"
	for name, test := range map[string]struct {
		text string
		want []Interface
		err  string
	}{
		"a pod":          {head + lo + wide, []Interface{{"eth0", 18446744073709551615, 20, 3, 4, 9000, 10, 11, 12}}, ""},
		"two interfaces": {head + long + lo + wide, []Interface{{"verylongname123", 1, 0, 0, 0, 2, 0, 0, 0}, {"eth0", 18446744073709551615, 20, 3, 4, 9000, 10, 11, 12}}, ""},
		"loopback alone": {head + lo, []Interface{}, ""},
		"short":          {head + "eth0: 1 2 3\n", nil, "3 columns"},
		"nonsense":       {head + strings.Replace(wide, "9000", "many", 1), nil, "many"},
	} {
		got, err := interfaces([]byte(test.text))
		if (err == nil) != (test.err == "") || (err != nil && !strings.Contains(err.Error(), test.err)) {
			t.Errorf("%s: error is %v", name, err)
		}
		if !slices.Equal(got, test.want) || (got == nil) != (test.want == nil) {
			t.Errorf("%s: %+v, want %+v", name, got, test.want)
		}
	}
}

// Two namespaces that are joined by a cable, one that is gone, and one without
// an interface.
func TestUsage(t *testing.T) {
	t.Parallel()
	pin := func(name string) string {
		s := ns.Spec{Dir: t.TempDir(), Name: name, Net: true}
		set, err := ns.Create(s)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := ns.Remove(s); err != nil {
				t.Error(err)
			}
		})
		return set.Net
	}
	a, b, bare := pin("a"), pin("b"), pin("bare")
	run := func(path, command string) {
		t.Helper()
		if err := ns.Do(path, func() error {
			out, err := exec.Command("sh", "-ec", command).CombinedOutput()
			if err != nil {
				return errors.New(string(out))
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	// No IPv6: its neighbour discovery would interfere.
	run(b, "echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6")
	run(a, "echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6; ip link add eth0 type veth peer name eth0 netns "+b)
	run(a, "ip addr add 10.0.0.1/24 dev eth0; ip link set eth0 up; ip link add other type bridge; ip neigh add 10.0.0.9 lladdr 02:00:00:00:00:09 dev eth0")
	run(b, "ip addr add 10.0.0.2/24 dev eth0; ip link set eth0 up")
	send := func() {
		t.Helper()
		if err := ns.Do(a, func() error {
			conn, err := net.Dial("udp", "10.0.0.9:9") // an address at which nothing answers
			if err != nil {
				return err
			}
			defer conn.Close()
			for range 10 {
				if _, err = conn.Write(make([]byte, 1000)); err != nil {
					return err
				}
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	paths := []string{a, filepath.Join(t.TempDir(), "gone"), b, bare}
	of := func(all []Interface) Interface {
		return all[slices.IndexFunc(all, func(i Interface) bool { return i.Name == "eth0" })]
	}
	before := usage(t, paths)
	after := before
	// The kernel drops what is sent before it has noticed that the link is up.
	wait.For(t, "what was sent to arrive", func() bool {
		send()
		after = usage(t, paths)
		return of(after[2]).RxBytes != of(before[2]).RxBytes
	})
	if after[1] != nil || after[3] == nil || len(after[3]) != 0 {
		t.Errorf("gone and bare: %v", after)
	}
	names := func(interfaces []Interface) (all []string) {
		for _, i := range interfaces {
			all = append(all, i.Name)
		}
		slices.Sort(all)
		return all
	}
	if got := names(after[0]); !slices.Equal(got, []string{"eth0", "other"}) {
		t.Errorf("interfaces are %v", got)
	}
	sent := of(after[0]).TxBytes - of(before[0]).TxBytes
	received := of(after[2]).RxBytes - of(before[2]).RxBytes
	if sent < 1000 || sent > 11_000 || sent != received {
		t.Errorf("sent %d, received %d of 10 packets with 1000 bytes", sent, received)
	}
	host, err := os.ReadFile("/proc/thread-self/net/dev")
	if err != nil || strings.Contains(string(host), "other:") {
		t.Errorf("the caller has changed its namespace: %v\n%s", err, host)
	}
	if none, err := Usage(nil); none != nil || err != nil {
		t.Errorf("of nothing: %v, %v", none, err)
	}
}

func usage(t *testing.T, paths []string) [][]Interface {
	t.Helper()
	all, err := Usage(paths)
	if err != nil || len(all) != len(paths) {
		t.Fatalf("%v, %v", all, err)
	}
	return all
}

// The counters are those of the table, for no more interfaces than fit in a
// message; a pod chooses their names.
func FuzzInterfaces(f *testing.F) {
	const row = " 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n"
	f.Add([]byte("Inter-|   Receive\n face |bytes\n    lo:" + row + "  eth0:" + row))
	f.Add([]byte("eth0: 1 2\n"))
	f.Add([]byte(strings.Repeat("a:"+row, 2*maxInterfaces)))
	f.Add([]byte(":::" + row + "\xff:18446744073709551616" + row))
	f.Fuzz(func(t *testing.T, text []byte) {
		all, err := interfaces(text)
		if err != nil {
			if all != nil || !strings.Contains(err.Error(), "/proc/net/dev") {
				t.Errorf("%q: %v, %v", text, all, err)
			}
			return
		}
		if len(all) > maxInterfaces || len(all) > bytes.Count(text, []byte(":")) {
			t.Errorf("%q has %d interfaces", text, len(all))
		}
		var again bytes.Buffer
		for _, i := range all {
			if i.Name == "lo" || strings.Contains(i.Name, ":") {
				t.Errorf("%q has an interface %q", text, i.Name)
			}
			fmt.Fprintf(&again, "%s: %d %d %d %d 0 0 0 0 %d %d %d %d 0 0 0 0\n", i.Name,
				i.RxBytes, i.RxPackets, i.RxErrors, i.RxDropped, i.TxBytes, i.TxPackets, i.TxErrors, i.TxDropped)
		}
		if same, err := interfaces(again.Bytes()); err != nil || !slices.Equal(same, all) {
			t.Errorf("%q is %v, and that %v, %v", text, all, same, err)
		}
	})
}
