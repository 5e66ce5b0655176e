package network

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/test/kit/program"
	"github.com/crius-run/crius/test/kit/wait"
)

// plainConf is a bridge without a portmap plugin.
func plainConf(ranges string) string {
	return `{"cniVersion": "1.0.0", "name": "pods", "plugins": [
	{"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true, ` + hostLocal(ranges) + `}]}`
}

// routedConf has a link for each pod, and no portmap plugin.
const routedConf = `{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "ptp", "ipam": {"type": "host-local",
	"dataDir": "LEASES", "ranges": [[{"subnet": "10.7.0.0/16"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}`

// Addresses of the node in the outside network, and of a machine there.
const (
	node4, world4 = "192.0.2.1", "192.0.2.2"
	node6, world6 = "2001:db8::1", "2001:db8::2"
)

// world is a machine next to the node.
func (n *node) world() string {
	n.Helper()
	path := n.namespaces("world").Net
	n.run(n.host.Net, "ip link set lo up; ip link add out0 type veth peer name eth0; ip link set eth0 netns "+path+`
		ip addr add `+node4+`/24 dev out0; ip addr add `+node6+`/64 dev out0 nodad; ip link set out0 up
		echo 1 > /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/ipv6/conf/all/forwarding`)
	n.run(path, "ip addr add "+world4+"/24 dev eth0; ip addr add "+world6+"/64 dev eth0 nodad; ip link set eth0 up")
	return path
}

// run executes a shell script in a network namespace.
func (n *node) run(in, script string) string {
	n.Helper()
	var out []byte
	err := ns.Do(in, func() (err error) {
		out, err = exec.Command("sh", "-ec", script).CombinedOutput()
		return err
	})
	if err != nil {
		n.Fatalf("%s: %v: %s", script, err, out)
	}
	return string(out)
}

// serve answers TCP and UDP on a port in a network namespace: with name, and
// the caller's apparent address.
func (n *node) serve(in, name string, port int) {
	n.Helper()
	var listener net.Listener
	var packets net.PacketConn
	err := ns.Do(in, func() (err error) {
		if listener, err = net.Listen("tcp", fmt.Sprint(":", port)); err == nil {
			packets, err = net.ListenPacket("udp", fmt.Sprint(":", port))
		}
		return err
	})
	if err != nil {
		n.Fatal(err)
	}
	n.Cleanup(func() { listener.Close(); packets.Close() })
	say := func(to net.Addr) string {
		host, _, _ := net.SplitHostPort(to.String())
		return name + " " + host
	}
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			fmt.Fprint(conn, say(conn.RemoteAddr()))
			conn.Close()
		}
	}()
	go func() {
		buffer := make([]byte, 100)
		for {
			size, from, err := packets.ReadFrom(buffer)
			if err != nil {
				return
			}
			packets.WriteTo(append([]byte(say(from)), buffer[:size]...), from)
		}
	}()
}

// reach requests a server's answer, from a network namespace.
func reach(from, network, address string) (answer string, err error) {
	return reachWithin(time.Minute, from, network, address)
}

// reachWithin is reach for a case without an answer.
func reachWithin(limit time.Duration, from, network, address string) (answer string, err error) {
	err = ns.Do(from, func() error {
		conn, err := net.DialTimeout(network, address, limit)
		if err != nil {
			return err
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(limit))
		if strings.HasPrefix(network, "tcp") {
			text, err := io.ReadAll(conn)
			answer = string(text)
			return err
		}
		answer, err = exchange(conn)
		return err
	})
	return answer, err
}

// exchange sends packets on one flow until one is answered. Each has a
// different text, because an answer may come after the next packet.
func exchange(conn net.Conn) (string, error) {
	buffer := make([]byte, 100)
	for deadline := time.Now().Add(wait.Limit); ; {
		question := " " + rand.Text()
		conn.SetDeadline(time.Now().Add(100 * time.Millisecond))
		conn.Write([]byte(question))
		for {
			size, err := conn.Read(buffer)
			if answer, ok := strings.CutSuffix(string(buffer[:size]), question); ok && err == nil {
				return answer, nil
			}
			if err != nil && time.Now().After(deadline) {
				return "", err
			}
			if err != nil {
				break
			}
		}
	}
}

