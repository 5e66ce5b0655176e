package integration

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

func TestPodHasReachableAddresses(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	network := p.status(t).Network
	if network == nil {
		t.Fatal("the pod's status has no network")
	}
	v4 := netip.MustParseAddr(network.Ip)
	if !netip.MustParsePrefix("10.99.0.0/16").Contains(v4) {
		t.Errorf("address %v is not of the pod subnet", v4)
	}
	if len(network.AdditionalIps) != 1 {
		t.Fatalf("additional addresses are %v, want the IPv6 one", network.AdditionalIps)
	}
	v6 := netip.MustParseAddr(network.AdditionalIps[0].Ip)
	if !netip.MustParsePrefix("fd99::/64").Contains(v6) {
		t.Errorf("address %v is not of the pod subnet", v6)
	}
	server := p.start(t, "serve :8080 hello-from-the-pod")
	for _, ip := range []netip.Addr{v4, v6} {
		equal(t, "answer on "+ip.String(), w.get(t, netip.AddrPortFrom(ip, 8080).String(), "/"), "hello-from-the-pod\n")
	}
	f := server.facts(t)
	for _, want := range []string{v4.String() + "/", v6.String() + "/"} {
		if !slices.ContainsFunc(f.Addresses, func(a string) bool { return strings.HasPrefix(a, want) }) {
			t.Errorf("the container has addresses %v, the status says %s", f.Addresses, want)
		}
	}
}

// get fetches a page.
func (w *world) get(t *testing.T, address, path string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), wait.Limit)
	defer cancel()
	body, err := w.Get(ctx, address, path)
	if err != nil {
		t.Fatal(err)
	}
	return body
}

func TestContainersOfAPodShareItsNetwork(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p, other := w.run(t, "crun"), w.run(t, "crun")
	p.start(t, "serve 127.0.0.1:8080 local")
	equal(t, "answer on the pod's loopback", p.finish(t, "get http://127.0.0.1:8080/"), "local\n")

	p.start(t, "serve :9090 across")
	url := fmt.Sprintf("http://%s:9090/", p.status(t).Network.Ip)
	equal(t, "answer across pods", other.finish(t, "get "+url), "across\n")
	c := other.start(t, "get -now http://127.0.0.1:8080/")
	if s := c.wait(t); s.ExitCode == 0 {
		t.Error("a pod's loopback answers inside another pod")
	}
}

func TestHostNetworkPodIsInTheNodesNetwork(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun", kubelet.HostNetwork)
	f := p.facts(t, hostNetworkContainer)
	equal(t, "network namespace", f.Namespaces["net"], w.netNS(t))
	hostname, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "hostname", f.Hostname, hostname)
	variable, _ := f.Getenv("HOSTNAME") // containerd/cri#898: it was missing, or the pod's
	equal(t, "HOSTNAME", variable, hostname)
	if n := p.status(t).Network; n != nil && n.Ip != "" {
		t.Errorf("a host network pod has the address %s of its own", n.Ip)
	}
}

func hostNetworkContainer(c *cri.ContainerConfig) {
	c.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE
}

// netNS returns the node's network namespace as /proc names it.
func (w *world) netNS(t *testing.T) (link string) {
	t.Helper()
	err := w.Do(func() (err error) {
		link, err = os.Readlink("/proc/thread-self/ns/net")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return link
}

func TestHostPortReachesThePodWhileItLives(t *testing.T) {
	t.Parallel()
	w := shared(t)
	hostPort := int32(30080 + slices.Index(handlers, "crun"))
	p := w.run(t, "crun", func(c *cri.PodSandboxConfig) {
		c.PortMappings = []*cri.PortMapping{
			{Protocol: cri.Protocol_TCP, ContainerPort: 8080, HostPort: hostPort},
			{Protocol: cri.Protocol_TCP, ContainerPort: 8081}, // no host port: only declared
		}
	})
	p.start(t, "serve :8080 through-the-host")
	gateway := w.bridgeAddress(t)
	for _, host := range []string{"127.0.0.1", gateway} {
		equal(t, "answer on "+host, w.get(t, fmt.Sprintf("%s:%d", host, hostPort), "/"), "through-the-host\n")
	}
	p.stop(t)
	ctx, cancel := context.WithTimeout(t.Context(), wait.Limit)
	defer cancel()
	if conn, err := w.Dial(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", hostPort)); err == nil {
		conn.Close()
		t.Error("the host port still accepts connections after StopPodSandbox")
	}
}

// bridgeAddress returns the node's own IPv4 address on the pod bridge.
func (w *world) bridgeAddress(t *testing.T) string {
	t.Helper()
	out, err := w.Run(t.Context(), "ip", "-4", "-o", "addr", "show", "dev", node.Bridge)
	if err != nil {
		t.Fatal(err)
	}
	for _, word := range strings.Fields(out) {
		if prefix, err := netip.ParsePrefix(word); err == nil {
			return prefix.Addr().String()
		}
	}
	t.Fatalf("no address in %q", out)
	return ""
}

// A network may have no addresses to give, as one of layer 2 alone: whether a pod without an IP
// will do is for the kubelet to say.
func TestPodWithoutAddress(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	must(t, w.Write("cni/net.d/10-p.conflist", `{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "`+node.Bridge+`", "ipam": {}}]}`))
	must(t, w.settle(t.Context(), handlers...))
	ofPort := func(c *cri.PodSandboxConfig) {
		c.PortMappings = []*cri.PortMapping{{ContainerPort: 80, HostPort: 8080}}
	}
	for _, handler := range handlers {
		p := w.run(t, handler, ofPort)
		if network := p.status(t).Network; network != nil { // a kubelet would make a new sandbox
			t.Errorf("network of a pod without an address: %v", network)
		}
		equal(t, "output", p.finish(t, "echo hello"), "hello\n")
		must(t, w.Crash(t.Context()))
		equal(t, "state after a crash", p.status(t).State, cri.PodSandboxState_SANDBOX_READY)
		equal(t, "output after a crash", p.finish(t, "echo again"), "again\n")
		p.stop(t)
		p.remove(t)
	}
}
