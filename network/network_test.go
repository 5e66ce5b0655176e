package network

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
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
	"github.com/crius-run/crius/test/kit/wait"
)

// answer dials address in the namespace from and returns what a one-shot server
// in the namespace to, listening on listen, replies: the caller's apparent
// address.
func answer(t testing.TB, to, listen, from, address string) string {
	t.Helper()
	var listener net.Listener
	err := ns.Do(to, func() (err error) {
		wait.Until(t.Context(), func() bool { // IPv6 addresses come with a delay (duplicate detection)
			listener, err = net.Listen("tcp", listen)
			return err == nil
		})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go func() {
		if conn, err := listener.Accept(); err == nil {
			fmt.Fprint(conn, conn.RemoteAddr())
			conn.Close()
		}
	}()
	var text []byte
	err = ns.Do(from, func() error {
		conn, err := net.DialTimeout("tcp", address, time.Minute)
		if err != nil {
			return err
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(wait.Limit))
		text, err = io.ReadAll(conn)
		return err
	})
	if err != nil {
		t.Errorf("dial %s: %v", address, err)
	}
	return string(text)
}

func TestBridgeDualStack(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-pods.conflist": bridgeConf(range6 + "," + range4)})
	before := n.warmUp()

	web := n.pod()
	web.PortMappings = []*cri.PortMapping{
		{Protocol: cri.Protocol_TCP, ContainerPort: 80, HostPort: 8080},
		{Protocol: cri.Protocol_UDP, ContainerPort: 53, HostPort: 5353},
		{Protocol: cri.Protocol_SCTP, ContainerPort: 99, HostPort: 9999},
		{Protocol: cri.Protocol_TCP, ContainerPort: 81}, // just a statement
	}
	web.Annotations = map[string]string{ingressBandwidth: "10M", egressBandwidth: "20M"}
	a := n.attach(web)
	if len(a.IPs) != 2 || !strings.HasPrefix(a.IPs[0], "10.7.") || !strings.HasPrefix(a.IPs[1], "fd00:7::") {
		t.Fatalf("IPs %q: want IPv4 first, although the plugins give it last", a.IPs)
	}
	if a.Network != "pods" || a.Interface != "eth0" || a.NetNSInode == 0 {
		t.Errorf("attachment %+v", a)
	}
	during := n.footprint()
	for _, want := range []string{"--dport 8080", "--dport 5353", "-p sctp", "MASQUERADE", "qdisc tbf"} {
		if !strings.Contains(during, want) {
			t.Errorf("no %q in the host's\n%s", want, during)
		}
	}
	if strings.Contains(during, ":81 ") || strings.Contains(during, ":81\n") {
		t.Error("a mapping without a host port was made")
	}

	other := n.pod()
	b := n.attach(other)
	for i, ip := range a.IPs {
		from := answer(t, web.NetNS, net.JoinHostPort(ip, "80"), other.NetNS, net.JoinHostPort(ip, "80"))
		if host, _, _ := net.SplitHostPort(from); host != b.IPs[i] {
			t.Errorf("pod %s is seen as %q by its neighbour", b.IPs[i], from)
		}
	}
	answer(t, web.NetNS, ":80", n.host.Net, net.JoinHostPort("10.7.0.1", "8080")) // through the mapping

	n.detach(other, b)
	n.detach(web, a)
	n.settle(before)
	if left := n.leased(); len(left) != 0 {
		t.Errorf("leased: %q", left)
	}
}

// cri-o#2849, containerd#5438, #12926: whatever has been lost since the ADD,
// the DEL happens, and releases everything.
func TestDetachAfterLoss(t *testing.T) {
	t.Parallel()
	losses := map[string]func(*node, Pod){
		"nothing": func(*node, Pod) {},
		"restart": func(n *node, _ Pod) { n.restart() },
		"conf gone": func(n *node, _ Pod) {
			n.restart()
			os.RemoveAll(n.confs)
		},
		"conf replaced": func(n *node, _ Pod) {
			n.conf("10-pods.conflist", `{"cniVersion": "1.0.0", "name": "other", "plugins": [{"type": "no-such-plugin"}]}`)
		},
		"netns gone": func(n *node, p Pod) { n.forget(p) },
		"cache gone": func(n *node, p Pod) { os.RemoveAll(p.CacheDir) },
		"cache torn by a power cut": func(n *node, p Pod) {
			files, _ := filepath.Glob(p.CacheDir + "/results/*")
			for _, f := range files {
				os.Truncate(f, 0)
			}
			if len(files) == 0 {
				n.Error("no cache file")
			}
		},
		"all": func(n *node, p Pod) {
			n.restart()
			os.RemoveAll(n.confs)
			os.RemoveAll(p.CacheDir)
			n.forget(p)
		},
	}
	for confName, conf := range map[string]string{
		// Without ipMasq: plugins 1.1.1 look up its rules by the pod's addresses in
		// its namespace, and can't when that is gone.
		"bridge": strings.Replace(bridgeConf(range4), `"ipMasq": true, `, "", 1),
		"ptp":    ptpConf(range4),
	} {
		for name, lose := range losses {
			t.Run(confName+"/"+name, func(t *testing.T) {
				t.Parallel()
				n := newNode(t, map[string]string{"10-pods.conflist": conf})
				before := n.warmUp()
				p := n.pod()
				p.PortMappings = []*cri.PortMapping{{ContainerPort: 80, HostPort: 8080}}
				a := n.attach(p)
				if n.footprint() == before || len(n.leased()) != 1 {
					t.Fatalf("nothing was attached; leased %q", n.leased())
				}
				lose(n, p)
				for range 2 {
					n.detach(p, a)
				}
				p.NetNS = "" // the caller may know that it is gone
				n.detach(p, a)
				n.settle(before)
				if left := n.leased(); len(left) != 0 {
					t.Errorf("leased: %q", left)
				}
			})
		}
	}
}

// warmUp makes what plugins leave for ever: the bridge, chains without a rule.
// The result is what every later pod leaves.
func (n *node) warmUp() string {
	n.Helper()
	p := n.pod()
	p.PortMappings = []*cri.PortMapping{{ContainerPort: 1, HostPort: 1}}
	n.detach(p, n.attach(p))
	return n.footprint()
}

// settle waits until the host is as before: the kernel removes the interfaces
// of a network namespace some time after its end.
func (n *node) settle(before string) {
	n.Helper()
	var after string
	if !wait.Until(context.Background(), func() bool { after = n.footprint(); return after == before }) {
		n.Errorf("before\n%s\n\nafter\n%s", before, after)
	}
}

// A crash between Plan and ADD, or between ADD and its record, leaves only the
// planned Attachment.
func TestDetachFromPlan(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-pods.conflist": bridgeConf(range4)})
	before := n.warmUp()
	for _, added := range []bool{false, true} {
		p := n.pod()
		p.PortMappings = []*cri.PortMapping{{ContainerPort: 80, HostPort: 8080}}
		planned := n.plan(p)
		if added {
			if _, err := n.tryAttach(p, planned); err != nil {
				t.Fatal(err)
			}
		}
		n.restart()
		n.detach(p, planned)
		n.settle(before)
		if left := n.leased(); len(left) != 0 {
			t.Errorf("added %v: leased %q", added, left)
		}
	}
}

// A chain that fails, or takes too long, after its first plugin has succeeded
// is undone by Detach.
func TestPartialAdd(t *testing.T) {
	t.Parallel()
	for name, script := range map[string]string{
		"fails":  `[ $CNI_COMMAND = DEL ] && exit 0; echo '{"cniVersion": "1.0.0", "code": 7, "msg": "told to fail"}'; exit 1`,
		"hangs":  `[ $CNI_COMMAND = DEL ] && exit 0; : >DIR/hangs; sleep 1000`,
		"talks":  `[ $CNI_COMMAND = DEL ] && exit 0; yes`,
		"killed": `[ $CNI_COMMAND = DEL ] && exit 0; kill -9 $$`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conf := strings.Replace(bridgeConf(range4), `{"type": "bandwidth", "capabilities": {"bandwidth": true}}`, `{"type": "last"}`, 1)
			n := newNode(t, map[string]string{"10-pods.conflist": conf})
			n.plugin("last", strings.ReplaceAll(script, "DIR", n.dir))
			var before string
			for i := range 2 {
				if i == 1 { // after the first time, which leaves permanent objects
					before = n.footprint()
				}
				p := n.pod()
				p.PortMappings = []*cri.PortMapping{{ContainerPort: 80, HostPort: 8080}}
				planned := n.plan(p)
				var a *Attachment
				attach := func() (err error) { a, err = n.tryAttach(p, planned); return err }
				var err error
				if name == "hangs" {
					err = n.hung(attach, func() { n.detach(p, planned) })
				} else {
					err = attach()
				}
				if err == nil || a != nil {
					t.Fatalf("attached: %+v, %v", a, err)
				}
				if timeout := errors.Is(err, fault.Timeout); timeout != (name == "hangs") {
					t.Errorf("error %v", err)
				}
				if len(n.leased()) == 0 {
					t.Error("the first plugin did not run")
				}
				n.detach(p, planned)
				if left := n.leased(); len(left) != 0 {
					t.Errorf("leased: %q", left)
				}
			}
			n.settle(before)
		})
	}
}