// expose is attach with all later steps.
func (n *node) expose(p Pod) *Attachment {
	n.Helper()
	a := n.attach(p)
	if err := n.do(func() error { return n.Expose(context.Background(), p, a) }); err != nil {
		n.Fatal(err)
	}
	return a
}

// recover does what a restarted server does with the live pods.
func (n *node) recover(live map[string]*Attachment) {
	n.Helper()
	n.restart()
	if err := n.do(func() error { return n.Restore(context.Background(), live) }); err != nil {
		n.Fatal(err)
	}
}

func (n *node) ruleset() string { return n.run(n.host.Net, "nft list ruleset") }

func mapping(protocol cri.Protocol, host, container int32, ip string) *cri.PortMapping {
	return &cri.PortMapping{Protocol: protocol, HostPort: host, ContainerPort: container, HostIp: ip}
}

// From all places that can reach the node, with and without the kernel's
// firewall on bridges (br_netfilter), on which some networks rely and others
// don't.
func TestHostPortFromEverywhere(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		conf, filter string
	}{
		"bridge":               {plainConf(range4 + "," + range6), "0"},
		"bridge, br_netfilter": {plainConf(range4 + "," + range6), "1"},
		"routed":               {routedConf, "0"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, map[string]string{"10-pods.conflist": c.conf})
			world := n.world()
			n.run(n.host.Net, "for f in /proc/sys/net/bridge/bridge-nf-call-ip*tables; do echo "+c.filter+" > $f; done")
			before := n.warmUp()
			web, other := n.pod(), n.pod()
			web.PortMappings = []*cri.PortMapping{
				mapping(cri.Protocol_TCP, 8080, 80, ""), mapping(cri.Protocol_UDP, 8080, 80, ""),
				mapping(cri.Protocol_TCP, 8443, 80, "127.0.0.1"), mapping(cri.Protocol_TCP, 8181, 80, node4),
			}
			a, b := n.expose(web), n.expose(other)
			n.serve(web.NetNS, "web", 80)

			ip := a.IPs[0]
			gateway := strings.Fields(n.run(web.NetNS, "ip route get 8.8.8.8"))[2]
			if on := n.run(n.host.Net, "grep -l 1 /proc/sys/net/ipv4/conf/*/route_localnet || true"); strings.Count(on, "\n") != 1 {
				t.Errorf("127.0.0.1 is let out by other links than the pod's: %s", on)
			}
			n.says("world", world, "8080", node4, "web "+world4)
			n.says("host by its address", n.host.Net, "8080", node4, "web "+node4)
			n.says("host by localhost", n.host.Net, "8080", "127.0.0.1", "web "+gateway)
			n.says("host by another localhost", n.host.Net, "8080", "127.9.9.9", "web "+gateway)
			n.says("pod itself", web.NetNS, "8080", node4, "web "+gateway)
			seen := gateway // masqueraded on a bridge, where the answer would bypass the node
			if name == "routed" {
				seen = b.IPs[0]
			}
			n.says("other pod", other.NetNS, "8080", node4, "web "+seen)
			n.says("other pod, directly", other.NetNS, "80", ip, "web "+b.IPs[0])
			if len(a.IPs) == 2 {
				n.says("world, IPv6", world, "8080", node6, "web "+world6)
				n.says("host, IPv6", n.host.Net, "8080", node6, "web "+node6)
				n.says("pod itself, IPv6", web.NetNS, "8080", node6, "web ")
				n.says("other pod, IPv6", other.NetNS, "8080", node6, "web ")
			}
			if answer, err := reach(n.host.Net, "tcp", "[::1]:8080"); err == nil || os.IsTimeout(err) {
				t.Errorf("[::1] answers %q, %v; want it refused at once", answer, err)
			}

			for _, c := range []struct {
				from, address, want string
			}{
				{n.host.Net, "127.0.0.1:8443", "web " + gateway}, {world, node4 + ":8181", "web " + world4},
				{n.host.Net, "127.0.0.1:8181", ""}, {n.host.Net, node4 + ":8443", ""}, {world, node4 + ":8443", ""},
			} {
				limit := time.Minute
				if c.want == "" {
					limit = 5 * time.Second
				}
				if answer, err := reachWithin(limit, c.from, "tcp", c.address); answer != c.want || (err == nil) != (c.want != "") {
					t.Errorf("%s answers %q, %v; want %q", c.address, answer, err, c.want)
				}
			}
			n.detach(web, a)
			if answer, err := reachWithin(5*time.Second, world, "tcp", node4+":8080"); err == nil {
				t.Errorf("after the pod's end its port answers %q", answer)
			}
			n.detach(other, b)
			n.settle(before)
			if on := n.run(n.host.Net, "grep -l 1 /proc/sys/net/ipv4/conf/*/route_localnet || true"); on != "" {
				t.Errorf("127.0.0.1 is still let out: %s", on)
			}
		})
	}
}

