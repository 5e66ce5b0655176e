package integration

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/internal/testkit/kubelet"
	"github.com/crius-run/crius/internal/testkit/node"
)

// Addresses of the node towards the world, and of one in the world.
const (
	nodeAddress, worldAddress   = "192.0.2.1", "192.0.2.2"
	nodeAddress6, worldAddress6 = "2001:db8::1", "2001:db8::2"
)

// portless is a CNI configuration without a plugin for host ports.
const portless = `{"cniVersion": "1.0.0", "name": "pods", "plugins": [{
	"type": "bridge", "bridge": "` + node.Bridge + `", "isGateway": true, "hairpinMode": true,
	"ipam": {"type": "host-local", "dataDir": "{{.Path "cni" "leases"}}",
		"ranges": [[{"subnet": "10.99.0.0/16"}], [{"subnet": "fd99::/64"}]],
		"routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}}]}`

// town is a node whose network leads no host ports, and a machine beside it.
type town struct {
	*world
	outside string // network namespace of that machine
}

func newTown(t *testing.T, o node.Options) *town {
	t.Helper()
	w := private(t, o)
	if err := w.Write("cni/net.d/10-p.conflist", portless); err != nil {
		t.Fatal(err)
	}
	spec := ns.Spec{Dir: t.TempDir(), Name: "outside", Net: true}
	set, err := ns.Create(spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := ns.Remove(spec); err != nil {
			t.Error(err)
		}
	})
	v := &town{w, set.Net}
	v.sh(t, "ip link add out0 type veth peer name eth0; ip link set eth0 netns "+set.Net+"; ip link set out0 up; "+
		"ip addr add "+nodeAddress+"/24 dev out0; ip addr add "+nodeAddress6+"/64 dev out0 nodad")
	err = ns.Do(set.Net, func() error {
		return exec.Command("sh", "-ec", "ip link set eth0 up; ip addr add "+worldAddress+"/24 dev eth0; ip addr add "+worldAddress6+"/64 dev eth0 nodad").Run()
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.settle(t.Context(), handlers...); err != nil {
		t.Fatal(err)
	}
	return v
}

// sh runs a shell script in the node's network.
func (v *town) sh(t *testing.T, script string) string {
	t.Helper()
	out, err := v.Run(t.Context(), "sh", "-ec", script)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// clean checks that the node is as it was without any pod.
func (v *town) clean(t *testing.T) {
	t.Helper()
	if err := v.Clean(t.Context(), v.empty, patience); err != nil {
		t.Error(err)
	}
}

// from dials from a network namespace.
func from(netns, network, address string) (conn net.Conn, err error) {
	err = ns.Do(netns, func() error {
		conn, err = net.DialTimeout(network, address, patience/4)
		return err
	})
	return conn, err
}

// page fetches "/" from the machine outside, "" if nobody listens.
func (v *town) page(address string) string {
	conn, err := from(v.outside, "tcp", address)
	if err != nil {
		return ""
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(patience / 4))
	fmt.Fprint(conn, "GET / HTTP/1.0\r\n\r\n")
	var all strings.Builder
	buffer := make([]byte, 4096)
	for {
		n, err := conn.Read(buffer)
		all.Write(buffer[:n])
		if err != nil {
			break
		}
	}
	_, body, _ := strings.Cut(all.String(), "\r\n\r\n")
	return strings.TrimSpace(body)
}

// answers checks what the machine outside gets, within patience: servers take
// their time to listen.
func (v *town) answers(t *testing.T, address, want string) {
	t.Helper()
	got := ""
	if !eventually(func() bool { got = v.page(address); return got == want }) {
		t.Errorf("%s answers %q from outside, want %q\n%s", address, got, want, v.sh(t, "nft list ruleset"))
	}
}

func ports(mappings ...*cri.PortMapping) podChange {
	return func(c *cri.PodSandboxConfig) { c.PortMappings = mappings }
}

func tcp(host, container int32) *cri.PortMapping {
	return &cri.PortMapping{Protocol: cri.Protocol_TCP, HostPort: host, ContainerPort: container}
}

func TestHostPortWithoutAPlugin(t *testing.T) {
	t.Parallel()
	v := newTown(t, node.Options{})
	t.Run("handlers", func(t *testing.T) {
		each(t, func(t *testing.T, handler string) {
			p := v.run(t, handler, ports(tcp(8080, 80), tcp(0, 81)))
			p.start(t, "serve :80 web")
			v.answers(t, nodeAddress+":8080", "web")
			v.answers(t, "["+nodeAddress6+"]:8080", "web")
			for _, host := range []string{nodeAddress, "127.0.0.1", "[" + nodeAddress6 + "]", v.bridgeAddress(t)} {
				equal(t, "from the host by "+host, v.get(t, host+":8080", "/"), "web\n")
			}
			equal(t, "from the pod itself", p.finish(t, "get http://"+nodeAddress+":8080/"), "web\n")
			equal(t, "from the pod itself, IPv6", p.finish(t, "get http://["+nodeAddress6+"]:8080/"), "web\n")
			other := v.run(t, handler)
			equal(t, "from another pod", other.finish(t, "get http://"+nodeAddress+":8080/"), "web\n")

			p.stop(t)
			if got := v.page(nodeAddress + ":8080"); got != "" {
				t.Errorf("after StopPodSandbox: %q", got)
			}
			if rules := v.sh(t, "nft list ruleset"); rules != "" {
				t.Errorf("after StopPodSandbox:\n%s", rules)
			}
		})
	})
	v.clean(t)
}

func TestHostNetworkPodHasNoHostPortRules(t *testing.T) {
	t.Parallel()
	v := newTown(t, node.Options{})
	p := v.run(t, "runc", kubelet.HostNetwork, ports(tcp(8080, 8080)))
	p.start(t, "serve :8080 host", hostNetworkContainer)
	v.answers(t, nodeAddress+":8080", "host")
	if rules := v.sh(t, "nft list ruleset"); rules != "" {
		t.Errorf("rules\n%s", rules)
	}
}

// The key network.host_ports takes the ports from a portmap plugin.
func TestHostPortInSpiteOfThePlugin(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{Config: "[network]\nhost_ports = \"crius\"\n"})
	p := w.run(t, "runc", ports(tcp(8080, 80)))
	p.start(t, "serve :80 web")
	equal(t, "from the host", w.get(t, "127.0.0.1:8080", "/"), "web\n")
	out, err := w.Run(t.Context(), "sh", "-ec", "nft list table ip crius-hostports; iptables-save")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out, "tcp . 8080 : ") || strings.Contains(out, "CNI-DN-") {
		t.Errorf("rules\n%s", out)
	}
	p.stop(t)
	if err := w.Clean(t.Context(), w.empty, 0); err != nil && strings.Contains(err.Error(), "rule:") {
		t.Error(err)
	}
}

