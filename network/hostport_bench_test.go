package network

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/crius-run/crius/network/hostport"
)

// hostPod returns pod number i with a TCP and a UDP port, in both families.
func hostPod(i int) hostport.Pod {
	port := uint16(10000 + i)
	return hostport.Pod{
		ID:       fmt.Sprint(i),
		Mappings: []hostport.Mapping{{HostPort: port, ContainerPort: 80, Protocol: "tcp"}, {HostPort: port, ContainerPort: 80, Protocol: "udp"}},
		Targets: []hostport.Target{
			{IP: netip.AddrFrom4([4]byte{10, 7, byte(i >> 8), byte(i)}), Link: "lo"},
			{IP: netip.AddrFrom16([16]byte{0: 0xfd, 14: byte(i >> 8), 15: byte(i)}), Link: "lo"},
		},
	}
}

// Adding and removing a pod's ports costs the same, however many others there
// are, and however many flows the kernel remembers.
func BenchmarkHostPorts(b *testing.B) {
	for _, others := range []int{0, 100, 1000} {
		for _, flows := range []int{0, 50_000} {
			b.Run(fmt.Sprintf("%d others, %d flows", others, flows), func(b *testing.B) {
				n := newNode(b, nil)
				n.run(n.host.Net, "ip link set lo up; nft add table ip watch; nft 'add chain ip watch c { type filter hook output priority 0; }'; nft add rule ip watch c ct state new accept")
				var pods []hostport.Pod
				for i := range others {
					pods = append(pods, hostPod(i))
				}
				table := hostport.New()
				err := n.do(func() error { return table.Restore(b.Context(), pods) })
				if err != nil {
					b.Fatal(err)
				}
				n.remember(flows)
				err = n.do(func() error {
					for b.Loop() {
						p := hostPod(5000)
						if err := table.Open(b.Context(), p); err != nil {
							return err
						}
						if err := table.Close(b.Context(), p); err != nil {
							return err
						}
					}
					return nil
				})
				if err != nil {
					b.Fatal(err)
				}
			})
		}
	}
}

// remember makes the kernel remember UDP flows to unused ports.
func (n *node) remember(flows int) {
	n.Helper()
	err := n.do(func() error {
		for left := flows; left > 0; {
			conn, err := net.ListenPacket("udp", "127.0.0.1:0")
			if err != nil {
				return err
			}
			for port := 30000; port < 60000 && left > 0; port, left = port+1, left-1 {
				conn.WriteTo([]byte("?"), &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port})
			}
			conn.Close()
		}
		return nil
	})
	if err != nil {
		n.Fatal(err)
	}
}

func BenchmarkHostPortsCheck(b *testing.B) {
	n := newNode(b, nil)
	n.run(n.host.Net, "ip link set lo up")
	table := hostport.New()
	err := n.do(func() error {
		if err := table.Open(b.Context(), hostPod(1)); err != nil {
			return err
		}
		for b.Loop() {
			table.Check(b.Context())
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
}

func BenchmarkHostPortsRestore(b *testing.B) {
	n := newNode(b, nil)
	n.run(n.host.Net, "ip link set lo up")
	var pods []hostport.Pod
	for i := range 1000 {
		pods = append(pods, hostPod(i))
	}
	err := n.do(func() error {
		for b.Loop() {
			if err := hostport.New().Restore(b.Context(), pods); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
}