func TestConcurrent(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-pods.conflist": bridgeConf(range4)})
	before := n.warmUp()

	const pods = 16
	attached := make([]*Attachment, pods)
	all := make([]Pod, pods)
	for i := range all {
		all[i] = n.pod()
		all[i].PortMappings = []*cri.PortMapping{{ContainerPort: 80, HostPort: int32(8000 + i)}}
	}
	var wait sync.WaitGroup
	for i := range pods {
		wait.Go(func() {
			planned, err := n.Plan(all[i])
			if err == nil {
				attached[i], err = n.tryAttach(all[i], planned)
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	wait.Wait()
	if t.Failed() {
		t.FailNow()
	}
	var ips []string
	for _, a := range attached {
		ips = append(ips, a.IPs...)
	}
	slices.Sort(ips)
	if leased := len(n.leased()); len(slices.Compact(ips)) != pods || leased != pods {
		t.Errorf("addresses %q, %d leased; want %d different ones", ips, leased, pods)
	}
	for i := range pods {
		wait.Go(func() {
			if err := n.tryDetach(all[i], attached[i]); err != nil {
				t.Error(err)
			}
		})
	}
	wait.Wait()
	n.settle(before)
	if left := n.leased(); len(left) != 0 {
		t.Errorf("leased: %q", left)
	}
}

// A list may have a loopback plugin, which the pod does not need.
func TestLoopbackInList(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-pods.conflist": `{"cniVersion": "1.0.0", "name": "pods", "plugins": [
		{"type": "bridge", "bridge": "cni0", "isGateway": true, ` + hostLocal(range6+","+range4) + `}, {"type": "loopback"}]}`})
	p := n.pod()
	a := n.attach(p)
	if len(a.IPs) != 2 || !netip.MustParseAddr(a.IPs[0]).IsPrivate() {
		t.Errorf("IPs %q", a.IPs)
	}
	err := ns.Do(p.NetNS, func() error {
		out, err := exec.Command("ip", "-o", "addr", "show", "lo").Output()
		if !strings.Contains(string(out), "127.0.0.1/8") || !strings.Contains(string(out), "::1/128") {
			t.Errorf("lo has %s", out)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	n.detach(p, a)
}

// The shipped sample works unchanged.
func TestContribSample(t *testing.T) {
	t.Parallel()
	sample, err := os.ReadFile("../contrib/cni/10-crius-bridge.conflist")
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Replace(string(sample), `"type": "host-local",`, `"type": "host-local", "dataDir": "LEASES",`, 1)
	n := newNode(t, map[string]string{"10-crius-bridge.conflist": text})
	if err := n.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	if by := n.HostPortsBy(); !strings.HasPrefix(by, "crius forwards host ports") {
		t.Errorf("host ports: %s", by)
	}
	p := n.pod()
	p.PortMappings = []*cri.PortMapping{{ContainerPort: 80, HostPort: 8080}}
	p.Annotations = map[string]string{egressBandwidth: "1M"}
	a := n.attach(p)
	if len(a.IPs) != 2 || len(n.leased()) != 2 {
		t.Errorf("IPs %q, leased %q", a.IPs, n.leased())
	}
	n.detach(p, a)
	if left := n.leased(); len(left) != 0 {
		t.Errorf("leased: %q", left)
	}
}

func TestWhoForwardsHostPortsIsSaid(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-p.conflist": `{"cniVersion": "1.0.0", "name": "p", "plugins": [{"type": "ports", "capabilities": {"portMappings": true}}]}`})
	if by := n.HostPortsBy(); !strings.HasPrefix(by, "plugin ports of ") || !strings.Contains(by, `set network.host_ports = "crius"`) {
		t.Errorf("plugin: %s", by)
	}
	n.conf("10-p.conflist", `{"cniVersion": "1.0.0", "name": "p", "plugins": [{"type": "cilium"}]}`)
	n.cfg.HostPorts = portsByCNI
	n.restart()
	if by := n.HostPortsBy(); !strings.HasPrefix(by, `host ports are left to network "p"`) {
		t.Errorf("network: %s", by)
	}
	n.cfg.HostPorts = portsByAuto
	n.Configure(n.cfg.Config) // without a restart
	if by := n.HostPortsBy(); !strings.HasPrefix(by, "crius forwards") {
		t.Errorf("auto: %s", by)
	}
}

func TestPlanRefuses(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-pods.conflist": bridgeConf(range4)})
	for name, spoil := range map[string]func(*Pod){
		"no id":             func(p *Pod) { p.ID = "" },
		"id with a path":    func(p *Pod) { p.ID = "../../etc" },
		"no cache":          func(p *Pod) { p.CacheDir = "" },
		"args in a name":    func(p *Pod) { p.Name = "a;K8S_POD_NAMESPACE=kube-system" },
		"args in namespace": func(p *Pod) { p.Namespace = "a=b" },
		"newline in uid":    func(p *Pod) { p.UID = "a\nb" },
		"host port":         func(p *Pod) { p.PortMappings = []*cri.PortMapping{{ContainerPort: 80, HostPort: 65536}} },
		"negative port":     func(p *Pod) { p.PortMappings = []*cri.PortMapping{{ContainerPort: 80, HostPort: -1}} },
		"container port":    func(p *Pod) { p.PortMappings = []*cri.PortMapping{{HostPort: 80}} },
		"protocol":          func(p *Pod) { p.PortMappings = []*cri.PortMapping{{ContainerPort: 80, HostPort: 80, Protocol: 7}} },
		"host ip":           func(p *Pod) { p.PortMappings = []*cri.PortMapping{{ContainerPort: 80, HostPort: 80, HostIp: "all"}} },
		"host ip with zone": func(p *Pod) {
			p.PortMappings = []*cri.PortMapping{{ContainerPort: 80, HostPort: 80, HostIp: "fe80::1%eth0"}}
		},
		"bandwidth":           func(p *Pod) { p.Annotations = map[string]string{ingressBandwidth: "much"} },
		"bandwidth too small": func(p *Pod) { p.Annotations = map[string]string{egressBandwidth: "999"} },
		"bandwidth too large": func(p *Pod) { p.Annotations = map[string]string{egressBandwidth: "2P"} },
	} {
		p := n.pod()
		spoil(&p)
		if a, err := n.Plan(p); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: %+v, %v; want fault.Invalid", name, a, err)
		}
	}
	p := n.pod()
	n.forget(p)
	if _, err := n.tryAttach(p, n.plan(p)); !errors.Is(err, fault.NotFound) {
		t.Errorf("without the network namespace: %v", err)
	}
	if err := n.Detach(t.Context(), p, nil); err != nil {
		t.Errorf("nothing to detach: %v", err)
	}
}

// Threads, files, processes and mounts are released. Not parallel: it counts
// those of the whole process.
func TestNoLeak(t *testing.T) {
	n := newNode(t, map[string]string{"10-pods.conflist": bridgeConf(range4)})
	count := func(dir string) int {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	cycle := func() {
		p := n.pod()
		n.detach(p, n.attach(p))
		n.forget(p)
	}
	cycle()
	files, threads := count("/proc/self/fd"), count("/proc/self/task")
	for range 20 {
		cycle()
	}
	wait.For(t, "the files to be closed", func() bool { return count("/proc/self/fd") <= files })
	const slack = 8 // the Go runtime's own
	wait.For(t, "the threads to end", func() bool { return count("/proc/self/task") <= threads+slack })
}

func BenchmarkAttachDetach(b *testing.B) {
	for name, ranges := range map[string]string{"IPv4": range4, "dual stack": range4 + "," + range6} {
		b.Run(name, func(b *testing.B) {
			n := newNode(b, map[string]string{"10-pods.conflist": bridgeConf(ranges)})
			p := n.pod()
			for b.Loop() {
				n.detach(p, n.attach(p))
			}
		})
	}
}

func BenchmarkChoose(b *testing.B) {
	n := newNode(b, map[string]string{"10-pods.conflist": bridgeConf(range4), "20-ptp.conflist": ptpConf(range4)})
	for b.Loop() {
		if _, err := n.choose(); err != nil {
			b.Fatal(err)
		}
	}
}