// says checks a TCP server's answer and, on the port that has it, a UDP
// server's.
func (n *node) says(who, from, port, host, want string) {
	n.Helper()
	for _, network := range []string{"tcp", "udp"} {
		answer, err := reach(from, network, net.JoinHostPort(host, port))
		if err != nil || !strings.HasPrefix(answer, want) || answer == "" {
			n.Errorf("%s: %s %s answers %q, %v; want %q", who, network, net.JoinHostPort(host, port), answer, err, want)
		}
	}
}

// A neighbour on a link that lets 127.0.0.1 out cannot reach services that
// listen there.
func TestLoopbackServicesStayLocal_CVE_2020_8558(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-pods.conflist": plainConf(range4)})
	n.world()
	web, evil := n.pod(), n.pod()
	web.PortMappings = []*cri.PortMapping{mapping(cri.Protocol_TCP, 8080, 80, "")}
	a, b := n.expose(web), n.expose(evil)
	n.serve(n.host.Net, "secret", 9999)
	n.serve(web.NetNS, "web", 80)
	n.run(evil.NetNS, `ip addr flush dev lo; echo 1 > /proc/sys/net/ipv4/conf/all/route_localnet
		ip route add 127.0.0.1 via 10.7.0.1 src `+b.IPs[0])
	attack := func(limit time.Duration) (string, error) {
		answer := ""
		err := ns.Do(evil.NetNS, func() error {
			conn, err := net.DialTimeout("tcp", "127.0.0.1:9999", limit)
			if err != nil {
				return err
			}
			defer conn.Close()
			text, err := io.ReadAll(conn)
			answer = string(text)
			return err
		})
		return answer, err
	}
	if answer, err := attack(time.Second); err == nil {
		t.Errorf("a pod gets in to the host's 127.0.0.1: %q", answer)
	}
	n.run(n.host.Net, "nft flush chain ip crius-hostports guard")
	if answer, err := attack(time.Minute); !strings.HasPrefix(answer, "secret") {
		t.Errorf("the attack does not work even without the guard: %q, %v", answer, err)
	}
	n.detach(web, a)
	if answer, err := attack(time.Second); err == nil {
		t.Errorf("a pod gets in when there are no host ports any more: %q", answer)
	}
}

// A UDP client that keeps sending from one port reaches the present owner of
// the host port: a process of the host, a pod, another pod, the process again.
func TestUDPFlowFollowsThePod(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-pods.conflist": plainConf(range4)})
	world := n.world()
	var client net.Conn
	err := ns.Do(world, func() (err error) { client, err = net.Dial("udp", node4+":5353"); return err })
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	n.serve(n.host.Net, "host", 5353)
	other := n.pod() // the first pod makes the tables, which is another case
	other.PortMappings = []*cri.PortMapping{mapping(cri.Protocol_UDP, 5454, 53, "")}
	for _, with := range []bool{false, true} {
		var b *Attachment
		if with {
			b = n.expose(other)
		}
		for i := range 3 {
			if answer, err := exchange(client); answer != "host "+world4 || err != nil {
				t.Errorf("without a pod: %q, %v", answer, err)
			}
			p := n.pod()
			p.PortMappings = []*cri.PortMapping{mapping(cri.Protocol_UDP, 5353, 53, "")}
			name := fmt.Sprintf("pod-%d", i)
			n.serve(p.NetNS, name, 53)
			a := n.expose(p)
			if answer, err := exchange(client); answer != name+" "+world4 || err != nil {
				t.Errorf("round %d: %q, %v", i, answer, err)
			}
			n.detach(p, a)
		}
		n.detach(other, b)
	}
}