// The rules are made of the records: whatever becomes of the server or of the
// firewall, a living pod has its ports and a dead one has none.
func TestHostPortsSurviveTheServer(t *testing.T) {
	t.Parallel()
	v := newTown(t, node.Options{})
	live, doomed := v.run(t, "runc", ports(tcp(8080, 80))), v.run(t, "crun", ports(tcp(9090, 90)))
	live.start(t, "serve :80 live")
	doomed.start(t, "serve :90 doomed")
	v.answers(t, nodeAddress+":8080", "live")
	v.answers(t, nodeAddress+":9090", "doomed")

	open, err := from(v.outside, "tcp", nodeAddress+":8080")
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	restart := func(what string, again func(context.Context) error) {
		t.Helper()
		if err := again(t.Context()); err != nil {
			t.Fatal(what, err)
		}
		for address, want := range map[string]string{":8080": "live", ":9090": "doomed"} {
			if got := v.page(nodeAddress + address); got != want {
				t.Errorf("%s: %s answers %q, want %q", what, address, got, want)
			}
		}
	}
	restart("restart", v.Restart)
	restart("kill -9", v.Crash)
	restart("flush and restart", func(ctx context.Context) error {
		v.sh(t, "nft flush ruleset")
		return v.Restart(ctx)
	})
	v.sh(t, "nft flush ruleset")
	v.answers(t, nodeAddress+":8080", "") // the test is one
	if _, err := v.Runtime().Status(t.Context(), &cri.StatusRequest{}); err != nil {
		t.Fatal(err)
	}
	v.answers(t, nodeAddress+":8080", "live")
	open.SetDeadline(time.Now().Add(patience))
	fmt.Fprint(open, "GET / HTTP/1.0\r\n\r\n")
	if n, err := open.Read(make([]byte, 4096)); n == 0 {
		t.Errorf("a connection from before all that: %v", err)
	}

	if err := v.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := ns.Remove(ns.Spec{Dir: v.Path("ns"), Name: "crius-" + doomed.id}); err != nil { // as if the pod died meanwhile
		t.Fatal(err)
	}
	if err := v.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	v.answers(t, nodeAddress+":8080", "live")
	if rules := v.sh(t, "nft list ruleset"); strings.Contains(rules, "9090") {
		t.Errorf("the dead pod has rules\n%s", rules)
	}
	doomed.vanish(t)
	live.vanish(t)
	v.clean(t)
}

