package integration

import (
	"context"
	"fmt"
	"net"
	"os/exec"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

// Addresses of the node in the outside network, and of a machine there.
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

// portNode is a node whose network plugins forward no host ports, with a machine
// next to it.
type portNode struct {
	*world
	outside string // network namespace of that machine
}

func newTown(t *testing.T, o node.Options) *portNode {
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
	v := &portNode{w, set.Net}
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
func (v *portNode) sh(t *testing.T, script string) string {
	t.Helper()
	out, err := v.Run(t.Context(), "sh", "-ec", script)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// from dials from a network namespace.
func from(netns, network, address string) (conn net.Conn, err error) {
	err = ns.Do(netns, func() error {
		dialer := net.Dialer{Timeout: wait.Limit, KeepAlive: -1} // see serve in the probe
		conn, err = dialer.Dial(network, address)
		return err
	})
	return conn, err
}

// page fetches "/" from the machine outside, "" if nothing listens.
func (v *portNode) page(address string) string {
	conn, err := from(v.outside, "tcp", address)
	if err != nil {
		return ""
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(wait.Limit))
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

// answers checks what the machine outside gets: servers take a moment to
// listen.
func (v *portNode) answers(t *testing.T, address, want string) {
	t.Helper()
	got := ""
	if !wait.Until(t.Context(), func() bool { got = v.page(address); return got == want }) {
		t.Errorf("%s answers %q from outside, want %q\n%s", address, got, want, v.sh(t, "nft list ruleset"))
	}
}

func ports(mappings ...*cri.PortMapping) podChange {
	return func(c *cri.PodSandboxConfig) { c.PortMappings = mappings }
}

func tcp(host, container int32) *cri.PortMapping {
	return &cri.PortMapping{Protocol: cri.Protocol_TCP, HostPort: host, ContainerPort: container}
}

// From the host, from outside, from the pod and from others; the next pod may
// have the port once the first has been stopped, and not before.
func TestHostPortWithoutAPlugin(t *testing.T) {
	t.Parallel()
	v := newTown(t, node.Options{})
	p := v.run(t, "crun", ports(tcp(8080, 80), tcp(0, 81)))
	p.start(t, "serve :80 web")
	v.answers(t, nodeAddress+":8080", "web")
	v.answers(t, "["+nodeAddress6+"]:8080", "web")
	for _, host := range []string{nodeAddress, "127.0.0.1", "[" + nodeAddress6 + "]", v.bridgeAddress(t)} {
		equal(t, "from the host by "+host, v.get(t, host+":8080", "/"), "web\n")
	}
	equal(t, "from the pod itself", p.finish(t, "get http://"+nodeAddress+":8080/"), "web\n")
	equal(t, "from the pod itself, IPv6", p.finish(t, "get http://["+nodeAddress6+"]:8080/"), "web\n")
	other := v.run(t, "crun")
	equal(t, "from another pod", other.finish(t, "get http://"+nodeAddress+":8080/"), "web\n")

	second := v.podConfig(t, ports(tcp(8080, 80)), func(c *cri.PodSandboxConfig) { c.Metadata.Name += "-2" })
	_, err := v.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: second})
	wantCode(t, err, codes.FailedPrecondition, "8080/tcp", p.id)
	p.stop(t)
	if got := v.page(nodeAddress + ":8080"); got != "" {
		t.Errorf("after StopPodSandbox: %q", got)
	}
	if rules := v.sh(t, "nft list ruleset"); rules != "" {
		t.Errorf("after StopPodSandbox:\n%s", rules)
	}
	resp, err := v.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: second})
	if err != nil {
		t.Fatalf("the retry: %v", err)
	}
	next := &pod{w: v.world, id: resp.PodSandboxId, config: second, made: []string{resp.PodSandboxId}}
	next.start(t, "serve :80 second")
	v.answers(t, nodeAddress+":8080", "second")
	for _, p := range []*pod{p, other, next} {
		p.vanish(t)
	}
	v.Restored(t, v.empty)
}

// The rules follow from the records: whatever happens to the server or the
// firewall, a live pod has its ports and a dead one has none.
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
		t.Log(what)
		must(t, again(t.Context()))
		for address, want := range map[string]string{":8080": "live", ":9090": "doomed"} {
			v.answers(t, nodeAddress+address, want)
		}
	}
	restart("restart", v.Restart)
	restart("kill -9", v.Crash)
	restart("flush and restart", func(ctx context.Context) error {
		v.sh(t, "nft flush ruleset")
		return v.Restart(ctx)
	})
	before := v.sh(t, "nft -a list table ip crius-hostports") // with handles
	v.sh(t, "nft flush ruleset")
	if _, err := v.Runtime().Status(t.Context(), &cri.StatusRequest{}); err != nil { // as kubelets do
		t.Fatal(err)
	}
	wait.For(t, "the running server to make its rules again", func() bool {
		now, err := v.Run(t.Context(), "nft", "-a", "list", "table", "ip", "crius-hostports")
		return err == nil && now != before
	})
	v.answers(t, nodeAddress+":8080", "live")
	open.SetDeadline(time.Now().Add(wait.Limit))
	fmt.Fprint(open, "GET / HTTP/1.0\r\n\r\n")
	if n, err := open.Read(make([]byte, 4096)); n == 0 {
		t.Errorf("a connection from before all that: %v", err)
	}

	if err := v.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := ns.Remove(ns.Spec{Dir: v.Path("ns"), Name: "crius-" + doomed.id}); err != nil { // as if the pod had died meanwhile
		t.Fatal(err)
	}
	if err := v.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	v.answers(t, nodeAddress+":8080", "live")
	wait.For(t, "the rules of the dead pod to go", func() bool { return !strings.Contains(v.sh(t, "nft list ruleset"), "9090") })
	doomed.vanish(t)
	live.vanish(t)
	v.Restored(t, v.empty)
}