// A pod with a host_ip that is not the node's does not receive what others send there.
func TestHostIPOfAnotherNode(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-pods.conflist": plainConf(range4)})
	world := n.world()
	n.run(world, "ip route add 10.7.0.0/16 via "+node4)
	thief, victim := n.pod(), n.pod()
	thief.PortMappings = []*cri.PortMapping{mapping(cri.Protocol_TCP, 80, 80, world4)}
	n.expose(thief)
	n.expose(victim)
	n.serve(thief.NetNS, "thief", 80)
	n.serve(world, "world", 80)
	for _, from := range []string{n.host.Net, victim.NetNS} {
		if answer, err := reach(from, "tcp", world4+":80"); !strings.HasPrefix(answer, "world ") {
			t.Errorf("%q, %v", answer, err)
		}
	}
}

// With kube-proxy's IPVS all Services have their addresses on the node. A host
// port does not take the same port of every Service (kubernetes#66103), and
// follows the node to addresses that it gets later.
func TestHostPortBesideIPVS(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-pods.conflist": plainConf(range4)})
	world := n.world()
	n.run(n.host.Net, "ip link add kube-ipvs0 type bridge; ip addr add 10.96.0.1/32 dev kube-ipvs0")
	n.run(world, "ip route add 10.96.0.0/16 via "+node4+"; ip route add 203.0.113.7/32 via "+node4)
	pod := n.pod()
	pod.PortMappings = []*cri.PortMapping{mapping(cri.Protocol_TCP, 443, 80, "")}
	n.expose(pod)
	n.serve(pod.NetNS, "pod", 80)
	n.serve(n.host.Net, "service", 443)
	for address, want := range map[string]string{"10.96.0.1:443": "service ", node4 + ":443": "pod "} {
		for _, from := range []string{n.host.Net, world} {
			if answer, err := reach(from, "tcp", address); !strings.HasPrefix(answer, want) {
				t.Errorf("%s: %q, %v; want %s", address, answer, err, want)
			}
		}
	}
	n.run(n.host.Net, "ip addr add 203.0.113.7/32 dev out0")
	wait.For(t, "the new address to lead to the pod", func() bool {
		if err := n.do(func() error { return n.Ready(context.Background()) }); err != nil {
			t.Fatal(err)
		}
		answer, _ := reach(world, "tcp", "203.0.113.7:443")
		return strings.HasPrefix(answer, "pod ")
	})
}

// sctpINIT returns the first packet of an SCTP association.
func sctpINIT(from, to uint16) []byte {
	packet := binary.BigEndian.AppendUint16(nil, from)
	packet = binary.BigEndian.AppendUint16(packet, to)
	packet = append(packet, make([]byte, 8)...)                              // tag, checksum
	packet = append(packet, 1, 0, 0, 20)                                     // INIT
	packet = append(packet, 0, 0, 0, 7, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 42) // tag, window, streams, TSN
	binary.LittleEndian.PutUint32(packet[8:], crc32.Checksum(packet, crc32.MakeTable(crc32.Castagnoli)))
	return packet
}