// At whatever moment the server dies, the retry of the kubelet works, and in
// the end nothing is left.
func TestHostPortsAfterDeathOfTheServer(t *testing.T) {
	t.Parallel()
	v := newTown(t, node.Options{})
	began := time.Now()
	p := &pod{w: v.world, config: v.podConfig(t, ports(tcp(8080, 80)))}
	run := func() error {
		resp, err := v.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: p.config})
		if err == nil {
			p.id, p.made = resp.PodSandboxId, []string{resp.PodSandboxId}
		}
		return err
	}
	if err := run(); err != nil {
		t.Fatal(err)
	}
	whole := time.Since(began)
	p.vanish(t)
	const rounds = 10
	for i := range rounds {
		p.config = v.podConfig(t, ports(tcp(8080, 80)))
		tried := make(chan error, 1)
		go func() { tried <- run() }()
		time.Sleep(whole * time.Duration(i+1) / rounds)
		if err := v.Crash(t.Context()); err != nil {
			t.Fatal(err)
		}
		<-tried
		if err := run(); err != nil {
			t.Fatalf("round %d: retry: %v", i, err)
		}
		p.start(t, fmt.Sprint("serve :80 round-", i))
		v.answers(t, nodeAddress+":8080", fmt.Sprint("round-", i))

		stopped := make(chan struct{})
		go func() {
			defer close(stopped)
			v.Runtime().StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: p.id})
		}()
		time.Sleep(200 * time.Millisecond * time.Duration(i) / rounds)
		if err := v.Crash(t.Context()); err != nil {
			t.Fatal(err)
		}
		<-stopped
		p.vanish(t)
	}
	v.clean(t)
}

func TestTwoPodsWantOneHostPort(t *testing.T) {
	t.Parallel()
	v := newTown(t, node.Options{})
	first := v.run(t, "runc", ports(tcp(8080, 80)))
	first.start(t, "serve :80 first")
	second := v.podConfig(t, ports(tcp(8080, 80)))
	_, err := v.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: second})
	wantCode(t, err, codes.FailedPrecondition, "8080/tcp", first.id)
	v.answers(t, nodeAddress+":8080", "first")
	first.stop(t)
	resp, err := v.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: second})
	if err != nil {
		t.Fatalf("the retry: %v", err)
	}
	p := &pod{w: v.world, id: resp.PodSandboxId, config: second, made: []string{resp.PodSandboxId}}
	p.start(t, "serve :80 second")
	v.answers(t, nodeAddress+":8080", "second")
	p.vanish(t)
	first.vanish(t)
	v.clean(t)
}

