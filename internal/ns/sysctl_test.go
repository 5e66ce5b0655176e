package ns

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
)

func sysctl(path string) string {
	value, err := os.ReadFile("/proc/sys/" + path)
	if err != nil {
		return err.Error()
	}
	return strings.Join(strings.Fields(string(value)), " ")
}

func TestSysctls(t *testing.T) {
	t.Parallel()
	s := spec(t)
	s.Sysctls = map[string]string{
		"net.ipv4.ip_unprivileged_port_start": "0",
		"net.ipv4.ping_group_range":           "0\t2147483647", // cri-o#8174: a pod-wide default
		"net/ipv4/conf/all/log_martians":      "1",
		"net.ipv4.conf.lo.rp_filter":          "2",
		"kernel.shm_rmid_forced":              "1",
		"kernel.sem":                          "250 32000 100 128",
		"kernel.msgmax":                       "65536",
		"fs.mqueue.msg_max":                   "20",
		"kernel.domainname":                   "cluster.local",
	}
	probe := []string{"net/ipv4/ip_unprivileged_port_start", "net/ipv4/ping_group_range", "net/ipv4/conf/all/log_martians",
		"net/ipv4/conf/lo/rp_filter", "kernel/shm_rmid_forced", "kernel/sem", "kernel/msgmax", "fs/mqueue/msg_max", "kernel/domainname"}
	want := []string{"0", "0 2147483647", "1", "2", "1", "250 32000 100 128", "65536", "20", "cluster.local"}
	before := make([]string, len(probe))
	for i, path := range probe {
		before[i] = sysctl(path)
	}
	set := create(t, s)
	defer remove(t, s)
	inside(t, set, func() error {
		for i, path := range probe {
			if got := sysctl(path); got != want[i] {
				t.Errorf("%s = %q in the pod, want %q", path, got, want[i])
			}
		}
		return nil
	})
	for i, path := range probe {
		if got := sysctl(path); got != before[i] {
			t.Errorf("%s on the host went from %q to %q", path, before[i], got)
		}
	}
}