// Not every kernel has SCTP sockets, so the test makes a packet by hand.
func TestSCTP(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-pods.conflist": plainConf(range4)})
	world := n.world()
	raw := func(in string) (conn net.PacketConn) {
		err := ns.Do(in, func() (err error) { conn, err = net.ListenPacket("ip4:132", "0.0.0.0"); return err })
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	client := raw(world)
	send := func() {
		if _, err := client.WriteTo(sctpINIT(7777, 9999), &net.IPAddr{IP: net.ParseIP(node4)}); err != nil {
			t.Fatal(err)
		}
	}
	send()                                   // and the flow is remembered
	for _, port := range []int32{99, 9999} { // the latter is the host port (moby/moby#41631)
		p := n.pod()
		p.PortMappings = []*cri.PortMapping{mapping(cri.Protocol_SCTP, 9999, port, "")}
		a := n.expose(p)
		server := raw(p.NetNS)
		buffer := make([]byte, 100)
		var size int
		var from net.Addr
		err := os.ErrDeadlineExceeded
		for end := time.Now().Add(wait.Limit); errors.Is(err, os.ErrDeadlineExceeded) && time.Now().Before(end); {
			send() // packets before the kernel has noticed that the link is up are lost
			server.SetReadDeadline(time.Now().Add(time.Second))
			size, from, err = server.ReadFrom(buffer)
		}
		if err != nil {
			t.Fatalf("no SCTP packet: %v\n%s", err, n.ruleset())
		}
		if want := sctpINIT(7777, uint16(port)); !bytes.Equal(buffer[:size], want) || from.String() != world4 {
			t.Errorf("from %s\n%x, want\n%x", from, buffer[:size], want)
		}
		n.detach(p, a)
	}
}

func TestSameHostPort(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-pods.conflist": plainConf(range4)})
	world := n.world()
	first := n.pod()
	first.PortMappings = []*cri.PortMapping{mapping(cri.Protocol_TCP, 8080, 80, "")}
	a := n.expose(first)
	n.serve(first.NetNS, "first", 80)
	leases := len(n.leased())

	for ip, clash := range map[string]bool{"": true, "0.0.0.0": true, "::": true, node4: false} {
		second := n.pod()
		second.PortMappings = []*cri.PortMapping{mapping(cri.Protocol_TCP, 8080, 80, ip)}
		planned := n.plan(second)
		b, err := n.tryAttach(second, planned)
		if clash {
			if !errors.Is(err, fault.Precondition) || !strings.Contains(fmt.Sprint(err), first.ID) {
				t.Errorf("host_ip %q: %+v, %v", ip, b, err)
			}
			if len(n.leased()) != leases {
				t.Error("the plugins have run")
			}
			b = planned
		} else if err != nil {
			t.Errorf("host_ip %q: %v", ip, err)
		} else if err := n.do(func() error { return n.Expose(context.Background(), second, b) }); err != nil {
			t.Error(err)
		}
		want := "first " + world4
		if !clash {
			n.serve(second.NetNS, "second", 80)
			want = "second " + world4 // the more specific one
		}
		if answer, err := reach(world, "tcp", node4+":8080"); err != nil || answer != want {
			t.Errorf("host_ip %q: %q, %v; want %q", ip, answer, err, want)
		}
		n.detach(second, b)
		if answer, err := reach(world, "tcp", node4+":8080"); err != nil || answer != "first "+world4 {
			t.Errorf("host_ip %q: after the end of the second pod: %q, %v", ip, answer, err)
		}
	}
	n.detach(first, a)
	last := n.pod()
	last.PortMappings = first.PortMappings
	n.detach(last, n.expose(last))
}

// Whatever happened to the firewall, a restarted server restores the rules, and
// a running one does so when the kubelet asks for the status.
func TestRulesComeBack(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-pods.conflist": plainConf(range4 + "," + range6)})
	world := n.world()
	n.run(n.host.Net, "nft add table inet foreign; nft 'add chain inet foreign c'; nft 'add rule inet foreign c tcp dport 1 accept'")
	p, gone := n.pod(), n.pod()
	p.PortMappings = []*cri.PortMapping{mapping(cri.Protocol_TCP, 8080, 80, ""), mapping(cri.Protocol_UDP, 8080, 80, "")}
	gone.PortMappings = []*cri.PortMapping{mapping(cri.Protocol_TCP, 9090, 90, "")}
	n.serve(p.NetNS, "web", 80)
	a, b := n.expose(p), n.expose(gone)
	want := n.ruleset()

	n.detach(gone, b)
	without := n.ruleset()
	if want == without || !strings.Contains(without, "foreign") {
		t.Fatalf("after detach\n%s", without)
	}
	ready := func() { // which a busy machine may not finish in time
		wait.For(t, "the rules to be back", func() bool {
			n.do(func() error { return n.Ready(context.Background()) })
			return sorted(n.ruleset()) == sorted(without)
		})
	}
	for name, break_ := range map[string]func(){
		"nothing": func() {},
		"flushed": func() {
			n.run(n.host.Net, "nft flush ruleset; nft add table inet foreign; nft 'add chain inet foreign c'; nft 'add rule inet foreign c tcp dport 1 accept'")
		},
		"half gone": func() { n.run(n.host.Net, "nft delete table ip crius-hostports") },
		"emptied":   func() { n.run(n.host.Net, "nft delete table ip6 crius-hostports; nft add table ip6 crius-hostports") },
		"of another version": func() {
			n.run(n.host.Net, "nft delete table ip crius-hostports; nft add table ip crius-hostports; nft 'add map ip crius-hostports ports { type ipv4_addr : ipv4_addr; }'")
		},
	} {
		for _, heal := range []func(){ready, func() { n.recover(map[string]*Attachment{p.ID: a}) }} {
			break_()
			heal()
			if got := n.ruleset(); sorted(got) != sorted(without) {
				t.Errorf("%s: rules\n%s\nwant\n%s", name, got, without)
			}
			n.says(name, world, "8080", node4, "web "+world4)
		}
	}
	n.run(n.host.Net, "nft add element ip crius-hostports ports '{ tcp . 9090 : 10.7.9.9 . 90 }'") // of a pod that died meanwhile
	n.recover(map[string]*Attachment{p.ID: a})
	if got := n.ruleset(); sorted(got) != sorted(without) {
		t.Errorf("rules of a dead pod stay\n%s\nwant\n%s", got, without)
	}

	n.run(n.host.Net, "nft flush ruleset") // a change notices it, too
	b = n.expose(gone)
	n.says("after a change", world, "8080", node4, "web "+world4)
	n.run(n.host.Net, "nft flush ruleset")
	n.detach(gone, b)
	n.says("after a detach", world, "8080", node4, "web "+world4)
	n.detach(p, a)
	if got := n.ruleset(); got != "" {
		t.Errorf("left\n%s", got)
	}
	n.recover(nil)
}

// sorted makes rulesets comparable: nftables lists tables in order of their
// creation.
func sorted(ruleset string) string {
	tables := strings.SplitAfter(ruleset, "\n}\n")
	slices.Sort(tables)
	return strings.Join(tables, "")
}

// No packet sees only half of the rules: neither existing nor new connections
// notice that the tables are replaced.
func TestRestartInterruptsNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-pods.conflist": plainConf(range4)})
	world := n.world()
	p := n.pod()
	p.PortMappings = []*cri.PortMapping{mapping(cri.Protocol_TCP, 8080, 80, "")}
	n.serve(p.NetNS, "web", 80)
	a := n.expose(p)
	done := make(chan struct{})
	var wait sync.WaitGroup
	var calls, failed int
	wait.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
			}
			calls++
			if answer, err := reach(world, "tcp", node4+":8080"); err != nil || answer != "web "+world4 {
				failed++
				t.Errorf("call %d: %q, %v", calls, answer, err)
			}
		}
	})
	for range 100 {
		n.recover(map[string]*Attachment{p.ID: a})
	}
	close(done)
	wait.Wait()
	t.Logf("%d calls", calls)
	if calls < 30 || failed > 0 {
		t.Errorf("%d calls, %d failed", calls, failed)
	}
	n.detach(p, a)
}

