package integration

import (
	"maps"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
)

// The sysctls set by pod.unprivileged_ports and pod.unprivileged_ping, as in a
// file of a container.
var unprivileged = map[string]string{
	"net.ipv4.ip_unprivileged_port_start": "0",
	"net.ipv4.ping_group_range":           "0\t2147483647",
}

// powerless is a user with neither NET_RAW nor NET_BIND_SERVICE.
func powerless(c *cri.ContainerConfig) {
	c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: 1001}
	c.Linux.SecurityContext.RunAsGroup = &cri.Int64Value{Value: 1002}
	c.Linux.SecurityContext.Capabilities = &cri.Capability{DropCapabilities: []string{"ALL"}}
}

const pingAndListen = "ping 127.0.0.1 ; tcp :80 mute"

func TestUnprivilegedPortsAndPing(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		equal(t, "output", p.finish(t, pingAndListen, powerless), "answer of 12 bytes\nlistening :80\n")
		for name, want := range unprivileged {
			equal(t, name, strings.TrimSpace(p.finish(t, "cat /proc/sys/"+strings.ReplaceAll(name, ".", "/"))), want)
		}
	})
}

// Groups of the pod are not the node's: the range must be where they are
// mapped.
func TestUnprivilegedPingInUserNamespace(t *testing.T) {
	t.Parallel()
	w := fixed(t)
	ofPod, ofContainer := inUserNamespace()
	p := w.run(t, "runc", ofPod)
	equal(t, "output", p.finish(t, pingAndListen, powerless, ofContainer), "answer of 12 bytes\nlistening :80\n")
	equal(t, "range", strings.TrimSpace(p.finish(t, "cat /proc/sys/net/ipv4/ping_group_range", ofContainer)), "0\t65535")
}

func TestUnprivilegedPortsAndPingLeaveTheNodeAlone(t *testing.T) {
	t.Parallel()
	w := shared(t)
	before := hostSysctls(t, w, unprivileged)
	w.run(t, "crun", kubelet.HostNetwork).finish(t, "exit 0")
	if after := hostSysctls(t, w, unprivileged); !maps.Equal(before, after) {
		t.Errorf("the node's own sysctls changed from %v to %v", before, after)
	}
}

func TestUnprivilegedPortsAndPingSwitchedOff(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: "[pod]\nunprivileged_ports = false\nunprivileged_ping = false\n"})
	p := w.run(t, "crun")
	for line, want := range map[string]string{
		"ping 127.0.0.1": "open ICMP socket: permission denied",
		"tcp :80 mute":   "listen tcp :80: bind: permission denied",
	} {
		c := p.start(t, line, powerless)
		equal(t, "exit code of "+line, c.wait(t).ExitCode, 1)
		equal(t, "errors of "+line, kubelet.Text(c.log(t), "stderr"), "probe: "+want+"\n")
	}
}

// A pod's own sysctls, and those of default_sysctls, take precedence, also over plugins of the
// network that set them.
func TestUnprivilegedPortsAndPingGiveWay_kubernetes_87198(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: "pod.default_sysctls = [\"net.ipv4.ping_group_range=0 0\"]\n"})
	conf := w.Path("cni", "net.d", "10-p.conflist")
	const tuning = `{"type": "tuning", "sysctl": {"net.ipv4.ip_forward": "0", "net.ipv4.ping_group_range": "7 7", "net.ipv4.ip_local_port_range": "20000 30000"}},`
	put(t, conf, strings.Replace(read(t, conf), `{"type": "portmap"`, tuning+`{"type": "portmap"`, 1))
	asked := map[string]string{"net.ipv4.ip_unprivileged_port_start": "81", "net.ipv4.ip_forward": "1"}
	p := w.run(t, "crun", func(c *cri.PodSandboxConfig) { c.Linux.Sysctls = asked })
	c := p.start(t, "sleep")
	for name, want := range map[string]string{
		"ip_unprivileged_port_start": "81", "ip_forward": "1", "ping_group_range": "0\t0", "ip_local_port_range": "20000\t30000",
	} {
		equal(t, name, strings.TrimSpace(c.exec(t, "cat /proc/sys/net/ipv4/"+name)), want)
	}
}