func TestInterfaceSysctls(t *testing.T) {
	t.Parallel()
	s := spec(t)
	s.Sysctls = map[string]string{"net.ipv4.conf.eth0.rp_filter": "2", "net.ipv4.conf.eth0/5.log_martians": "1"}
	set := create(t, s) // although there is no eth0 yet
	defer remove(t, s)
	if err := SetNetworkSysctls(s); !errors.Is(err, fault.Invalid) {
		t.Errorf("without the interface: %v, want fault.Invalid", err)
	}
	err := Do(set.Net, func() error {
		for _, args := range []string{"link add eth0 type veth peer name peer0", "link add eth0.5 type veth peer name peer5"} {
			if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
				return fmt.Errorf("ip %s: %w: %s", args, err, out)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := SetNetworkSysctls(s); err != nil {
		t.Fatal(err)
	}
	inside(t, set, func() error {
		if a, b := sysctl("net/ipv4/conf/eth0/rp_filter"), sysctl("net/ipv4/conf/eth0.5/log_martians"); a != "2" || b != "1" {
			t.Errorf("rp_filter %q, log_martians %q", a, b)
		}
		return nil
	})
}

// A pod's sysctls outlast network plugins that change them. Those of an interface count there, also
// if one for all interfaces is set, too.
func TestNetworkSysctlsAreSetAgain_kubernetes_87198(t *testing.T) {
	t.Parallel()
	s := spec(t)
	s.Sysctls = map[string]string{
		"net.ipv4.ip_forward": "1", "net.ipv4.conf.eth0.forwarding": "0", "net.ipv4.ip_unprivileged_port_start": "80", "kernel.msgmax": "1234",
	}
	set := create(t, s)
	defer remove(t, s)
	inside(t, set, func() error {
		out, err := exec.Command("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "peer0").CombinedOutput()
		if err != nil {
			return fmt.Errorf("ip link add: %w: %s", err, out)
		}
		return errors.Join(writeProc("/proc/sys/net/ipv4/ip_forward", "0"), writeProc("/proc/sys/net/ipv4/ip_unprivileged_port_start", "1024"))
	})
	if err := SetNetworkSysctls(s); err != nil {
		t.Fatal(err)
	}
	inside(t, set, func() error {
		for name, want := range map[string]string{
			"net/ipv4/ip_forward": "1", "net/ipv4/conf/peer0/forwarding": "1", "net/ipv4/conf/eth0/forwarding": "0", "net/ipv4/ip_unprivileged_port_start": "80",
		} {
			if got := sysctl(name); got != want {
				t.Errorf("%s is %s, want %s", name, got, want)
			}
		}
		return nil
	})
}

// CVE-2022-0532: sysctls of a pod in the host's namespaces, and sysctls that
// are never namespaced, must not reach the host. CVE-2022-0811: a value is one
// value. Nothing is made if crius or the kernel refuses a sysctl.
func TestSysctlsRefused(t *testing.T) {
	t.Parallel()
	all := Spec{Net: true, IPC: true, UTS: true}
	for _, c := range []struct {
		name, value string
		in          Spec
	}{
		{"net.ipv4.ip_forward", "1", Spec{IPC: true, UTS: true}},
		{"kernel.shmmax", "1", Spec{Net: true, UTS: true}},
		{"kernel.domainname", "x", Spec{Net: true, IPC: true}},
		{"kernel.core_pattern", "|/bin/sh", all},
		{"kernel.core_pattern", "|/proc/%P/root/x", all},
		{"kernel.shm", "1", all},
		{"kernel.shm_rmid_forced", "1\nkernel.core_pattern=x", all},
		{"kernel.shm_rmid_forced", "1+kernel.core_pattern=|/x", all},
		{"kernel.shm_rmid_forced", "1\x00", all},
		{"kernel.shm_rmid_forced", "", all},
		{"kernel.shm_rmid_forced", strings.Repeat("1", maxValue+1), all},
		{"vm.overcommit_memory", "1", all},
		{"fs.file-max", "1", all},
		{"user.max_net_namespaces", "1", all},
		{"net.does.not.exist", "1", all},
		{"net.core.bpf_jit_enable", "0", all}, // below net, and still the node's
		{"net.ipv4.ip_forward", "many", all},
		{"net", "1", all},
		{"", "1", all},
		{"net/../kernel/core_pattern", "|x", all},
		{"net.//.kernel.core_pattern", "|x", all},
		{"net..ipv4", "1", all},
		{"/net/ipv4/ip_forward", "1", all},
		{"../proc/sys/net", "1", all},
		{"net.ipv4.conf.all.forwarding\n", "1", all},
		{"net.ipv4.conf.\xff.forwarding", "1", all},
		{"kernel.domainname", strings.Repeat("d", 65), all},
		{"kernel.hostname", "a b", all},
	} {
		s := spec(t)
		s.Net, s.IPC, s.UTS, s.Hostname = c.in.Net, c.in.IPC, c.in.UTS, ""
		s.Sysctls = map[string]string{c.name: c.value}
		if _, err := Create(s); !errors.Is(err, fault.Invalid) {
			t.Errorf("%.60q = %.60q: %v, want fault.Invalid", c.name, c.value, err)
		}
		if left := remains(t, s.Dir); len(left) != 0 {
			t.Errorf("%.60q = %.60q left %q", c.name, c.value, left)
		}
	}
}

func FuzzSysctlName(f *testing.F) {
	for _, seed := range []string{"net.ipv4.ip_forward", "net/ipv4/conf/eth0.1/x", "net.ipv4.conf.eth0/1.x", "a../b", "./x", "net.//.x", "..", ""} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, name string) {
		path, err := sysctlPath(name)
		if err != nil {
			return
		}
		if got := filepath.Join("/proc/sys", path); got != "/proc/sys/"+path || !filepath.IsLocal(path) {
			t.Errorf("%q leads to %q", name, path)
		}
	})
}

// Who shares a UTS namespace may rename it; ResetUTS gives it the names of its Spec again, and leaves the node's alone.
func TestResetUTS(t *testing.T) {
	node, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	s := Spec{Dir: t.TempDir(), Name: "a", UTS: true, Hostname: "pod", Sysctls: map[string]string{"kernel.domainname": "d"}}
	set, err := Create(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = Remove(s) })
	in := func(args ...string) string {
		t.Helper()
		out, err := exec.Command("nsenter", append([]string{"--uts=" + set.UTS}, args...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("%q: %v: %s", args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	in("sh", "-c", "echo other >/proc/sys/kernel/hostname; echo other >/proc/sys/kernel/domainname")
	if err := ResetUTS(s); err != nil {
		t.Fatal(err)
	}
	if got := in("sh", "-c", "cat /proc/sys/kernel/hostname /proc/sys/kernel/domainname"); got != "pod\nd" {
		t.Errorf("the names are %q", got)
	}
	if now, err := os.Hostname(); err != nil || now != node {
		t.Errorf("the node is called %q, %v", now, err)
	}
	if err := ResetUTS(Spec{Dir: s.Dir, Name: "missing", UTS: true}); err == nil {
		t.Error("a namespace that does not exist was reset")
	}
}