// Pods are added and removed concurrently without touching each other's rules.
func TestHostPortsConcurrently(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-pods.conflist": plainConf(range4)})
	world := n.world()
	before := n.warmUp()
	const pods = 12
	all := make([]Pod, pods)
	for i := range all {
		all[i] = n.pod()
		all[i].PortMappings = []*cri.PortMapping{mapping(cri.Protocol_TCP, int32(8000+i), 80, ""), mapping(cri.Protocol_UDP, int32(8000+i), 80, "")}
		n.serve(all[i].NetNS, fmt.Sprint("pod-", i), 80)
	}
	var wait sync.WaitGroup
	for i := range all {
		wait.Go(func() {
			planned, err := n.Plan(all[i])
			if err != nil {
				t.Error(err)
				return
			}
			a := planned
			for round := range 3 {
				if a, err = n.tryAttach(all[i], planned); err == nil {
					err = n.do(func() error { return n.Expose(context.Background(), all[i], a) })
				}
				if err != nil {
					t.Error(err)
					break
				}
				if answer, err := reach(world, "tcp", fmt.Sprint(node4, ":", 8000+i)); err != nil || answer != fmt.Sprint("pod-", i, " ", world4) {
					t.Errorf("pod %d, round %d: %q, %v", i, round, answer, err)
				}
				if err := n.tryDetach(all[i], a); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wait.Wait()
	n.settle(before)
}

// The configuration decides whether crius or a plugin forwards the ports.
func TestWhoLeadsHostPorts(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		choice, conf string
		own, offered bool
	}{
		{"auto", plainConf(range4), true, false}, {"auto", bridgeConf(range4), false, true}, {"auto", askingConf, false, true},
		{"crius", plainConf(range4), true, false}, {"crius", bridgeConf(range4), true, false},
		{"cni", plainConf(range4), false, false}, {"cni", bridgeConf(range4), false, true},
	} {
		n := newNode(t, map[string]string{"10-pods.conflist": c.conf})
		n.cfg.HostPorts = c.choice
		n.plugin("fake", "cat")
		n.restart()
		p := n.pod()
		p.PortMappings = []*cri.PortMapping{mapping(cri.Protocol_TCP, 8080, 80, ""), mapping(cri.Protocol_TCP, 0, 81, "")}
		a := n.plan(p)
		_, offered := a.Capabilities["portMappings"]
		if len(a.HostPorts) == 1 != c.own || offered != c.offered {
			t.Errorf("%s, %.60s: own %v, capabilities %s", c.choice, c.conf, a.HostPorts, a.Capabilities)
		}
		p.PortMappings = []*cri.PortMapping{mapping(cri.Protocol_TCP, 8080, 80, "::1")}
		if _, err := n.Plan(p); errors.Is(err, fault.Invalid) != c.own {
			t.Errorf("%s: host_ip ::1: %v", c.choice, err)
		}
		leader := map[bool]string{true: "crius", false: "cni"}[c.own]
		if told := n.Info()["hostPorts"]; told != leader {
			t.Errorf("%s: told %v, want %s", c.choice, told, leader)
		}
		p.PortMappings = nil
		if a := n.plan(p); len(a.HostPorts) != 0 {
			t.Errorf("no mappings: %v", a.HostPorts)
		}
	}
}

// Without nft only pods with host ports fail, before anything is made; and if
// rules cannot be removed the address stays taken until they are.
func TestNoNft(t *testing.T) {
	n := newNode(t, map[string]string{"10-pods.conflist": plainConf(range4)})
	plain, web := n.pod(), n.pod()
	web.PortMappings = []*cri.PortMapping{mapping(cri.Protocol_TCP, 8080, 80, "")}
	a := n.expose(web)
	bin := t.TempDir()
	path := os.Getenv("PATH")
	t.Setenv("PATH", bin)

	if err := n.HostPortsReady(); !errors.Is(err, fault.Unavailable) {
		t.Errorf("ready: %v", err)
	}
	n.detach(plain, n.expose(plain))
	late := n.pod()
	late.PortMappings = []*cri.PortMapping{mapping(cri.Protocol_TCP, 9090, 80, "")}
	planned := n.plan(late)
	if _, err := n.tryAttach(late, planned); !errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "install the package nftables") {
		t.Errorf("attach: %v", err)
	}
	if leased := n.leased(); len(leased) != 1 {
		t.Errorf("leased: %q", leased)
	}
	n.detach(late, planned)

	for range 2 {
		if err := n.tryDetach(web, a); !errors.Is(err, fault.Unavailable) || len(n.leased()) != 1 {
			t.Errorf("detach: %v; leased %q", err, n.leased())
		}
	}
	fake := filepath.Join(bin, "nft")
	if err := program.Write(fake, []byte("#!/bin/sh\necho no such thing >&2; exit 1")); err != nil {
		t.Fatal(err)
	}
	if err := n.tryDetach(web, a); err == nil || !strings.Contains(err.Error(), "no such thing") || len(n.leased()) != 1 {
		t.Errorf("detach: %v; leased %q", err, n.leased())
	}
	thief := n.pod() // the port is not free while it leads to the other pod
	thief.PortMappings = web.PortMappings
	stolen := n.plan(thief)
	if _, err := n.tryAttach(thief, stolen); !errors.Is(err, fault.Precondition) {
		t.Errorf("attach to a port that is owed: %v", err)
	}
	n.detach(thief, stolen)
	if err := program.Write(fake, []byte("#!/bin/sh\nexec /bin/sleep 1000")); err != nil { // nothing waits for it
		t.Fatal(err)
	}
	if err := n.do(func() error { return n.Ready(context.Background()) }); err != nil {
		t.Errorf("ready: %v", err)
	}
	t.Setenv("PATH", path)
	n.detach(web, a)
	if left := n.ruleset(); left != "" || len(n.leased()) != 0 {
		t.Errorf("left %s, leased %q", left, n.leased())
	}
}