// A client that sends UDP without a pause reaches the pod that there is.
func TestUDPHostPortFollowsThePod(t *testing.T) {
	t.Parallel()
	v := newTown(t, node.Options{})
	client, err := from(v.outside, "udp", nodeAddress+":5353")
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	for i := range 3 {
		for range 3 { // into the void: these make the flow that has to be forgotten
			client.Write([]byte("?"))
		}
		p := v.run(t, "runc", ports(&cri.PortMapping{Protocol: cri.Protocol_UDP, HostPort: 5353, ContainerPort: 53}))
		name := fmt.Sprint("pod-", i)
		end := echo(t, v.Path("ns", "netns", "crius-"+p.id), name)
		got := ""
		if !eventually(func() bool { got = ask(client); return got == name }) {
			t.Errorf("round %d: %q answers, want %q", i, got, name)
		}
		end()
		p.vanish(t)
	}
	v.clean(t)
}

// echo answers every UDP packet to port 53 of a network namespace with name.
func echo(t *testing.T, netns, name string) (end func()) {
	t.Helper()
	var conn net.PacketConn
	err := ns.Do(netns, func() (err error) { conn, err = net.ListenPacket("udp", ":53"); return err })
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for buffer := make([]byte, 100); ; {
			_, from, err := conn.ReadFrom(buffer)
			if err != nil {
				return
			}
			conn.WriteTo([]byte(name), from)
		}
	}()
	return func() { conn.Close(); <-done }
}

func ask(conn net.Conn) string {
	conn.SetDeadline(time.Now().Add(200 * time.Millisecond))
	conn.Write([]byte("?"))
	buffer := make([]byte, 100)
	n, err := conn.Read(buffer)
	if errors.Is(err, syscall.ECONNREFUSED) {
		time.Sleep(20 * time.Millisecond)
	}
	return string(buffer[:n])
}

// SCTP has no sockets in every kernel, but every kernel has its rule.
func TestSCTPHostPort(t *testing.T) {
	t.Parallel()
	v := newTown(t, node.Options{})
	p := v.run(t, "runc", ports(&cri.PortMapping{Protocol: cri.Protocol_SCTP, HostPort: 9999, ContainerPort: 99, HostIp: nodeAddress}))
	want := nodeAddress + " . sctp . 9999 : " + p.status(t).Network.Ip + " . 99"
	if rules := v.sh(t, "nft list map ip crius-hostports addresses"); !strings.Contains(rules, want) {
		t.Errorf("no %q in\n%s", want, rules)
	}
}

// Without nft, or with one that fails, only pods with host ports are concerned,
// and nobody waits for it.
func TestHostPortsWithoutNft(t *testing.T) {
	t.Parallel()
	bin := t.TempDir()
	for _, name := range []string{"runc", "crun", "nft"} {
		path, err := exec.LookPath(name)
		if err == nil {
			err = os.Symlink(path, filepath.Join(bin, name))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	v := newTown(t, node.Options{Env: []string{"PATH=" + bin}})
	nft, aside := filepath.Join(bin, "nft"), filepath.Join(bin, "aside")
	web := v.run(t, "runc", ports(tcp(8080, 80)))
	c := web.start(t, "sleep")
	if err := os.Rename(nft, aside); err != nil {
		t.Fatal(err)
	}

	plain := v.run(t, "runc")
	plain.finish(t, "echo works")
	plain.vanish(t)
	config := v.podConfig(t, ports(tcp(9090, 90)))
	_, err := v.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config})
	wantCode(t, err, codes.Unavailable, "install the package nftables")

	web.stop(t)
	if left := v.processesOf(t, c.id); len(left) > 0 {
		t.Errorf("processes %v live on because rules cannot be removed", left)
	}
	web.remove(t)
	if rules := v.sh(t, "nft list ruleset"); !strings.Contains(rules, "8080") {
		t.Errorf("the rules are gone without nft\n%s", rules)
	}
	if err := v.Crash(t.Context()); err != nil { // the debt survives
		t.Fatal(err)
	}
	if err := os.Rename(aside, nft); err != nil {
		t.Fatal(err)
	}
	v.clean(t)
}
